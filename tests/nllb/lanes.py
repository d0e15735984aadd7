# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sequences of a random program: what was asked of each, where its latest logits are, and what it is alone."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale.errors import NoFreeSlot
from metrale.model import FeedSource, PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import sampled, to_feed

LIMITS: Final[dict[str, Any]] = {"max_batch": 4, "max_source_len": 6, "max_new_tokens": 8}
SLOTS: Final = LIMITS["max_batch"]
MOST: Final = LIMITS["max_new_tokens"] + 1
"""Decoder positions of a sequence."""

Seen = tuple[int, int]
"""A result of the program: its number, and the column of it."""


@dataclass(eq=False)
class Lane:
    """One sequence, and all that was asked of it.

    Attributes
    ----------
    seq : SequenceState
    source : list of int
    room : int
        Decoder positions.
    tokens : list of int or Seen
        What its decoder was given; ids that the program has not looked at stand as the results that hold them.
    log : list of tuple
        What was asked of it, and which results came of it.
    row : int
        The row with its latest logits; -1 when it was overwritten.
    sampled, greedy : Seen or None
        The results with the ids that were chosen at the latest position.
    """

    seq: SequenceState
    source: list[int]
    room: int
    tokens: list[int | Seen]
    log: list[tuple[Any, ...]] = field(default_factory=list)
    row: int = -1
    sampled: Seen | None = None
    greedy: Seen | None = None


