# SPDX-License-Identifier: MIT OR Apache-2.0
"""The methods of the Model interface that do something in NLLB: how each is called, and what comes of it.

The calls show that a method does what docs/model_interface.md says. Its rules and limits are tested with the model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.streams import StreamLike
from metrale.model import Capacity, FeedSource, RowMask, SamplingParams, ScoreReq, SequenceState
from tests.model.lab import EXACT, LANES, OTHER, PREFIX, PROMPT, VOCAB, Lab, Row
from tests.nllb.decoding import read, relative

# streams


def create_stream(lab: Lab) -> object:
    stream = lab.model.create_stream()
    seq = lab.fresh()
    row = lab.at(lab.real.prefill(PROMPT, seq, stream))
    lab.model.destroy_stream(stream)
    return stream != lab.real.default_stream(), row


def create_event(lab: Lab) -> object:
    events = [lab.model.create_event() for _ in range(2)]
    for event in events:
        lab.real.destroy_event(event)
    return len({0, *events})


def through_event(lab: Lab, wait: Callable[[int, StreamLike], object]) -> object:
    """Record an event after a step on one stream, wait for it on another, and read the step's row there."""
    stream, event = lab.real.create_stream(), lab.real.create_event()
    seq = lab.live()
    ptr = lab.real.decode(9, seq)
    lab.model.record_event(event, 0)
    wait(event, stream)
    memory = lab.real.alloc_host_pinned(VOCAB * 4)
    lab.model.copy_d2h_async(ptr, memory.array, stream)
    lab.model.synchronize(stream)
    got = memory.array.view(np.float32).copy()
    lab.real.free_host_pinned(memory)
    lab.real.destroy_event(event)
    lab.real.destroy_stream(stream)
    return lab.right(got, [9])


def by_stream(lab: Lab) -> object:
    return through_event(lab, lambda event, stream: lab.model.stream_wait_event(stream, event))


def by_host(lab: Lab) -> object:
    return through_event(lab, lambda event, stream: lab.model.event_synchronize(event))


STREAMS = [
    Row("default_stream", lambda lab: lab.model.default_stream(), lambda lab: lab.gpu.default_stream()),
    Row("runs_ahead", lambda lab: lab.model.runs_ahead() == (lab.real.gpu.kind() == "cuda"), True),
    Row("create_stream", create_stream, (True, LANES)),
    Row("destroy_stream", create_stream, (True, LANES)),
    Row("create_event", create_event, 3),
    Row("record_event", by_stream, True),
    Row("stream_wait_event", by_stream, True),
    Row("synchronize", by_stream, True),
]


# lifecycle


def teardown(lab: Lab) -> object:
    lab.model.teardown()
    return lab.gpu.live_alloc_count()


def exclusive(lab: Lab) -> object:
    with lab.model.exclusive(), lab.model.exclusive():
        return lab.at(lab.real.decode(9, lab.live()), [9])


def alloc_sequence(lab: Lab) -> object:
    seqs = [lab.model.alloc_sequence() for _ in range(LANES)]
    assert lab.real.kv_usage()[0] == lab.real.kv_usage()[1], "every sequence at its limits"
    return [seq.slot_idx for seq in seqs], seqs[0].tokens, seqs[0].seq_len


def alloc_sequence_for(lab: Lab) -> object:
    seq = lab.model.alloc_sequence_for(len(PROMPT) + 2 + 2)
    assert lab.real.kv_usage()[0] == (len(PROMPT) + 2 + 2) * lab.real.shape.position_bytes
    return lab.at(lab.real.prefill(PROMPT, seq))


def free_sequence(lab: Lab) -> object:
    seq = lab.live()
    lab.model.free_sequence(seq)
    lab.model.free_sequence(seq)
    return seq.is_detached, lab.real.kv_usage()[0], lab.fresh().slot_idx


def compact_sequence(lab: Lab) -> object:
    retired, survivor = lab.live(OTHER), lab.live(tokens=[9])
    lab.real.free_sequence(retired)
    lab.model.compact_sequence(survivor, 0)
    return survivor.slot_idx, lab.at(lab.real.decode(10, survivor), [9, 10])


def detach_slot_for_reuse(lab: Lab) -> object:
    retired = lab.live()
    lab.model.detach_slot_for_reuse(retired)
    return retired.slot_idx, lab.real.kv_usage()[0], lab.fresh().slot_idx


def swapped(lab: Lab) -> object:
    """Decode, save, free, let another sequence take slot and KV, restore in another slot, and decode on."""
    seq, saved = lab.live(tokens=[9]), io.BytesIO()
    lab.model.save_sequence_state(seq, saved)
    lab.real.free_sequence(seq)
    lab.live(OTHER)
    back = lab.fresh()
    saved.seek(0)
    lab.model.restore_sequence_state(back, 0, saved)
    return back.slot_idx, lab.at(lab.real.decode(10, back), [9, 10]), back.tokens


