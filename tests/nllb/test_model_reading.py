# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading logits by address: copies, argmax, ties, rows that are not finite, and wrong addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.errors import InvalidInput, NonFiniteLogits
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, begin, poke, prefilled
from tests.reference.tiny import tiny_config, tiny_tensors, write_tiny

CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, []), Case([], 84, 85, [])]


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def stepped(request: pytest.FixtureRequest, make_tiny: MakeModel) -> NllbModel:
    """A model of each dtype whose rows 0 to 2 hold a decode step, and rows 4 to 6 prefills."""
    model = make_tiny(dtype=request.param)
    model.decode_batch([9, 10, 11], [prefilled(model, case) for case in CASES])
    return model


def test_copies_are_float32_whatever_the_rows_are(stepped: NllbModel) -> None:
    rows = arena(stepped)
    size = stepped.logits_row_bytes()
    for index in (0, 1, 2, 4, 6):
        ptr = stepped.logits_buffer_ptr().offset(index * size)
        row = stepped.copy_logits_to_host(ptr)
        assert row.dtype == np.float32
        assert row.shape == (97,)
        np.testing.assert_array_equal(row, rows[index, :97].astype(np.float32))
        out = np.zeros(97, np.float32)
        assert stepped.copy_logits_to_host(ptr, out) is out
        np.testing.assert_array_equal(out, row)
        strided = np.zeros((97, 2), np.float32)
        stepped.copy_logits_to_host(ptr, strided[:, 1])
        np.testing.assert_array_equal(strided, np.stack([np.zeros(97), row], axis=1))
        stepped.copy_logits_to_host(ptr, out=out)


def read_only() -> np.ndarray:
    out = np.zeros(97, np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(96, np.float32),
        np.zeros(128, np.float32),
        np.zeros((1, 97), np.float32),
        np.zeros(97, np.float64),
        np.zeros(97, np.int32),
        [0.0] * 97,
        bytearray(388),
        read_only(),
    ],
    ids=["short", "padded", "two axes", "float64", "int32", "list", "bytearray", "read-only"],
)
def test_a_wrong_out_is_refused(tiny: NllbModel, out: Any) -> None:
    ptr = tiny.prefill([5], begin(tiny, CASES[0]))
    with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        tiny.copy_logits_to_host(ptr, out)
    assert refused.value.argument == "out"
    assert not trace


def test_argmax_is_the_hosts_argmax(stepped: NllbModel) -> None:
    rows, size = arena(stepped)[:, :97].astype(np.float32), stepped.logits_row_bytes()
    base = stepped.logits_buffer_ptr()
    expected = rows.argmax(axis=1).tolist()
    assert len(set(expected[:3] + expected[4:7])) > 2
    assert stepped.argmax_batch(base, 3) == expected[:3]
    assert stepped.argmax_batch(base.offset(size), 2) == expected[1:3]
    assert stepped.argmax_batch(base.offset(4 * size), 3) == expected[4:7]
    assert stepped.argmax_rows(base, 3) == (expected[:3], [])
    for index in (0, 2, 5):
        token = stepped.argmax_on_device(base.offset(index * size))
        assert (token, type(token)) == (expected[index], int)


def test_the_lowest_id_wins_a_tie(stepped: NllbModel) -> None:
    poke(stepped, 0, {96: 1000.0, 40: 1000.0, 41: 1000.0})
    poke(stepped, 1, {96: 1000.0})
    poke(stepped, 2, {0: 1000.0, 96: 1000.0})
    assert stepped.argmax_batch(stepped.logits_buffer_ptr(), 3) == [40, 96, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 50, 96])