class Walk:
    """A model in use: its streams, its sequences, their rows, and the results that are there or still to come.

    Attributes
    ----------
    results : list of ndarray
        What the calls gave, in order.
    lanes : list of Lane
        Every sequence there was.
    """

    def __init__(self, model: NllbModel, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.results: list[NDArray[Any]] = []
        self.lanes: list[Lane] = []
        self._streams = [0, *(model.create_stream() for _ in range(3))]
        self._memory = model.alloc_host_pinned(1 << 18)
        self._used = 0
        self._live: list[Lane] = []
        self._out: list[tuple[Lane, bytes]] = []
        self._rows: dict[int, Lane] = {}
        self._fed: list[Lane] = []
        self._waiting: dict[int, int] = {}
        self._readers: dict[int, int] = {}

    def _stream(self) -> int:
        return self.random.choice(self._streams)

    def _some(self, lanes: Sequence[Lane], least: int = 1) -> list[Lane]:
        """Return some of the lanes in a random order."""
        return self.random.sample(list(lanes), self.random.randint(min(least, len(lanes)), len(lanes)))

    def _room(self, *shape: int) -> tuple[NDArray[np.int32], Seen, int]:
        """Return page-locked memory for a result, its number, and an event for it."""
        size = 4 * int(np.prod(shape))
        dst = self._memory.array[self._used : self._used + size].view(np.int32).reshape(shape)
        self._used += size
        return dst, (self._note(dst), 0), self.model.create_event()

    def _ptr(self, row: int) -> DevicePtr:
        return self.model.logits_buffer_ptr().offset(row * self.model.logits_row_bytes())

    def _note(self, result: NDArray[Any]) -> int:
        self.results.append(result)
        return len(self.results) - 1

    def _open(self, most: int) -> list[Lane]:
        """Return up to ``most`` new lanes, as far as there are slots and KV."""
        lanes: list[Lane] = []
        for _ in range(self.random.randint(1, most)):
            source = [self.random.randrange(3, 97) for _ in range(self.random.randint(0, 4))]
            budget = self.random.randint(len(source) + 6, 15)
            if len(self._live) + len(lanes) == SLOTS:
                break
            try:
                seq = self.model.alloc_sequence_for(budget)
            except (NoFreeSlot, OutOfMemory):
                break
            seq.src_lang_id, seq.tgt_lang_id = self.random.randrange(60, 97), self.random.randrange(60, 97)
            lanes.append(Lane(seq, source, min(MOST, budget - len(source) - 2), [2, seq.tgt_lang_id]))
        return lanes

    def _joined(self, lanes: list[Lane]) -> None:
        self.lanes += lanes
        self._live += lanes

    def _give_up(self, lane: Lane) -> None:
        self._live.remove(lane)
        self._rows.pop(lane.row, None)
        lane.row = -1
        self.model.free_sequence(lane.seq)

    def _take_over(self, done: Lane, lane: Lane) -> None:
        """Let one sequence have the slot of another, which is done."""
        slot = done.seq.slot_idx
        self._give_up(done)
        self.model.compact_sequence(lane.seq, slot)

    def _write(self, rows: dict[int, Lane], *streams: int) -> None:
        """Let what is about to write rows come after those who read them by themselves."""
        for event in [event for event, row in self._readers.items() if row in rows]:
            for stream in streams:
                self.model.stream_wait_event(stream, event)
            del self._readers[event]
        for row, lane in rows.items():
            if row in self._rows:
                self._rows[row].row = -1
            self._rows.pop(lane.row, None)
            self._rows[row], lane.row = lane, row

    @staticmethod
    def _advance(lanes: list[Lane]) -> None:
        """Count a fed step, which the model leaves to its caller."""
        for lane in lanes:
            lane.seq.seq_len += 1

    @staticmethod
    def _give(lane: Lane, kind: str, token: Any) -> None:
        lane.tokens.append(token)
        lane.log.append(("feed", kind, token))
        lane.sampled = lane.greedy = None

    def _tokens(self, lanes: list[Lane]) -> list[int]:
        """Give each lane some id; the model counts it."""
        tokens = [self.random.randrange(97) for _ in lanes]
        for lane, token in zip(lanes, tokens, strict=True):
            self._give(lane, "token", token)
        return tokens

    def _sources(self, lanes: list[Lane]) -> list[FeedSource]:
        """Give each lane an id that was chosen, or some id."""
        sources = []
        for lane in lanes:
            kinds = ["token"] + ["sampled"] * 3 * (lane.sampled is not None)
            kinds += ["row"] * 3 * (lane.greedy is not None and lane in self._fed)
            kind, token = self.random.choice(kinds), self.random.randrange(97)
            if kind == "token":
                sources.append(FeedSource(token=token))
                self._give(lane, kind, token)
            elif kind == "row":
                sources.append(FeedSource(from_row=self._fed.index(lane)))
                self._give(lane, kind, lane.greedy)
            else:
                sources.append(FeedSource(sampled=True))
                self._give(lane, kind, lane.sampled)
        return sources

    def _run_of_rows(self) -> tuple[int, list[Lane]]:
        """Return rows in a row, each with some lane's latest logits: the first one's number, and the lanes."""
        if not self._rows:
            return 0, []
        first = self.random.choice(sorted(self._rows))
        lanes = []
        for row in range(first, first + self.random.randint(1, SLOTS)):
            if row not in self._rows:
                break
            lanes.append(self._rows[row])
        return first, lanes

    def _know(self, lane: Lane) -> None:
        """Tell a sequence its tokens; waits for those that the program has not looked at."""
        for place, token in enumerate(lane.tokens):
            if isinstance(token, tuple):
                number, column = token
                self._wait_for(number)
                lane.tokens[place] = int(self.results[number].reshape(-1)[column])
        lane.seq.tokens = [token for token in lane.tokens if isinstance(token, int)]

    def _wait_for(self, number: int) -> None:
        if number in self._waiting:
            event = self._waiting.pop(number)
            self.model.event_synchronize(event)
            self.results[number] = self.results[number].copy()
            self.model.destroy_event(event)
            self._readers.pop(event, None)

    def _save(self, lane: Lane) -> bytes:
        writer = io.BytesIO()
        self.model.save_sequence_state(lane.seq, writer)
        self._note(np.frombuffer(writer.getvalue(), np.uint8))
        return writer.getvalue()

    def _await_row(self, lane: Lane, stream: int) -> None:
        self.model.stream_wait_event(stream, self.model.logits_event(self._ptr(lane.row)))

    def _copy_row(self, lane: Lane, stream: int) -> int:
        """Enqueue the copy of a lane's row and return the result's number."""
        dst, (number, _), event = self._room(97)
        self.model.copy_d2h_async(self._ptr(lane.row), dst, stream)
        self.model.record_event(event, stream)
        self._readers[event] = lane.row
        self._waiting[number] = event
        lane.log.append(("row", number))
        return number

    def _end(self) -> None:
        """Wait for everything, what came last first, and give everything back."""
        for number in sorted(self._waiting, reverse=True):
            self._wait_for(number)
        for lane in self._live:
            self._know(lane)
            self._save(lane)
            self.model.free_sequence(lane.seq)
        for stream in self._streams[1:]:
            self.model.destroy_stream(stream)
        self.model.free_host_pinned(self._memory)


def seqs_of(lanes: Sequence[Lane]) -> list[SequenceState]:
    return [lane.seq for lane in lanes]


def slices_of(lanes: Sequence[Lane]) -> list[PrefillSlice]:
    return [PrefillSlice.whole(lane.source, lane.seq) for lane in lanes]


def assert_as_alone(model: NllbModel, lane: Lane, results: Sequence[NDArray[Any]]) -> None:
    """Ask the same of a sequence that has the model for itself, by calls that wait; ids must be the same.

    Rows may differ by what company changes in them: see `tests.nllb.decoding.NEIGHBOURS`.
    """
    seq, ids = model.alloc_sequence(), dict[Seen, int]()
    seq.src_lang_id, seq.tgt_lang_id = lane.seq.src_lang_id, lane.seq.tgt_lang_id
    ptr = model.prefill(lane.source, seq)
    for kind, *what in lane.log:
        match kind:
            case "begin":
                model.begin_sampling(seq, what[0])
            case "feed":
                token = what[1]
                ptr = model.decode(ids[token] if isinstance(token, tuple) else token, seq)
            case "sample":
                number, column = what[0]
                choice = sampled(model, ptr, [seq], logprobs=True)
                [ids[what[0]]] = choice.ids
                chosen, logprobs, flags = results[number][:, column]
                assert (chosen, flags) == (choice.ids[0], choice.flags[0])
                np.testing.assert_allclose(logprobs.view(np.float32), choice.logprobs[0], rtol=0, atol=1e-4)
            case "argmax":
                number, column = what[0]
                [ids[what[0]]] = to_feed(model, ptr, [what[1]])
                assert results[number][column] == ids[what[0]]
            case "row":
                row = results[what[0]].view(np.float32)
                np.testing.assert_allclose(row, model.copy_logits_to_host(ptr), rtol=0, atol=1e-4)
    assert seq.seq_len == len(lane.tokens)
    model.free_sequence(seq)