def kv_usage(lab: Lab) -> object:
    seq = lab.real.alloc_sequence_for(8)
    used = lab.model.kv_usage()
    lab.real.free_sequence(seq)
    position, total = lab.real.shape.position_bytes, lab.real.shape.kv_bytes
    return used == (8 * position, total), lab.model.kv_usage() == (0, total)


CAPACITY = Capacity(LANES, 10, 8, 2, LANES * (12 + 9), frozenset({2}), max_beams=LANES)

LIFECYCLE = [
    Row("teardown", teardown, 0),
    Row("exclusive", exclusive, 0),
    Row("bind_gpu_to_thread", lambda lab: lab.model.bind_gpu_to_thread()),
    Row("alloc_sequence", alloc_sequence, ([0, 1, 2, 3], [], 0)),
    Row("alloc_sequence_for", alloc_sequence_for, LANES),
    Row("cache_sequence", lambda lab: lab.model.cache_sequence(lab.live())),
    Row("free_sequence", free_sequence, (True, 0, 0)),
    Row("compact_sequence", compact_sequence, (0, 0)),
    Row("detach_slot_for_reuse", detach_slot_for_reuse, (SequenceState.DETACHED, 0, 0)),
    Row("save_sequence_state", swapped, (1, 0, [*PREFIX, 9, 10])),
    Row("restore_sequence_state", swapped, (1, 0, [*PREFIX, 9, 10])),
    Row("capacity", lambda lab: lab.model.capacity(), CAPACITY),
    Row("device_bytes", lambda lab: lab.model.device_bytes(), lambda lab: lab.real.memory_plan().total),
    Row("kv_usage", kv_usage, (True, True)),
    Row("num_free_blocks", lambda lab: lab.model.num_free_blocks(), 2**20),
]


# forward


def prefill(lab: Lab) -> object:
    seq = lab.fresh()
    row = lab.at(lab.model.prefill(PROMPT, seq))
    return row, seq.tokens, seq.seq_len, seq.prompt_len


def prefill_chunk(lab: Lab) -> object:
    return lab.at(lab.model.prefill_chunk(PROMPT, lab.fresh(), 0, len(PROMPT), True))


def prefill_batch_chunk_rows(lab: Lab) -> object:
    return lab.at_both(lab.model.prefill_batch_chunk_rows(lab.slices(), 0, 3))


def prefill_twophase(lab: Lab) -> object:
    return lab.at(lab.model.prefill_twophase(PROMPT, lab.fresh(), 2))


def decode(lab: Lab) -> object:
    seq = lab.live()
    return lab.at(lab.model.decode(9, seq), [9]), seq.tokens, seq.seq_len


def decode_batch(lab: Lab) -> object:
    seqs = [lab.live(), lab.live(OTHER)]
    ptr = lab.model.decode_batch([9, 10], seqs)
    return lab.at(ptr, [9]), lab.at(lab.after(ptr), [10], OTHER), *(seq.tokens[2:] for seq in seqs)


def mixed_forward(lab: Lab) -> object:
    decoding, fresh = lab.live(), lab.fresh()
    result = lab.model.mixed_forward([9], [decoding], OTHER, fresh, 0, len(OTHER), True)
    return lab.at(result.decode_logits, [9]), lab.at(result.prefill_logits, (), OTHER), decoding.tokens, fresh.tokens


def mixed_forward_batch(lab: Lab) -> object:
    decoding, stream = lab.live(), lab.real.create_stream()
    result = lab.model.mixed_forward_batch([9], [decoding], lab.slices(), stream)
    rows = lab.at(result.decode_logits, [9]), lab.at_both(result.prefill_logits), decoding.tokens
    lab.real.destroy_stream(stream)
    return rows


def step_rows(lab: Lab) -> list[int]:
    """Return the rows of steps of 1 to 4 sequences. Only on a GPU are they padded."""
    return [1, 2, 4, 4] if lab.gpu.kind() == "cuda" else [1, 2, 3, 4]


