# SPDX-License-Identifier: MIT OR Apache-2.0
"""Wrong ways to feed ids on the device: refused by name, and everything stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError
from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.model import FeedSource, RowMask, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import Call, Case, arena, assert_refused, prefilled, results, to_feed

CASES = [Case([5, 6, 7], 80, 81, [])]
ANY = RowMask()
SAMPLED = FeedSource(sampled=True)


def read_only() -> np.ndarray:
    room = np.zeros(2, np.int32)
    room.flags.writeable = False
    return room


BAD_ROOM: list[Any] = [
    np.zeros(1, np.int32),
    np.zeros(3, np.int32),
    np.zeros((2, 1), np.int32),
    np.zeros(2, np.int64),
    np.zeros(2, np.float32),
    np.zeros(2, np.int16),
    np.zeros(4, np.int32)[::2],
    read_only(),
    [0, 0],
    None,
]


@pytest.mark.parametrize("dst", BAD_ROOM, ids=lambda dst: f"{type(dst).__name__} {getattr(dst, 'shape', '')}")
def test_no_room_for_the_ids_is_refused(tiny: NllbModel, dst: Any) -> None:
    event = tiny.create_event()
    base = tiny.logits_buffer_ptr()
    assert_refused(tiny, lambda m, a, b: m.argmax_batch_to_feed(base, [ANY] * 2, dst, event), "dst")
    assert tiny.event_query(event)
    tiny.destroy_event(event)
    with results(tiny, 2) as (good, event):
        tiny.argmax_batch_to_feed(base, [ANY] * 2, good.view(np.uint32), event)  # unsigned is fine
        tiny.event_synchronize(event)


WRONG: list[tuple[str, str, Call]] = [
    ("no rows", "masks: length", lambda m, a, b: choose(m, [])),
    ("more rows than there are", "n", lambda m, a, b: choose(m, [ANY] * 9)),
    ("what is no mask", "masks[1]", lambda m, a, b: choose(m, [ANY, (5,)])),
    ("a mask of no id", "masks[1].banned", lambda m, a, b: choose(m, [ANY, RowMask((97,))])),
    ("the second id of a mask", "masks[0].banned", lambda m, a, b: choose(m, [RowMask((5, 1 << 40))])),
    ("no row's address", "ptr", lambda m, a, b: choose(m, [ANY], 4)),
    ("a wrong id", "sources[0].token", lambda m, a, b: m.decode_batch_fed([FeedSource(97)], [a])),
    ("an id that is none", "token", lambda m, a, b: m.decode_batch_fed([FeedSource(True)], [a])),
    (
        "a row that was not chosen for",
        "sources[0].from_row",
        lambda m, a, b: m.decode_batch_fed([FeedSource(from_row=2)], [a]),
    ),
    ("a row past the arena", "sources[0].from_row", lambda m, a, b: m.decode_batch_fed([FeedSource(from_row=8)], [a])),
    ("nothing was sampled", "sources[0]", lambda m, a, b: m.decode_batch_fed([SAMPLED], [a])),
    ("what is no source", "sources[0]", lambda m, a, b: m.decode_batch_fed([5], [a])),  # type: ignore[list-item]
    ("no sources", "sources, seqs", lambda m, a, b: m.decode_batch_fed([], [])),
    ("too few sources", "sources, seqs", lambda m, a, b: m.decode_batch_fed([], [a])),
    ("too many sources", "sources, seqs", lambda m, a, b: m.decode_batch_fed([FeedSource(5)] * 2, [a])),
    ("a sequence twice", "seqs", lambda m, a, b: m.decode_batch_fed([FeedSource(5)] * 2, [a, a])),
]


def choose(model: NllbModel, masks: list[Any], offset: int = 0) -> None:
    with results(model, max(len(masks), 1)) as (dst, event):
        model.argmax_batch_to_feed(model.logits_buffer_ptr().offset(offset), masks, dst[: len(masks)], event)


@pytest.mark.parametrize(("argument", "call"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_what_is_wrong_is_refused(tiny: NllbModel, argument: str, call: Call) -> None:
    """After a choice for two rows, whose cells stay what they are."""
    seq = prefilled(tiny, CASES[0])
    tokens = to_feed(tiny, tiny.decode_batch([9], [seq]), [ANY] * 2)
    assert_refused(tiny, call, argument)
    tiny.decode_batch_fed([FeedSource(from_row=0)], [seq])
    fed = arena(tiny)[0].tobytes()
    tiny.decode_batch([tokens[0]], [seq])
    assert arena(tiny)[0].tobytes() == fed


@pytest.mark.parametrize("row", [0, 1])
def test_before_any_choice_there_is_no_row_to_take(tiny: NllbModel, row: int) -> None:
    seq = prefilled(tiny, CASES[0])
    with pytest.raises(InvalidInput, match="the last argmax_batch_to_feed, which had 0"):
        tiny.decode_batch_fed([FeedSource(from_row=row)], [seq])


def test_sequences_that_cannot_be_fed(tiny: NllbModel) -> None:
    fed = [FeedSource(5)]
    assert_refused(tiny, lambda m, a, b: m.decode_batch_fed(fed, [b]), "slot 1 has not been prefilled", SequenceError)
    seq = tiny.alloc_sequence()
    tiny.free_sequence(seq)
    with pytest.raises(SequenceError, match="it was detached"):
        tiny.decode_batch_fed(fed, [seq])


def test_fed_steps_end_at_the_limit(tiny: NllbModel) -> None:
    """Nine positions; a seq_len beyond them is its caller's mistake."""
    seq = prefilled(tiny, CASES[0])
    for _ in range(7):
        tiny.decode_batch_fed([FeedSource(5)], [seq])
        seq.seq_len += 1
    with tiny.gpu.launch_trace() as trace:
        with pytest.raises(SequenceError, match="slot 0 is full: it has 9 decoder positions"):
            tiny.decode_batch_fed([FeedSource(5)], [seq])
        seq.seq_len += 1
        with pytest.raises(SequenceError, match="has 9 decoder positions, and a seq_len of 10"):
            tiny.decode_batch_fed([FeedSource(5)], [seq])
    assert not trace


def test_feeding_in_a_capture_is_refused(tiny: NllbModel) -> None:
    stream = tiny.create_stream()
    calls: list[Call] = [
        lambda m, a, b: m.decode_batch_fed([FeedSource(5)], [a], stream),
        lambda m, a, b: m.argmax_batch_to_feed(m.logits_buffer_ptr(), [ANY], np.zeros(1, np.int32), event, stream),
    ]
    for call in calls:
        event = tiny.create_event()

        def captured(model: NllbModel, live: SequenceState, fresh: SequenceState, call: Call = call) -> None:
            model.gpu.begin_capture(stream)
            try:
                call(model, live, fresh)
            finally:
                model.gpu.abort_capture_if_active(stream)

        assert_refused(tiny, captured, "capture", NotSupported)
        tiny.destroy_event(event)
    tiny.gpu.destroy_stream(stream)


@pytest.mark.parametrize("event", [0, -1, None, "x", 1.5, 1 << 70])
def test_a_wrong_event_is_refused_before_anything_is_enqueued(tiny: NllbModel, event: Any) -> None:
    seq = prefilled(tiny, CASES[0])
    dst = np.full((3, 1), 7, np.int32)
    with tiny.gpu.launch_trace() as trace, pytest.raises((InvalidInput, DeviceError)):
        tiny.sample_batch_to_feed(tiny.logits_buffer_ptr(), [seq], dst, event)
    assert not trace
    assert (dst == 7).all()
