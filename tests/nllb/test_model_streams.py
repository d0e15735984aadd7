# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forwards on the caller's streams: what is ordered after what, and who waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from metrale.model import FeedSource, PrefillSlice, RowMask, SequenceState
from metrale.nllb.model import NllbModel
from tests.draws import draws
from tests.nllb.backends import OrderedBackend, holds
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, prefilled, results

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


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def model(request: pytest.FixtureRequest, gpu: OrderedBackend, make_tiny: MakeModel) -> NllbModel:
    """One whose steps of a sequence are replayed, or one that launches all of them op by op."""
    found = make_tiny(gpu, step_graphs=request.param)
    seq = prefilled(found, ONE)
    for token in (9, 10):
        found.decode(token, seq)
    found.free_sequence(seq)
    return found


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


NAMES = [*FORWARDS]
PAIRS = [(first, NAMES[(at + ahead) % len(NAMES)]) for ahead in range(len(NAMES)) for at, first in enumerate(NAMES)]


@pytest.mark.parametrize(("first", "second"), draws(PAIRS, 3 * len(NAMES)))
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
    """Row 0 was written by a decode step, row 1 by a prefill beside it: each has its own event."""
    decoding, fresh = prefilled(model, ONE), begin(model, TWO)
    streams = [model.create_stream() for _ in range(2)]
    with gpu.noted() as step:
        result = model.mixed_forward_batch([9], [decoding], [PrefillSlice.whole(TWO.tokens, fresh)], streams[0])
    assert model.logits_event(result.decode_logits) != model.logits_event(result.prefill_logits[0])
    with gpu.noted() as reading:
        model.argmax_batch(result.decode_logits, 2, streams[1])
    assert gpu.all_before(step, reading)


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
def test_closing_does_not_wait(gpu: OrderedBackend, make_tiny: MakeModel, name: str) -> None:
    """What is enqueued may use memory that is freed: that is the backends' affair."""
    model = make_tiny(gpu)
    FORWARDS[name](model, prefilled(model, ONE), model.create_stream())
    waited = gpu.host
    model.close()
    assert gpu.host == waited
    assert gpu.live_alloc_count() == 0


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


def mixed(model: NllbModel, gpu: OrderedBackend, *args: Any, fed: bool = False) -> dict[int, list[int]]:
    """Make a mixed call, which must not wait on the host, and return the numbers of its work by stream."""
    waited = gpu.host
    parts: dict[int, list[int]] = {}
    with gpu.launch_trace() as trace, gpu.noted() as work:
        (model.mixed_forward_batch_fed if fed else model.mixed_forward_batch)(*args)
    assert gpu.host == waited
    for record, node in zip(trace, work, strict=True):
        parts.setdefault(record.stream, []).append(node)
    return parts


def whole(*seqs: SequenceState) -> list[PrefillSlice]:
    return [PrefillSlice.whole(TWO.tokens, seq) for seq in seqs]


def after(gpu: OrderedBackend, model: NllbModel, stream: int) -> list[int]:
    """Return the number of a new piece of work on ``stream``."""
    with gpu.noted() as work:
        gpu.copy_d2h_async(model.logits_buffer_ptr(), np.empty(1, np.float32), stream)
    return work


def apart(gpu: OrderedBackend, one: list[int], other: list[int]) -> bool:
    """Return whether no piece of either is ordered after a piece of the other."""
    mine, theirs = (sum(1 << node for node in nodes) for nodes in (one, other))
    return not any(gpu.before[node] & theirs for node in one) and not any(gpu.before[node] & mine for node in other)


@pytest.mark.parametrize("fed", [False, True])
def test_both_parts_may_run_at_once_and_later_work_comes_after_both(
    model: NllbModel, gpu: OrderedBackend, fed: bool
) -> None:
    stream, default = model.create_stream(), model.default_stream()
    decoding, fresh = [prefilled(model, ONE) for _ in range(2)], [begin(model, TWO) for _ in range(2)]
    ids: list[Any] = [FeedSource(9), FeedSource(10)] if fed else [9, 10]
    parts = mixed(model, gpu, ids, decoding, whole(*fresh), stream, fed=fed)
    assert set(parts) == {default, stream}
    assert min(map(len, parts.values())) > 30
    assert apart(gpu, parts[default], parts[stream])
    assert gpu.all_before(parts[default] + parts[stream], after(gpu, model, stream))


@pytest.mark.parametrize("fed", [False, True])
def test_without_a_prefill_later_work_still_comes_after_the_step(
    model: NllbModel, gpu: OrderedBackend, fed: bool
) -> None:
    seq, stream, default = prefilled(model, ONE), model.create_stream(), model.default_stream()
    parts = mixed(model, gpu, [FeedSource(9)] if fed else [9], [seq], [], stream, fed=fed)
    assert set(parts) == {default}
    assert gpu.all_before(parts[default], after(gpu, model, stream))


def test_both_parts_on_one_stream(model: NllbModel, gpu: OrderedBackend) -> None:
    seq, fresh, stream = prefilled(model, ONE), begin(model, TWO), model.create_stream()
    assert set(mixed(model, gpu, [9], [seq], whole(fresh), 0)) == {model.default_stream()}
    with gpu.launch_trace() as trace:
        model.mixed_forward([9], [seq], [5], fresh, 0, 1, True, stream)
    assert {record.stream for record in trace} == {stream}