FORWARD = [
    Row("prefill", prefill, (LANES, PREFIX, 2, 2)),
    Row("prefill_chunk", prefill_chunk, LANES),
    Row("prefill_batch_chunk", lambda lab: lab.at_both(lab.model.prefill_batch_chunk(lab.slices())), [0, 1]),
    Row("prefill_batch_chunk_rows", prefill_batch_chunk_rows, [3, 4]),
    Row("prefill_twophase", prefill_twophase, LANES),
    Row("decode", decode, (0, [*PREFIX, 9], 3)),
    Row("decode_batch", decode_batch, (0, 1, [9], [10])),
    Row("mixed_forward", mixed_forward, (0, LANES + 1, [*PREFIX, 9], PREFIX)),
    Row("mixed_forward_batch", mixed_forward_batch, (0, [1, 2], [*PREFIX, 9])),
    Row("step_rows", lambda lab: [lab.model.step_rows(lanes) for lanes in (1, 2, 3, 4)], step_rows),
]


# logits


def choices(lab: Lab) -> list[int]:
    """Return the ids that `Lab.step` leads to."""
    return [lab.ranked([9])[0], lab.ranked([10], OTHER)[0]]


def logits_event(lab: Lab) -> object:
    ptr = lab.step()
    lab.real.event_synchronize(lab.model.logits_event(ptr))
    return lab.right(read(lab.gpu, ptr, VOCAB), [9])


def logits_view(lab: Lab) -> object:
    ptr = lab.step()
    with lab.model.logits_view(ptr, 2) as rows:
        assert (rows.ptr, rows.shape) == (ptr, (2, VOCAB))
        lab.real.synchronize(rows.stream)
        return lab.right(read(lab.gpu, rows.row(0).ptr, VOCAB), [9])


def copy_logits_to_host(lab: Lab) -> object:
    ptr, out = lab.step(), np.empty(VOCAB, np.float32)
    assert lab.model.copy_logits_to_host(ptr, out) is out
    return lab.right(out, [9])


def hidden_after_norm(lab: Lab) -> object:
    lab.real.event_synchronize(lab.real.logits_event(lab.step()))
    hidden = read(lab.gpu, lab.model.hidden_after_norm(), lab.real.config.d_model)
    return relative(lab.judge.embedding @ hidden.astype(np.float64), lab.expected([9])) < EXACT


def decode_logits_ptr(lab: Lab) -> object:
    lab.real.decode(9, lab.live())
    return lab.at(lab.model.decode_logits_ptr(), [9])


LOGITS = [
    Row("vocab_size", lambda lab: lab.model.vocab_size(), VOCAB),
    Row("logits_row_bytes", lambda lab: lab.model.logits_row_bytes(), 128 * 4),
    Row("logits_dtype", lambda lab: lab.model.logits_dtype(), "float32"),
    Row("logits_event", logits_event, True),
    Row("logits_view", logits_view, True),
    Row("copy_logits_to_host", copy_logits_to_host, True),
    Row("logits_ptr_is_fp32", lambda lab: lab.model.logits_ptr_is_fp32(lab.step()), True),
    Row("logits_buffer_ptr", lambda lab: lab.model.logits_buffer_ptr(), lambda lab: lab.step()),
    Row("argmax_on_device", lambda lab: lab.model.argmax_on_device(lab.step()), lambda lab: choices(lab)[0]),
    Row("argmax_batch", lambda lab: lab.model.argmax_batch(lab.step(), 2), choices),
    Row("argmax_rows", lambda lab: lab.model.argmax_rows(lab.step(), 2), lambda lab: (choices(lab), [])),
    Row("hidden_after_norm", hidden_after_norm, True),
    Row("decode_logits_fp32", lambda lab: lab.model.decode_logits_fp32(), True),
    Row("decode_logits_ptr", decode_logits_ptr, 0),
]


# scoring


def score_targets(lab: Lab) -> object:
    """Two targets of other lengths; attention is to language, prompt and EOS, by layer, head and id."""
    asked = ((PROMPT, [9, 10, 11]), (OTHER, [12]))
    found = lab.model.score_targets([ScoreReq(*one) for one in asked], attention=True)
    for (prompt, target), one in zip(asked, found, strict=True):
        rows = np.array([lab.expected(target[:step], prompt) for step in range(len(target))])
        exact = np.take_along_axis(rows, np.array(target)[:, None], 1)[:, 0] - np.log(np.exp(rows).sum(axis=1))
        assert relative(np.array(one.logprobs), exact) < EXACT
        assert relative(one.attention.sum(axis=3), np.ones(one.attention.shape[:3])) < EXACT
    return [one.attention.shape for one in found]


SCORING = [Row("score_targets", score_targets, [(3, 4, 3, 5), (3, 4, 1, 4)])]


# device feed


