# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random programs of model calls on several streams.

A program is made of a seed and of nothing that the device says, so it is the same on every device. It waits on the host
as seldom as callers would, and often for what came last.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pytest

from gpu_runtime.errors import OutOfMemory
from metrale.errors import InvalidInput, NoFreeSlot
from metrale.model import GREEDY, RowMask, SamplingParams
from tests.nllb.decoding import row_index
from tests.nllb.lanes import SLOTS, Lane, Walk, seqs_of, slices_of

_TRIES: Final = 100


class Program(Walk):
    """Makes random calls of a model."""

    def run(self) -> None:
        """Make all calls of `_calls`, in a random order, and wait for all that they gave.

        Where there is nothing to make a call with, something else comes first.
        """
        calls = [call for call, count in self._calls().items() for _ in range(count)]
        self.random.shuffle(calls)
        for call in calls:
            for _ in range(_TRIES):
                if call():
                    break
                self.random.choice(self._others())()
            else:
                raise AssertionError(f"{call}: nothing to make it with")
        self._end()

    def _others(self) -> tuple[Callable[[], bool], ...]:
        """Return the calls that make something to call with."""
        return self._prefill, self._join, self._step, self._choose, self._free

    def _calls(self) -> dict[Callable[[], bool], int]:
        """Return the calls of a program, and how often it makes each."""
        return {
            self._prefill: 2,
            self._join: 3,
            self._step: 5,
            self._step_and_replace: 3,
            self._mixed: 6,
            partial(self._mixed, copies=True): 2,
            self._mixed_and_read: 2,
            self._choose: 8,
            self._choose_and_replace: 2,
            self._begin: 2,
            self._begin_again: 2,
            self._free: 4,
            self._move: 1,
            self._choose_and_move: 2,
            self._step_and_move: 2,
            self._swap: 2,
            self._swap_over: 2,
            self._swap_and_begin: 2,
            self._forward_and_read: 3,
            partial(self._copy, "event"): 1,
            partial(self._copy, "stream"): 1,
            partial(self._copy, "end"): 1,
            self._wait: 2,
        }

    def _prefill(self) -> bool:
        for lane in (lanes := self._open(2)):
            row, stream = SLOTS + lane.seq.slot_idx, self._stream()
            self._write({row: lane}, stream)
            assert row_index(self.model, self.model.prefill(lane.source, lane.seq, stream)) == row
        self._joined(lanes)
        return bool(lanes)

    def _join(self, first: int | None = None) -> bool:
        lanes, stream = self._open(3), self._stream()
        if first is None:
            first = self.random.randint(0, 2 * SLOTS - 3)
        rows = dict(enumerate(lanes, first))
        if lanes:
            with pytest.raises(InvalidInput, match="row_base"):
                self.model.prefill_batch_chunk_rows(slices_of(lanes), stream, 2 * SLOTS - len(lanes) + 1)
        self._write(rows, stream)
        ptrs = self.model.prefill_batch_chunk_rows(slices_of(lanes), stream, first)
        assert [row_index(self.model, ptr) for ptr in ptrs] == list(rows)
        self._joined(lanes)
        return bool(lanes)

    def _lanes_to_step(self, least: int) -> list[Lane]:
        return self._some([lane for lane in self._live if lane.seq.seq_len < lane.room], least)

    def _step(self) -> bool:
        lanes, stream = self._lanes_to_step(1), self._stream()
        if lanes and self.random.random() < 0.4:
            self._write(dict(enumerate(lanes)), stream)
            self.model.decode_batch(self._tokens(lanes), seqs_of(lanes), stream)
        elif lanes:
            self._fed_step(lanes, stream)
        return bool(lanes)

    def _fed_step(self, lanes: list[Lane], stream: int) -> None:
        self._write(dict(enumerate(lanes)), stream)
        self.model.decode_batch_fed(self._sources(lanes), seqs_of(lanes), stream)
        self._advance(lanes)

    def _step_and_replace(self) -> bool:
        """A new sequence gets the span, the slot or the row of one that a step is busy with."""
        if not self._step():
            return False
        self._give_up(self._rows.get(0, self._live[0]))
        return self._join(first=0) if self.random.random() < 0.5 else self._prefill()

    def _mixed(self, copies: bool = False) -> bool:
        lanes, stream = self._lanes_to_step(int(copies)), self._stream()
        if copies and (not lanes or not stream):
            return False
        new, single = self._open(2), not copies and self.random.random() < 0.2
        if single and len(new) == 1:
            self._mixed_one(lanes, new[0], stream)
        elif lanes or new:
            self._mixed_batch(lanes, new, stream)
        if copies:
            self._copy_row(lanes[-1], stream)  # comes after both parts, without waiting for a row
        return bool(lanes or new)

    def _mixed_one(self, lanes: list[Lane], new: Lane, stream: int) -> None:
        row = SLOTS + new.seq.slot_idx
        self._write({**dict(enumerate(lanes)), row: new}, stream)
        whole = new.source, new.seq, 0, len(new.source), True
        ptr = self.model.mixed_forward(self._tokens(lanes), seqs_of(lanes), *whole, stream).prefill_logits
        assert row_index(self.model, ptr) == row
        self._joined([new])

    def _mixed_batch(self, lanes: list[Lane], new: list[Lane], stream: int) -> None:
        rows = dict(enumerate([*lanes, *new]))
        self._write(rows, 0, stream)
        if self.random.random() < 0.4:
            tokens = self._tokens(lanes)
            result = self.model.mixed_forward_batch(tokens, seqs_of(lanes), slices_of(new), stream)
        else:
            sources = self._sources(lanes)
            result = self.model.mixed_forward_batch_fed(sources, seqs_of(lanes), slices_of(new), stream)
            self._advance(lanes)
        assert [row_index(self.model, ptr) for ptr in result.prefill_logits] == list(rows)[len(lanes) :]
        self._joined(new)

    def _mixed_and_read(self) -> bool:
        """A prefill writes a row that a step wrote before, and the row is read at once."""
        lanes = [lane for lane in self._live if lane.seq.seq_len < lane.room - 1]
        if len(lanes) < 2 or not (new := self._open(1)):
            return False
        self._fed_step(lanes, self._stream())
        self._mixed_batch(lanes[:-1], new, self._stream())
        new[0].log.append(("row", self._note(self.model.copy_logits_to_host(self._ptr(new[0].row)))))
        return True

    # choices

    def _choose(self) -> bool:
        first, lanes = self._run_of_rows()
        if lanes and self.random.random() < 0.7:
            self._sample(first, lanes)
        elif lanes:
            dst, (number, _), event = self._room(len(lanes))
            masks = [RowMask(tuple(self.random.sample(range(97), self.random.randint(0, 2)))) for _ in lanes]
            self.model.argmax_batch_to_feed(self._ptr(first), masks, dst, event, self._stream())
            self._waiting[number], self._fed = event, lanes
            for column, (lane, mask) in enumerate(zip(lanes, masks, strict=True)):
                lane.greedy = (number, column)
                lane.log.append(("argmax", lane.greedy, mask))
        return bool(lanes)

    def _choose_and_replace(self) -> bool:
        """A new sequence gets the row that a choice is made from."""
        first, lanes = self._run_of_rows()
        if not lanes or first > 2 * SLOTS - 3 or len(self._live) < 2:
            return False
        self._sample(first, lanes)
        self._give_up(self.random.choice(self._live))
        return self._join(first)

    def _sample(self, first: int, lanes: list[Lane]) -> None:
        dst, (number, _), event = self._room(3, len(lanes))
        self.model.sample_batch_to_feed(self._ptr(first), seqs_of(lanes), dst, event, self._stream(), logprobs=True)
        self._waiting[number] = event
        for column, lane in enumerate(lanes):
            lane.sampled = (number, column)
            lane.log.append(("sample", lane.sampled))

    def _begin(self) -> bool:
        if self._live:
            self._begin_one(self.random.choice(self._live))
        return bool(self._live)

    def _begin_again(self) -> bool:
        """What is forbidden changes while a choice is being made."""
        lanes = [lane for lane in self._live if lane.row >= 0]
        if lanes:
            lane = self.random.choice(lanes)
            self._begin_one(lane)
            self._sample(lane.row, [lane])
            self._begin_one(lane)
        return bool(lanes)

    def _begin_one(self, lane: Lane, params: SamplingParams | None = None) -> None:
        draw = self.random.random
        params = params or SamplingParams(
            temperature=self.random.choice((0.0, 2.0)),
            repetition_penalty=self.random.choice((1.0, 1.5)),
            no_repeat_ngram_size=self.random.choice((0, 1)),
            suppress_tokens=tuple(self.random.sample(range(97), 60 if draw() < 0.7 else 0)),
            bad_words=tuple(tuple(self.random.sample(range(97), 2)) for _ in range(300 if draw() < 0.5 else 0)),
            eos_ids=tuple(self.random.sample(range(97), 30)),
            min_new_tokens=self.random.choice((0, 4)),
            seed=self.random.randrange(1 << 64),
        )
        self._know(lane)
        self.model.begin_sampling(lane.seq, params, self._stream())
        lane.sampled = None
        lane.log.append(("begin", params))

    def _wait(self) -> bool:
        latest = list(self._waiting)[-3:]
        if latest:
            self._wait_for(self.random.choice(latest))
        return bool(latest)

    # sequences

    def _free(self) -> bool:
        lanes = [lane for lane in self._live if lane.seq.seq_len == lane.room] or self._live[:]
        if lanes:
            self._give_up(self.random.choice(lanes))
        return bool(lanes)

    def _move(self) -> bool:
        vacant = sorted({*range(SLOTS)} - {lane.seq.slot_idx for lane in self._live})
        if not vacant or not self._live:
            return False
        self.model.compact_sequence(self.random.choice(self._live).seq, self.random.choice(vacant))
        return True

    def _choose_and_move(self) -> bool:
        """A sequence moves with an id that is being chosen, and is fed from its new slot."""
        lanes = [lane for lane in self._live if lane.row >= 0 and lane.seq.seq_len < lane.room]
        if len(lanes) < 2:
            return False
        done, lane = self._some(lanes, 2)[:2]
        self._sample(lane.row, [lane])
        self._take_over(done, lane)
        self._fed_step([lane], self._stream())
        return True

    def _step_and_move(self) -> bool:
        """A sequence moves to the slot of one whose step is under way, and takes its id from there.

        The row of that step is the second, so that the next step, of one lane, need not wait for who reads it.
        """
        lanes = self._some([lane for lane in self._live if lane.seq.seq_len < lane.room - 1], 3)[:3]
        if len(lanes) < 3:
            return False
        self._fed_step(lanes, self._stream())
        self._sample(0, lanes)
        first, done, lane = lanes
        self._fed_step([first, done], self._stream())
        stream = self._stream()
        self._await_row(done, stream)
        self._copy_row(done, stream)
        self._take_over(done, lane)
        self._fed_step([lane], self._stream())
        return True

    def _swap_out(self, lane: Lane) -> None:
        self._know(lane)
        self._out.append((lane, self._save(lane)))
        self._give_up(lane)

    def _bring_back(self) -> Lane:
        """Restore what was saved last."""
        lane, data = self._out.pop()
        seq = None
        while seq is None:
            try:
                seq = self.model.alloc_sequence_for(len(lane.source) + 2 + lane.room)
            except (NoFreeSlot, OutOfMemory):
                self._give_up(self.random.choice(self._live))
        self.model.restore_sequence_state(seq, 0, io.BytesIO(data))
        lane.seq, lane.sampled, lane.greedy = seq, None, None
        lane.log.append(("begin", GREEDY))
        self._live.append(lane)
        return lane

    def _swap_in(self) -> None:
        """Restore what was saved last, and let it go on at once."""
        lane = self._bring_back()
        if lane.seq.seq_len < lane.room:
            self._fed_step([lane], self._stream())
            self._sample(0, [lane])

    def _swap(self) -> bool:
        if not self._live:
            return False
        self._swap_out(self.random.choice(self._live))
        self.random.choice((self._prefill, self._step, self._choose))()
        self._swap_in()
        return True

    def _swap_over(self) -> bool:
        """A sequence comes back to where another is being prefilled, which is given up."""
        if not self._live:
            return False
        self._swap_out(self.random.choice(self._live))
        known = len(self.lanes)
        self._prefill()
        for lane in self.lanes[known:]:
            self._give_up(lane)
        self._swap_in()
        return True

    def _swap_and_begin(self) -> bool:
        """A sequence comes back, and brings its history, to the slot of one whose step writes its own.

        It may choose one of two ids: the one that the other step is given, or one that it has had in that place.
        """
        lanes = [lane for lane in self._live if lane.row > 0 and lane.seq.seq_len > 2]
        pairs = [
            (lane, done)
            for lane in lanes
            for done in self._live
            if done is not lane and done.seq.seq_len < min(done.room, lane.seq.seq_len)
        ]
        if not pairs:
            return False
        lane, done = self.random.choice(pairs)
        row, place, slot = lane.row, done.seq.seq_len, done.seq.slot_idx
        self._swap_out(lane)
        self._begin_one(done, SamplingParams(repetition_penalty=1.5))
        token = next(token for token in range(97) if token not in lane.tokens)
        self._write({0: done}, stream := self._stream())
        self._give(done, "token", token)
        self.model.decode_batch([token], [done.seq], stream)
        self._give_up(done)
        self._bring_back()
        if lane.seq.slot_idx != slot:
            self.model.compact_sequence(lane.seq, slot)
        self._rows[row], lane.row = lane, row
        others = tuple({*range(97)} - {token, lane.tokens[place]})
        self._begin_one(lane, SamplingParams(no_repeat_ngram_size=1, suppress_tokens=others))
        self._sample(row, [lane])
        return True

    # readers

    def _forward_and_read(self) -> bool:
        return self.random.choice((self._step, self._join, self._mixed))() and self._read()

    def _read(self) -> bool:
        """Read rows by calls that wait for them."""
        first, lanes = self._run_of_rows()
        if lanes:
            ptr = self._ptr(first)
            if self.random.random() < 0.5:
                ids, _ = self.model.argmax_rows(ptr, len(lanes), self._stream())
                number = self._note(np.array(ids))
                for column, lane in enumerate(lanes):
                    lane.log.append(("argmax", (number, column), RowMask()))
            else:
                lanes[0].log.append(("row", self._note(self.model.copy_logits_to_host(ptr))))
        return bool(lanes)

    def _copy(self, kind: str) -> bool:
        """Copy a row on a stream that waits for its event; wait for that stream, or let it end, or go on."""
        if not self._rows:
            return False
        lane, stream = self._rows[self.random.choice(sorted(self._rows))], self._stream()
        if kind == "end":
            stream = self.model.create_stream()
        self._await_row(lane, stream)
        number = self._copy_row(lane, stream)
        if kind == "stream":
            self.model.synchronize(stream)
        elif kind == "end":
            self.model.destroy_stream(stream)
        if kind != "event":
            self.results[number] = self.results[number].copy()
            self._wait_for(number)
        return True