def test_rows_that_are_not_finite_are_named_and_their_neighbours_are_sound(
    stepped: NllbModel, value: float, column: int
) -> None:
    base, size = stepped.logits_buffer_ptr(), stepped.logits_row_bytes()
    expected = stepped.argmax_batch(base, 3)
    poke(stepped, 1, {column: value})
    with pytest.raises(NonFiniteLogits, match=r"in rows 1$") as bad:
        stepped.argmax_batch(base, 3)
    assert bad.value.rows == (1,)
    ids, rows = stepped.argmax_rows(base, 3)
    assert rows == [1]
    assert (ids[0], ids[2]) == (expected[0], expected[2])
    assert 0 <= ids[1] < 97
    with pytest.raises(NonFiniteLogits) as bad:
        stepped.argmax_on_device(base.offset(size))
    assert bad.value.rows == (0,)
    assert stepped.argmax_on_device(base) == expected[0]
    poke(stepped, 2, {5: np.nan})
    with pytest.raises(NonFiniteLogits, match="rows 0, 1") as bad:
        stepped.argmax_batch(base.offset(size), 2)
    assert bad.value.rows == (0, 1)
    row = stepped.copy_logits_to_host(base.offset(size))
    np.testing.assert_equal(row[column], np.float32(value))


def test_a_poked_row_is_overwritten_by_the_next_step(tiny: NllbModel) -> None:
    seq = prefilled(tiny, CASES[0])
    tiny.decode(9, seq)
    poke(tiny, 0, {3: np.nan})
    tiny.argmax_on_device(tiny.decode(10, seq))


def test_a_checkpoint_with_a_nan_is_served_and_every_row_named(tmp_path: Path, gpu: GpuBackend) -> None:
    """As a checkpoint that training broke: no crash, no token."""
    folder = write_tiny(tmp_path / "model", 3)
    tensors = tiny_tensors(3, tiny_config())
    tensors["model.decoder.layers.1.fc2.bias"][7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with metrale.load(folder, gpu, "float32", max_batch=2, max_source_len=8, max_new_tokens=4) as model:
        seqs = [prefilled(model, case) for case in CASES[:2]]
        with pytest.raises(NonFiniteLogits) as bad:
            model.argmax_batch(model.decode_batch([9, 10], seqs), 2)
        assert bad.value.rows == (0, 1)
        assert [seq.tokens for seq in seqs] == [[2, 81, 9], [2, 83, 10]]


@pytest.mark.parametrize("offset", [-512, 1, 4, 508, 8 * 512, 1 << 40])
def test_what_is_no_rows_address_is_refused(tiny: NllbModel, offset: int) -> None:
    ptr = tiny.logits_buffer_ptr().offset(offset)
    assert_refused(tiny, ptr)


@pytest.mark.parametrize("ptr", [0, -1, 1 << 64, None, "row", 1.5, True])
def test_what_is_no_address_is_refused(tiny: NllbModel, ptr: Any) -> None:
    assert_refused(tiny, ptr)


def assert_refused(model: NllbModel, ptr: Any) -> None:
    calls = (
        lambda: model.copy_logits_to_host(ptr),
        lambda: model.argmax_on_device(ptr),
        lambda: model.argmax_batch(ptr, 1),
        lambda: model.logits_event(ptr),
        lambda: model.logits_ptr_is_fp32(ptr),
    )
    with model.gpu.launch_trace() as trace:
        for call in calls:
            with pytest.raises(InvalidInput) as refused:
                call()
            assert refused.value.argument == "ptr"
    assert not trace


@pytest.mark.parametrize(("row", "count"), [(0, 9), (0, 0), (0, -1), (7, 2), (5, 4), (0, 2.0), (0, None)])
def test_more_rows_than_there_are_is_refused(tiny: NllbModel, row: int, count: Any) -> None:
    ptr = tiny.logits_buffer_ptr().offset(row * tiny.logits_row_bytes())
    with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput):
        tiny.argmax_batch(ptr, count)
    assert not trace


def test_every_row_can_be_read_at_once(tiny: NllbModel) -> None:
    for row in range(8):
        poke(tiny, row, {column: float(column == row) for column in range(97)})
    assert tiny.argmax_batch(tiny.logits_buffer_ptr(), 8) == list(range(8))
    poke(tiny, 7, {0: np.inf})
    assert tiny.argmax_rows(tiny.logits_buffer_ptr(), 8)[1] == [7]