@contextmanager
def landing(lab: Lab, *shape: int) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Give page-locked memory for ids, and an event."""
    memory, event = lab.real.alloc_host_pinned(4 * math.prod(shape)), lab.real.create_event()
    try:
        yield memory.array.view(np.int32).reshape(shape), event
    finally:
        lab.real.destroy_event(event)
        lab.real.free_host_pinned(memory)


def argmax_batch_to_feed(lab: Lab) -> object:
    """The first row may not choose its best id."""
    with landing(lab, 2) as (ids, event):
        masks = [RowMask((lab.ranked([9])[0],)), RowMask()]
        lab.model.argmax_batch_to_feed(lab.step(), masks, ids, event)
        lab.real.event_synchronize(event)
        return ids.tolist()


def decode_batch_fed(lab: Lab) -> object:
    """One lane takes the id that the device chose, which the host has not seen, the other one that the host names."""
    seqs = [lab.live(tokens=[9]), lab.live(OTHER)]
    with landing(lab, 1) as (ids, event):
        lab.real.argmax_batch_to_feed(lab.real.decode(10, seqs[0]), [RowMask()], ids, event)
        ptr = lab.model.decode_batch_fed([FeedSource(from_row=0), FeedSource(token=10)], seqs)
        rows = lab.at(ptr, [9, 10, lab.ranked([9, 10])[0]]), lab.at(lab.after(ptr), [10], OTHER)
        return rows, [seq.tokens for seq in seqs]


def sampled(lab: Lab, params: SamplingParams | None) -> list[int]:
    """Return two ids chosen on the device, of which the first is fed before the host knows it."""
    seq = lab.live(tokens=[9])
    if params is not None:
        lab.model.begin_sampling(seq, params)
    chosen = []
    ptr = lab.real.decode(10, seq)
    with landing(lab, 3, 1) as (first, one), landing(lab, 3, 1) as (second, two):
        lab.model.sample_batch_to_feed(ptr, [seq], first, one)
        ptr = lab.real.decode_batch_fed([FeedSource(sampled=True)], [seq])
        seq.seq_len += 1
        lab.model.sample_batch_to_feed(ptr, [seq], second, two)
        for ids, event in ((first, one), (second, two)):
            lab.real.event_synchronize(event)
            assert ids[2].tolist() == [0], "no flag"
            chosen += ids[0].tolist()
    return chosen


def begin_sampling(lab: Lab) -> object:
    """The best id of the first choice is banned."""
    return sampled(lab, SamplingParams(suppress_tokens=(lab.ranked([9, 10])[0],)))


def without_the_best(lab: Lab) -> list[int]:
    """Return what `begin_sampling` must choose."""
    banned, first = lab.ranked([9, 10])[:2]
    return [first, next(token for token in lab.ranked([9, 10, first]) if token != banned)]


def with_the_best(lab: Lab) -> list[int]:
    """Return the two greedy choices after 9 and 10."""
    first = lab.ranked([9, 10])[0]
    return [first, lab.ranked([9, 10, first])[0]]


def mixed_forward_batch_fed(lab: Lab) -> object:
    decoding = lab.live()
    result = lab.model.mixed_forward_batch_fed([FeedSource(token=9)], [decoding], lab.slices())
    return lab.at(result.decode_logits, [9]), lab.at_both(result.prefill_logits), decoding.tokens


def event_query(lab: Lab) -> object:
    event = lab.real.create_event()
    lab.step()
    lab.real.record_event(event)
    lab.real.synchronize()
    happened = lab.model.event_query(event)
    lab.model.destroy_event(event)
    return happened


def alloc_host_pinned(lab: Lab) -> object:
    memory: PinnedMemory = lab.model.alloc_host_pinned(64)
    content = memory.array.tobytes()
    lab.model.free_host_pinned(memory)
    return content


FEED = [
    Row("supports_device_token_feed", lambda lab: lab.model.supports_device_token_feed(), True),
    Row("decode_batch_fed", decode_batch_fed, ((0, 1), [[*PREFIX, 9, 10], PREFIX])),
    Row("argmax_batch_to_feed", argmax_batch_to_feed, lambda lab: [lab.ranked([9])[1], choices(lab)[1]]),
    Row("begin_sampling", begin_sampling, without_the_best),
    Row("sample_batch_to_feed", lambda lab: sampled(lab, None), with_the_best),
    Row("mixed_forward_batch_fed", mixed_forward_batch_fed, (0, [1, 2], PREFIX)),
    Row("reserve_decode_block", lambda lab: lab.model.reserve_decode_block(lab.live()), 0),
    Row("release_decode_blocks", lambda lab: lab.model.release_decode_blocks(lab.live(), 0)),
    Row("event_query", event_query, True),
    Row("event_synchronize", by_host, True),
    Row("destroy_event", event_query, True),
    Row("copy_d2h_async", by_stream, True),
    Row("alloc_host_pinned", alloc_host_pinned, bytes(64)),
    Row("free_host_pinned", alloc_host_pinned, bytes(64)),
]
