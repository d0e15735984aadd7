# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `decode_attention` finds through an ancestry, what it refuses, and that it can do without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import AddressTable, GpuBackend
from gpu_runtime.errors import InvalidPointer
from metrale.ops import decode_attention
from metrale.ops.decode_attention import OP, make_inputs
from tests.backends import host_only
from tests.ops.harness import download, run, upload

TABLES = ("ancestry", "ancestry_index", "beam_positions")


def gathered(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same attention without ancestries: each row's positions copied into a span of its own."""
    stride, longest = inputs["kv_stride"], int(inputs["lengths"].max())
    pool, starts = inputs["spans"].pool, inputs["spans"].starts
    own = np.zeros((len(starts), longest, stride), dtype=pool.dtype)
    for row, (start, length) in enumerate(zip(starts, inputs["lengths"], strict=True)):
        for position in range(length):
            index = inputs["ancestry_index"][row]
            beam = inputs["ancestry"][index, position] * inputs["beam_positions"][row] if index >= 0 else 0
            at = int(start) + (int(beam) + position) * stride
            own[row, position] = pool[at : at + stride]
    table = AddressTable(own.ravel(), np.arange(len(starts)) * longest * stride)
    return {**inputs, **dict.fromkeys(TABLES), "spans": table, "ancestry_rows": 0, "ancestry_capacity": 0}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("head_dim", "regular"), [(64, True), (64, False), (5, True), (128, True), (200, True)])
def test_a_row_has_the_same_bits_however_its_keys_are_reached(
    gpu: GpuBackend, dtype: str, head_dim: int, regular: bool
) -> None:
    case: dict[str, Any] = {"lengths": (40, 17, 70, 5), "heads": 2, "beams": (4, 0, 2, 3), "spread": 5.0}
    rng = np.random.default_rng(head_dim)
    inputs = dict(make_inputs(rng, dtype, **case, head_dim=head_dim, regular=regular))
    found, expected = run(OP, gpu, dtype, inputs)["out"], run(OP, gpu, dtype, gathered(inputs))["out"]
    assert np.isfinite(found.astype(np.float32)).all()
    assert found.tobytes() == expected.tobytes()


def test_beams_share_a_span(gpu: GpuBackend) -> None:
    """Three beams that branched at position 2: each has the first two from beam 0, and its own after."""
    pool = np.arange(3 * 6 * 2, dtype=np.float32).reshape(3, 6, 2)
    pool[:, :, 0] = 0.0  # all keys alike: the result is the mean of the values
    past = -5  # no beam, and past every length
    inputs = {
        **make_inputs(np.random.default_rng(0), "f32", lengths=(4, 4, 4), heads=1, head_dim=1, layers=1, layer=0),
        "spans": AddressTable(pool.ravel(), np.zeros(3, np.int64)),
        "ancestry": np.array([[0, 0, beam, beam, past] for beam in range(3)], np.int32),
        "ancestry_index": np.arange(3, dtype=np.int32),
        "beam_positions": np.full(3, 6, np.int32),
        "ancestry_rows": 3,
        "ancestry_capacity": 5,
    }
    values = pool[:, :, 1]
    expected = [np.mean([values[0, 0], values[0, 1], values[beam, 2], values[beam, 3]]) for beam in range(3)]
    assert run(OP, gpu, "f32", inputs)["out"].ravel().tolist() == expected


def test_the_launcher_does_without_ancestries(gpu: GpuBackend) -> None:
    values: Any = make_inputs(np.random.default_rng(0), "f32", lengths=(1,), heads=1, head_dim=4, layers=1, layer=0)
    q, lengths, out = (upload(gpu, values[name]) for name in ("q", "lengths", "out"))
    pool = upload(gpu, values["spans"].pool)
    spans = upload(gpu, np.array([int(pool)], np.uint64))
    sizes = {name: values[name] for name in ("rows", "heads", "head_dim", "q_stride", "k_offset", "v_offset", "scale")}
    decode_attention(gpu, q, spans, lengths, out, **sizes, kv_stride=values["kv_stride"], dtype="f32")
    assert download(gpu, out, values["out"]).ravel().tolist() == values["spans"].pool[4:].tolist()


@pytest.mark.parametrize("given", [TABLES[:1], TABLES[1:2], TABLES[2:], TABLES[:2], TABLES[1:], TABLES[::2]])
def test_some_of_the_tables_alone_are_refused(gpu: GpuBackend, given: tuple[str, ...]) -> None:
    missing = next(name for name in TABLES if name not in given)
    sizes = {"rows": 1, "heads": 1, "head_dim": 1, "q_stride": 1, "k_offset": 0, "v_offset": 0, "kv_stride": 1}
    tables: Any = dict.fromkeys(given, 64)
    with pytest.raises(ValueError, match=f"decode_attention: {missing}: expected an address, as {given[0]} has one"):
        decode_attention(gpu, 64, 64, 64, 64, **sizes, scale=1.0, dtype="f32", **tables)


def refused(**changes: Any) -> dict[str, Any]:
    """Return the op's parameters for two beams of three positions, with ``changes``."""
    inputs = make_inputs(np.random.default_rng(0), "f32", lengths=(3, 2), heads=1, head_dim=2, beams=(2, 2))
    tables = {
        "ancestry": [[0, 1, 0, 1], [1, 0, 9, 9]],
        "ancestry_index": [0, 1],
        "beam_positions": [3, 3],
        **changes,
    }
    arrays = {name: np.array(table, np.int32) for name, table in tables.items()}
    rows, capacity = arrays["ancestry"].shape
    return {**inputs, **arrays, "ancestry_rows": rows, "ancestry_capacity": capacity}


@host_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ancestry_index": [0, 2]}, r"ancestry_index: expected rows in \[0, 2\), or less than 0 for none, got 2"),
        ({"ancestry": [[0, 1], [1, 0]]}, r"lengths: expected at most the 2 positions of an ancestry.* got 3 in row 0"),
        ({"beam_positions": [3, 1]}, r"lengths: expected .* the 1 of a beam's storage, got 2 in row 1"),
        ({"ancestry": [[0, 1, 0], [-1, 0, 0]]}, r"ancestry: expected beams of at least 0, got -1"),
        ({"ancestry": [[0, 1, 1 << 20], [0, 0, 0]]}, r"address table: "),
        ({"lengths": [3, 0]}, r"lengths: expected at least 1 key a row, got 0"),
    ],
)
def test_what_is_outside_a_table_is_refused(gpu: GpuBackend, changes: dict[str, Any], message: str) -> None:
    run(OP, gpu, "f32", refused())
    with pytest.raises(InvalidPointer, match=f"decode_attention: {message}"):
        run(OP, gpu, "f32", refused(**changes))
