# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device fails at any one call of a forward: no sequence changes, and the same call made again succeeds."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import FailCall
from metrale.errors import SequenceError
from metrale.model import PrefillSlice
from metrale.nllb.model import NllbModel
from tests.backends import Device, host_only
from tests.nllb.backends import OrderedBackend
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, block, prefilled, state

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30, 31], 82, 83, [])


ENQUEUES = ("launch", "gemm", "copy_h2d")
"""The kinds of calls that a forward is made of, besides events."""


@pytest.fixture(scope="module")
def fault() -> FailCall:
    """What fails a call of a forward; not armed."""
    return FailCall(ENQUEUES, nth=None)


@pytest.fixture(scope="module")
def faulty(device: Device, fault: FailCall) -> Iterator[GpuBackend]:
    with device.open(faults=(fault,)) as backend:
        yield backend


@pytest.fixture
def model(faulty: GpuBackend, make_tiny: MakeModel) -> NllbModel:
    return make_tiny(faulty)


def row(model: NllbModel, ptr: int, index: int = 0) -> bytes:
    base = model.logits_buffer_ptr()
    return model.copy_logits_to_host(base.offset(ptr - base + index * model.logits_row_bytes())).tobytes()


def test_every_call_of_a_prefill(model: NllbModel, fault: FailCall) -> None:
    """Fresh sequences stay fresh, a live neighbour that is not part of it goes on with the same bits."""
    neighbour, first, second = prefilled(model, TWO), begin(model, ONE), begin(model, TWO)
    slices = [PrefillSlice.whole(ONE.tokens, first), PrefillSlice.whole(TWO.tokens, second)]
    calls = fault.seen
    ptrs = model.prefill_batch_chunk_rows(slices, 0, 2)
    calls = fault.seen - calls
    assert calls > 50
    expected = [row(model, ptr) for ptr in ptrs]
    step = row(model, model.decode_batch([9, 10], [first, second]), 1)
    next_of_neighbour = row(model, model.decode(20, neighbour))
    for number in range(calls):
        for seq in (neighbour, first, second):
            model.free_sequence(seq)
        neighbour, first, second = prefilled(model, TWO), begin(model, ONE), begin(model, TWO)
        slices = [PrefillSlice.whole(ONE.tokens, first), PrefillSlice.whole(TWO.tokens, second)]
        before = [state(seq) for seq in (neighbour, first, second)]
        fault.arm(number)
        with pytest.raises(DeviceError, match="was to fail"):
            model.prefill_batch_chunk_rows(slices, 0, 2)
        assert [state(seq) for seq in (neighbour, first, second)] == before
        for seq in (first, second):
            with pytest.raises(SequenceError, match="has not been prefilled"):
                model.decode(9, seq)
        assert row(model, model.decode(20, neighbour)) == next_of_neighbour
        assert [row(model, ptr) for ptr in model.prefill_batch_chunk_rows(slices, 0, 2)] == expected
        assert row(model, model.decode_batch([9, 10], [first, second]), 1) == step


def test_every_call_of_a_decode_step(model: NllbModel, fault: FailCall) -> None:
    gpu = model.gpu
    seqs = [prefilled(model, ONE), prefilled(model, TWO)]
    model.decode_batch([8, 8], seqs)
    before, kv = [state(seq) for seq in seqs], block(gpu, "KV cache")
    calls = fault.seen
    base = model.decode_batch([9, 10], seqs)
    calls = fault.seen - calls
    assert calls > 30
    expected, kv_after = [row(model, base, lane) for lane in range(2)], block(gpu, "KV cache")
    assert kv_after != kv
    for number in range(calls):
        for seq in seqs:
            model.free_sequence(seq)
        seqs = [prefilled(model, ONE), prefilled(model, TWO)]
        model.decode_batch([8, 8], seqs)
        assert [state(seq) for seq in seqs] == before
        fault.arm(number)
        with pytest.raises(DeviceError, match="was to fail"):
            model.decode_batch([9, 10], seqs)
        assert [state(seq) for seq in seqs] == before
        # Only the positions that the step was about to write may differ, and they end up as they would have been.
        base = model.decode_batch([9, 10], seqs)
        assert [row(model, base, lane) for lane in range(2)] == expected
        assert block(gpu, "KV cache") == kv_after


@pytest.mark.parametrize("number", [0, 1, 25, 50])
def test_a_failed_second_prefill_empties_the_sequence(model: NllbModel, fault: FailCall, number: int) -> None:
    """Its KV may be half of either source: it cannot be decoded until a prefill succeeds."""
    seq, neighbour = prefilled(model, ONE), prefilled(model, TWO)
    model.decode_batch([9, 9], [seq, neighbour])
    fault.arm(number)
    with pytest.raises(DeviceError):
        model.prefill(TWO.tokens, seq)
    assert state(seq) == (0, [], 0, 0, 80, 81)
    with pytest.raises(SequenceError, match="has not been prefilled"):
        model.decode_batch([9, 9], [neighbour, seq])
    with pytest.raises(SequenceError, match="has not been prefilled"):
        model.save_sequence_state(seq, io.BytesIO())
    model.decode(9, neighbour)
    model.prefill(ONE.tokens, seq)
    assert state(seq) == (0, [2, 81], 2, 2, 80, 81)


@host_only
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_the_next_forward_comes_after_what_a_failed_one_left_behind(make_tiny: MakeModel, call: str) -> None:
    """The failed call's work is still on its stream, and uses the activations that the next one overwrites."""
    fault = FailCall(ENQUEUES, nth=None)
    gpu = OrderedBackend(faults=(fault,))
    model = make_tiny(gpu)
    seq, other = prefilled(model, ONE), prefilled(model, TWO)
    streams = [model.create_stream(), model.create_stream()]
    fault.arm(20)
    with gpu.noted() as failed, pytest.raises(DeviceError):
        model.prefill(ONE.tokens, seq, streams[0]) if call == "prefill" else model.decode(9, seq, streams[0])
    with gpu.noted() as later:
        model.decode(9, other, streams[1])
    assert len(failed) == 20
    assert gpu.all_before(failed, later)