def test_the_first_step_of_a_new_sequence_comes_after_its_prefill(model: NllbModel, gpu: OrderedBackend) -> None:
    """Also when it is one lane of several, and another's first step has come meanwhile."""
    old, fresh = [prefilled(model, ONE) for _ in range(2)], [begin(model, TWO) for _ in range(2)]
    model.decode_batch([9, 9], old)
    first, second = model.create_stream(), model.create_stream()
    parts = mixed(model, gpu, [9, 9], old, whole(*fresh), first)
    for lanes in ([old[0], fresh[1]], [fresh[0]]):
        with gpu.noted() as step:
            model.decode_batch([20] * len(lanes), lanes, second)
        assert gpu.all_before(parts[first], step)


def test_a_step_of_others_does_not_wait_for_a_prefill(model: NllbModel, gpu: OrderedBackend) -> None:
    """Else the two would never run at once: each prefill would hold up the step after it."""
    seqs, fresh, stream = [prefilled(model, ONE) for _ in range(2)], begin(model, TWO), model.create_stream()
    model.decode_batch([9, 9], seqs)
    parts = mixed(model, gpu, [9, 9], seqs, whole(fresh), stream)
    with gpu.noted() as step:
        model.decode_batch([9, 9], seqs)
    assert apart(gpu, parts[stream], step)


def test_a_step_that_writes_a_prefills_row_comes_after_it(model: NllbModel, gpu: OrderedBackend) -> None:
    """Three lanes, of which none was prefilled just now, over row 2, which a prefill wrote."""
    seqs, fresh = [prefilled(model, ONE) for _ in range(3)], begin(model, TWO)
    model.decode_batch([9] * 3, seqs)
    first, second = model.create_stream(), model.create_stream()
    parts = mixed(model, gpu, [9, 9], seqs[:2], whole(fresh), first)
    with gpu.noted() as step:
        model.decode_batch([9] * 3, seqs, second)
    assert gpu.all_before(parts[first], step)


def test_a_mixed_prefill_comes_after_earlier_steps_and_prefills(model: NllbModel, gpu: OrderedBackend) -> None:
    """Its span may be one that they read, and its rows are ones that they wrote."""
    seqs, fresh = [prefilled(model, ONE) for _ in range(2)], [begin(model, TWO) for _ in range(2)]
    streams = [model.create_stream() for _ in range(3)]
    with gpu.noted() as step:
        model.decode_batch([9, 9], seqs, streams[0])
    with gpu.noted() as prefill:
        model.prefill(TWO.tokens, fresh[0], streams[1])
    parts = mixed(model, gpu, [9, 9], seqs, whole(fresh[1]), streams[2])
    assert gpu.all_before(step + prefill, parts[streams[2]])


CHOICES: dict[str, Callable[[NllbModel, list[SequenceState], NDArray[np.int32], int, int], None]] = {
    "argmax_batch_to_feed": lambda model, seqs, dst, event, stream: model.argmax_batch_to_feed(
        model.logits_buffer_ptr(), [RowMask()] * len(seqs), dst[0], event, stream
    ),
    "sample_batch_to_feed": lambda model, seqs, dst, event, stream: model.sample_batch_to_feed(
        model.logits_buffer_ptr(), seqs, dst, event, stream
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_both_parts_come_after_readers_of_rows_and_before_later_ones(
    model: NllbModel, gpu: OrderedBackend, choice: str
) -> None:
    seqs, fresh = [prefilled(model, ONE) for _ in range(3)], begin(model, TWO)
    streams = [model.create_stream() for _ in range(3)]
    model.decode_batch([9] * 3, seqs)
    waited = gpu.host
    with results(model, 3, 3) as (dst, event):
        with gpu.noted() as earlier:
            CHOICES[choice](model, seqs, dst, event, streams[0])
        parts = mixed(model, gpu, [9, 9], seqs[:2], whole(fresh), streams[1])
        with gpu.noted() as later:
            CHOICES[choice](model, [*seqs[:2], fresh], dst, event, streams[2])
        assert gpu.host == waited
    for part in parts.values():
        assert gpu.all_before(earlier, part)
        assert gpu.all_before(part, later)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_fed_step_comes_after_the_choice_and_the_next_choice_after_the_step(
    model: NllbModel, gpu: OrderedBackend, choice: str
) -> None:
    """The step reads the cells that the choice writes."""
    seqs, streams = [prefilled(model, ONE) for _ in range(2)], [model.create_stream() for _ in range(3)]
    model.decode_batch([9, 9], seqs)
    source = FeedSource(from_row=1) if choice == "argmax_batch_to_feed" else FeedSource(sampled=True)
    with results(model, 3, 2) as (dst, event):
        with gpu.noted() as first:
            CHOICES[choice](model, seqs, dst, event, streams[0])
        with gpu.noted() as step:
            model.decode_batch_fed([source], seqs[1:], streams[1])
        with gpu.noted() as second:
            CHOICES[choice](model, seqs, dst, event, streams[2])
    assert gpu.all_before(first, step)
    assert gpu.all_before(step, second)
    assert gpu.all_before(first, second)


def test_what_moves_to_a_slot_comes_after_steps_that_read_its_cell(model: NllbModel, gpu: OrderedBackend) -> None:
    """The slot's former owner was fed from there."""
    seqs, stream = [prefilled(model, ONE) for _ in range(2)], model.create_stream()
    with results(model, 3, 2) as (dst, event):
        model.sample_batch_to_feed(model.decode_batch([9, 9], seqs), seqs, dst, event)
    with gpu.noted() as step:
        model.decode_batch_fed([FeedSource(sampled=True)] * 2, seqs, stream)
    model.free_sequence(seqs[0])
    with gpu.noted() as move:
        model.compact_sequence(seqs[1], 0)
    assert gpu.all_before(step, move)
    with gpu.noted() as later:
        model.decode_batch_fed([FeedSource(sampled=True)], seqs[1:], stream)
    assert gpu.all_before(move, later)
