# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forwards on the caller's streams: what is ordered after what, and who waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_runtime.pointer import DevicePtr
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.backends import OrderedBackend, holds
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, prefilled

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30, 31], 82, 83, [])

Forward = Callable[[NllbModel, SequenceState, int], DevicePtr]

FORWARDS: dict[str, Forward] = {
    "prefill": lambda model, seq, stream: model.prefill(ONE.tokens, seq, stream),
    "prefill_chunk": lambda model, seq, stream: model.prefill_chunk(ONE.tokens, seq, 0, 3, True, stream),
    "prefill_batch": lambda model, seq, stream: model.prefill_batch_chunk(
        [PrefillSlice.whole(ONE.tokens, seq)], stream
    )[0],
    "prefill_rows": lambda model, seq, stream: model.prefill_batch_chunk_rows(
        [PrefillSlice.whole(ONE.tokens, seq)], stream, 3
    )[0],
    "decode": lambda model, seq, stream: model.decode(9, seq, stream),
    "decode_batch": lambda model, seq, stream: model.decode_batch([9], [seq], stream),
}


@pytest.fixture
def gpu() -> OrderedBackend:
    return OrderedBackend()


@pytest.fixture
def model(gpu: OrderedBackend, make_tiny: MakeModel) -> NllbModel:
    return make_tiny(gpu)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_enqueues_on_its_stream_and_does_not_wait(model: NllbModel, gpu: OrderedBackend, name: str) -> None:
    seq = prefilled(model, ONE)
    for stream in (0, model.create_stream()):
        waited = gpu.host
        with gpu.launch_trace() as trace, gpu.noted() as work:
            FORWARDS[name](model, seq, stream)
        assert {record.stream for record in trace} == {stream or model.default_stream()}
        assert gpu.host == waited
        assert len(work) == len(trace) > 30


@pytest.mark.parametrize("first", FORWARDS)
@pytest.mark.parametrize("second", FORWARDS)
def test_a_forward_comes_after_the_last_one(model: NllbModel, gpu: OrderedBackend, first: str, second: str) -> None:
    """They share activations, whatever their streams and sequences."""
    one, two = prefilled(model, ONE), prefilled(model, TWO)
    streams = [model.create_stream(), model.create_stream()]
    with gpu.noted() as earlier:
        FORWARDS[first](model, one, streams[0])
    with gpu.noted() as later:
        FORWARDS[second](model, two, streams[1])
    assert gpu.all_before(earlier, later)


@pytest.mark.parametrize("name", FORWARDS)
def test_readers_wait_for_the_row(model: NllbModel, gpu: OrderedBackend, name: str) -> None:
    """A copy, an argmax on a third stream, and a foreign reader that waits for the row's event."""
    seq, writer, reader = prefilled(model, ONE), model.create_stream(), model.create_stream()
    with gpu.noted() as forward:
        ptr = FORWARDS[name](model, seq, writer)
    event = model.logits_event(ptr)
    foreign = model.create_stream()
    gpu.stream_wait_event(foreign, event)
    out = np.empty(97, np.float32)
    with gpu.noted() as reading:
        gpu.copy_d2h_async(ptr, out, foreign)
    assert gpu.all_before(forward, reading)
    with gpu.noted() as reading:
        token = model.argmax_on_device(ptr, reader)
    assert gpu.all_before(forward, reading)
    assert token == out.argmax()
    with gpu.noted() as forward:
        ptr = FORWARDS[name](model, seq, writer)
    with gpu.noted() as reading:
        row = model.copy_logits_to_host(ptr)
    assert gpu.all_before(forward, reading)
    assert row.argmax() == model.argmax_on_device(ptr)


def test_an_argmax_waits_for_all_its_rows(model: NllbModel, gpu: OrderedBackend) -> None:
    """Rows 4 and 5 were written by prefills on two streams; each row has an event of its own."""
    seqs = [begin(model, ONE), begin(model, TWO)]
    streams = [model.create_stream() for _ in range(3)]
    with gpu.noted() as first:
        one = model.prefill(ONE.tokens, seqs[0], streams[0])
    with gpu.noted() as second:
        two = model.prefill(TWO.tokens, seqs[1], streams[1])
    assert model.logits_event(one) != model.logits_event(two)
    with gpu.noted() as reading:
        model.argmax_batch(one, 2, streams[2])
    assert gpu.all_before(first + second, reading)


def test_the_rows_of_one_batch_share_its_event(model: NllbModel, gpu: OrderedBackend) -> None:
    """Row 2 too, though a shorter batch on another stream has followed."""
    seqs = [prefilled(model, case) for case in (ONE, TWO, ONE)]
    streams = [model.create_stream() for _ in range(3)]
    with gpu.noted() as batch:
        base = model.decode_batch([9, 10, 11], seqs, streams[0])
    model.decode(12, seqs[0], streams[1])
    last = base.offset(2 * model.logits_row_bytes())
    with gpu.noted() as reading:
        model.argmax_on_device(last, streams[2])
    assert gpu.all_before(batch, reading)


def test_every_row_of_a_batched_prefill_waits_for_it(model: NllbModel, gpu: OrderedBackend) -> None:
    slices = [PrefillSlice.whole(case.tokens, begin(model, case)) for case in (ONE, TWO, ONE)]
    streams = [model.create_stream() for _ in range(2)]
    with gpu.noted() as batch:
        ptrs = model.prefill_batch_chunk_rows(slices, streams[0], 2)
    for ptr in reversed(ptrs):
        stream = model.create_stream()
        gpu.stream_wait_event(stream, model.logits_event(ptr))
        with gpu.noted() as reading:
            gpu.copy_d2h_async(ptr, np.empty(97, np.float32), stream)
        assert gpu.all_before(batch, reading)
    with gpu.noted() as reading:
        model.argmax_on_device(ptrs[2], streams[1])
    assert gpu.all_before(batch, reading)


@pytest.mark.parametrize("name", FORWARDS)
def test_closing_waits_for_the_last_forward(gpu: OrderedBackend, make_tiny: MakeModel, name: str) -> None:
    model = make_tiny(gpu)
    seq, stream = prefilled(model, ONE), model.create_stream()
    with gpu.noted() as forward:
        FORWARDS[name](model, seq, stream)
    assert not holds(gpu.host, forward)
    gpu.host_at_free.clear()
    model.close()
    assert len(gpu.host_at_free) == 4
    assert all(holds(host, forward) for host in gpu.host_at_free)


def test_streams_and_events_are_the_backends(model: NllbModel, gpu: OrderedBackend) -> None:
    assert model.default_stream() == gpu.default_stream() != 0
    one, two, event = model.create_stream(), model.create_stream(), model.create_event()
    assert len({one, two, model.default_stream()}) == 3
    with gpu.noted() as earlier:
        model.prefill(ONE.tokens, begin(model, ONE), one)
    model.record_event(event, one)
    model.stream_wait_event(two, event)
    out = np.empty(4, np.uint8)
    with gpu.noted() as later:
        gpu.copy_d2h_async(model.logits_buffer_ptr(), out, two)
    assert gpu.all_before(earlier, later)
    assert not holds(gpu.host, earlier)
    model.synchronize(one)
    assert holds(gpu.host, earlier)
