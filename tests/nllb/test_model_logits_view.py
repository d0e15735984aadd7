# SPDX-License-Identifier: MIT OR Apache-2.0
"""Logits rows that others take without a copy: the right ones, when they are written, for as long as they need."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime import InvalidPointer, dtypes, from_dlpack, view
from gpu_runtime.host import HostBackend
from metrale.errors import InvalidInput, SequenceError
from metrale.nllb.model import NllbModel
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.nllb.decoding import Case, prefilled

CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, []), Case([], 84, 85, [])]


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def stepped(request: pytest.FixtureRequest, make_tiny: MakeModel) -> NllbModel:
    """A model of each type whose rows 0 to 2 hold a decode step."""
    model = make_tiny(dtype=request.param)
    model.decode_batch([9, 10, 11], [prefilled(model, case) for case in CASES])
    return model


def base(model: NllbModel, row: int = 0) -> Any:
    return model.logits_buffer_ptr().offset(row * model.logits_row_bytes())


def test_what_it_is(stepped: NllbModel) -> None:
    name = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[stepped.logits_dtype()]
    for row, count in ((0, 1), (0, 3), (2, 1), (1, 7)):
        with stepped.logits_view(base(stepped, row), count) as rows:
            assert (rows.ptr, rows.shape, rows.dtype) == (base(stepped, row), (count, 97), name)
            assert rows.strides[0] == stepped.logits_row_bytes()
            assert not rows.readonly


def test_the_rows_are_those_that_are_read(stepped: NllbModel) -> None:
    """Through a packed copy, which works for every type and on a GPU too."""
    wanted = [stepped.copy_logits_to_host(base(stepped, row)) for row in range(3)]
    with stepped.logits_view(base(stepped), 3) as rows, rows.copy() as packed:
        got = np.empty((3, 97), dtype=dtypes.NUMPY[rows.dtype])
        stepped.gpu.copy_d2h(packed.ptr, got)
    np.testing.assert_array_equal(got.astype(np.float32), wanted)


@host_only
def test_numpy_takes_them_and_masks_them(tiny: NllbModel) -> None:
    """What is written into the array is what the next choice is made of."""
    seqs = [prefilled(tiny, case) for case in CASES[:2]]
    ptr = tiny.decode_batch([9, 10], seqs)
    first = tiny.argmax_batch(ptr, 2)
    rows = np.asarray(tiny.logits_view(ptr, 2))
    assert rows.ctypes.data == ptr
    assert rows.argmax(axis=1).tolist() == first
    rows[0, first[0]] = -np.inf
    ranked = np.argsort(-rows[0], kind="stable")
    ids, bad = tiny.argmax_rows(ptr, 2)
    assert ids == [ranked[0], first[1]]
    assert ids[0] != first[0]
    assert bad == [0], "an infinity is still no logit"
    rows[0, first[0]] = rows[0].min(initial=0, where=np.isfinite(rows[0])) - 1
    assert tiny.argmax_batch(ptr, 2) == [ranked[0], first[1]]


@pytest.mark.parametrize("order", ["deferred", "adversarial"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_importer_waits_for_the_forward(tiny_folder: Any, order: Any, stream: bool) -> None:
    """On a backend that runs work as late as it may, and on whatever stream the view is asked for."""
    with open_host(order=order) as gpu:
        limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
        with metrale.load(tiny_folder, gpu, "float32", **limits) as model:
            seq, writer = prefilled(model, CASES[0]), model.create_stream()
            reader = model.create_stream() if stream else 0
            ptr = model.decode(9, seq, writer)
            row = np.from_dlpack(model.logits_view(ptr, stream=reader)).copy()[0]
            np.testing.assert_array_equal(row, model.copy_logits_to_host(ptr))


def test_a_model_with_exports_is_not_closed(tiny: NllbModel) -> None:
    """It goes on as if nothing had been asked, and is closed once they are gone."""
    seq = prefilled(tiny, CASES[0])
    ptr = tiny.decode(9, seq)
    row = tiny.logits_view(ptr)
    export, blocks = row.__dlpack__(), tiny.gpu.live_alloc_count()
    for close in (tiny.close, tiny.teardown):
        with pytest.raises(BufferError, match="close: 1 live export of the model's memory"):
            close()
    assert tiny.gpu.live_alloc_count() == blocks
    assert tiny.argmax_on_device(tiny.decode(10, seq)) >= 0
    del export
    tiny.close()
    with pytest.raises(InvalidPointer, match="a block that was freed"):
        _ = row.ptr
    with pytest.raises(SequenceError, match="closed"):
        tiny.logits_view(ptr)


def test_exports_of_other_memory_do_not_hinder(make_tiny: MakeModel) -> None:
    """Where the model does not own the backend."""
    model = make_tiny()
    export = view(model.gpu, model.gpu.alloc(16), 4, "f32").__dlpack__()
    model.close()
    del export
    model.gpu.sweep_unreleased()


def test_exports_of_a_backend_that_the_model_owns(tiny_folder: Any) -> None:
    limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
    model = metrale.load(tiny_folder, "host", "float32", **limits)
    assert isinstance(model.gpu, HostBackend)
    export = view(model.gpu, model.gpu.alloc(16), 4, "f32").__dlpack__()
    with pytest.raises(BufferError, match="close: 1 live export"):
        model.close()
    del export
    model.close()


def test_a_model_is_closed_after_its_backend(tiny_folder: Any) -> None:
    """Nothing can be exported then; the model says what the backend says."""
    gpu = open_host()
    limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
    model = metrale.load(tiny_folder, gpu, "float32", **limits)
    gpu.close()
    with pytest.raises(Exception, match="the backend is closed"):
        model.close()
    model.close()


@pytest.mark.parametrize("n", [0, 9, -1, 1.5, True])
def test_wrong_counts(tiny: NllbModel, n: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        tiny.logits_view(tiny.logits_buffer_ptr(), n)
    assert refused.value.argument == "n"


@pytest.mark.parametrize("offset", [4, -512, 8 * 512])
def test_wrong_addresses(tiny: NllbModel, offset: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        tiny.logits_view(tiny.logits_buffer_ptr().offset(offset))
    assert refused.value.argument == "ptr"


def test_a_view_of_a_view(tiny: NllbModel) -> None:
    """An import of our own rows is the same memory, and is counted as long as it is open."""
    ptr = tiny.decode(9, prefilled(tiny, CASES[0]))
    with from_dlpack(tiny.gpu, tiny.logits_view(ptr)) as row:
        assert row.ptr == ptr
        with pytest.raises(BufferError, match="1 live export"):
            tiny.close()
    gc.collect()
    tiny.close()
