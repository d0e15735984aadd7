# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device fails at any one call of a forward: no sequence changes, and the same call made again succeeds."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import FailCall
from metrale.errors import InvalidInput, SequenceError
from metrale.model import FeedSource, PrefillSlice, SamplingParams
from metrale.nllb.model import NllbModel
from tests.backends import Device, host_only
from tests.nllb.backends import OrderedBackend
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, block, prefilled, sampled, state

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30, 31], 82, 83, [])


ENQUEUES = ("launch", "gemm", "copy_h2d", "copy_d2d")
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


def test_every_call_of_a_mixed_step(model: NllbModel, fault: FailCall) -> None:
    """Whichever part fails, both can be asked for again; a step that was enqueued already is the same once more."""
    expected: list[bytes] = []
    calls, number = 1, -1
    while number < calls:
        live, fresh = prefilled(model, ONE), begin(model, TWO)
        before, slices = [state(live), state(fresh)], [PrefillSlice.whole(TWO.tokens, fresh)]
        if expected:
            fault.arm(number)
            with pytest.raises(DeviceError, match="was to fail"):
                model.mixed_forward_batch([9], [live], slices)
            assert [state(live), state(fresh)] == before
            with pytest.raises(SequenceError, match="has not been prefilled"):
                model.decode(9, fresh)
        calls = fault.seen
        base = model.mixed_forward_batch([9], [live], slices).decode_logits
        calls = fault.seen - calls
        rows = [row(model, base, lane) for lane in range(2)]
        expected = expected or rows
        assert rows == expected
        assert (live.tokens, fresh.tokens) == ([2, 81, 9], [2, 83])
        for seq in (live, fresh):
            model.free_sequence(seq)
        number += 1
    assert calls > 80


@pytest.mark.parametrize("number", range(2))
def test_every_call_of_a_choice(model: NllbModel, fault: FailCall, number: int) -> None:
    """The copy of its parameters, and the launch: nothing is chosen, and then the same as without the failure."""
    seq = prefilled(model, ONE)
    model.begin_sampling(seq, SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=3))
    ptr = model.decode(9, seq)
    fault.arm(number)
    with pytest.raises(DeviceError, match="was to fail"):
        sampled(model, ptr, [seq])
    with pytest.raises(InvalidInput, match="has chosen an id"):
        model.decode_batch_fed([FeedSource(sampled=True)], [seq])
    first = sampled(model, ptr, [seq])
    assert first.ids == sampled(model, ptr, [seq]).ids
    model.decode_batch_fed([FeedSource(sampled=True)], [seq])
    fed = row(model, ptr)
    seq = prefilled(model, ONE)
    model.decode(9, seq)
    assert row(model, model.decode(first.ids[0], seq)) == fed


@pytest.mark.parametrize("number", range(3))
def test_a_move_that_fails_leaves_the_sequence_where_it_is(model: NllbModel, fault: FailCall, number: int) -> None:
    """With how its ids are chosen, and the one that waits."""
    done, seq = prefilled(model, TWO), prefilled(model, ONE)
    model.begin_sampling(seq, SamplingParams(suppress_tokens=tuple(range(90)), no_repeat_ngram_size=1))
    [token] = sampled(model, model.decode(9, seq), [seq]).ids
    model.free_sequence(done)
    fault.arm(number)
    with pytest.raises(DeviceError, match="was to fail"):
        model.compact_sequence(seq, 0)
    assert state(seq) == (1, [2, 81, 9], 3, 2, 80, 81)
    if number:
        model.compact_sequence(seq, 0)
        assert seq.slot_idx == 0
    ptr = model.decode_batch_fed([FeedSource(sampled=True)], [seq])
    fed = row(model, ptr)
    seq.tokens.append(token)
    seq.seq_len += 1
    [second] = sampled(model, ptr, [seq]).ids
    assert (token >= 90, second >= 90, token != second) == (True, True, True)
    seq = prefilled(model, ONE)
    model.decode(9, seq)
    assert row(model, model.decode(token, seq)) == fed


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
