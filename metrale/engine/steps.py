# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps on the device: some lanes decode, others are prefilled beside them, and every one chooses its next token.

A lane that is searched with beams has a row for each, and its choice is one step of the search. A step is enqueued
without waiting for the one before it. Its tokens are read some steps later, from page-locked memory, when an event says
that they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from metrale.engine.lane import Lane
from metrale.model import GREEDY, FeedSource, Model, PrefillSlice, SequenceState

_RESULTS: Final = 3  # id, log-probability, flags
_SAMPLED: Final = FeedSource(sampled=True)
_IS_SEARCH: Final = attrgetter("is_search")
_LOGPROBS: Final = attrgetter("logprobs")


class Outcomes(NamedTuple):
    """What a step chose: for each of some lanes a token, and for each of others the flags of its search.

    Attributes
    ----------
    lanes : list of Lane
    tokens : list of int
    logprobs : list of float or None
        None when no lane asks for them.
    flags : list of int
    plain : list of bool
        Whether it was neither the first token of a lane nor the last, and the lane `metrale.engine.lane.Lane.is_plain`.
    searched : list of Lane
    states : list of int
    """

    lanes: list[Lane]
    tokens: list[int]
    logprobs: list[float] | None
    flags: list[int]
    plain: list[bool]
    searched: list[Lane]
    states: list[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """A lane that a step could not take along, and why."""

    lane: Lane
    error: Exception


@dataclass(slots=True, eq=False)
class Flight:
    """A step in flight: the lanes that chose a token, in the order of their rows, and those that are searched; where
    their results will be, whether log-probabilities are among them, and what `Outcomes.plain` says."""

    choosing: list[Lane]
    searched: list[Lane]
    buffer: int
    logprobs: bool
    plain: list[bool]

    @property
    def lanes(self) -> list[Lane]:
        return [*self.choosing, *self.searched]


class Steps:
    """Enqueues steps, at most ``depth`` ahead of what has been read.

    Parameters
    ----------
    model : Model
    rows : int
        Most rows of a step.
    depth : int
    """

    def __init__(self, model: Model, rows: int, depth: int) -> None:
        self._model = model
        self._flights: deque[Flight] = deque()
        self._buffers: list[NDArray[np.int32]] = []
        self._views: dict[tuple[int, int], NDArray[np.int32]] = {}
        self._events: list[int] = []
        self._rows = rows
        self._pointers: list[DevicePtr] = []
        size = (_RESULTS + 1) * rows * np.dtype(np.int32).itemsize  # and the flags of searches
        with ExitStack() as undo:
            self._prefill_stream = model.create_stream()
            undo.callback(model.destroy_stream, self._prefill_stream)
            for _ in range(depth + 1):
                memory = model.alloc_host_pinned(size)
                undo.callback(model.free_host_pinned, memory)
                self._buffers.append(memory.array[:size].view(np.int32))
                self._events.append(model.create_event())
                undo.callback(model.destroy_event, self._events[-1])
            self._teardown = undo.pop_all()
        self._free = deque(range(depth + 1))

    def __len__(self) -> int:
        """Return how many steps are in flight."""
        return len(self._flights)

    @property
    def flights(self) -> Sequence[Flight]:
        """The steps in flight, the oldest first."""
        return tuple(self._flights)

    def close(self) -> None:
        """Give back streams, events and memory."""
        self._flights.clear()
        self._buffers.clear()
        self._views.clear()
        self._teardown.close()

    def enqueue(self, decoding: Sequence[Lane], joining: Sequence[Lane]) -> list[Failure]:
        """Enqueue one step: ``decoding`` lanes in the first rows, then ``joining`` ones, which are prefilled.

        Of the decoding ones those with beams come first, and of the joining ones last: so the rows of all that choose a
        token are neighbours. What fails is tried again in parts, so that only the lanes whose own part fails are lost.

        Returns
        -------
        list of Failure
            The lanes that the step gives no token, one perhaps twice. What their sequences hold is not known.
        """
        first, last = decoding, joining
        if any(map(_IS_SEARCH, (*decoding, *joining))):
            first = sorted(decoding, key=_IS_SEARCH, reverse=True)  # which keeps the order of equal ones
            last = sorted(joining, key=_IS_SEARCH)
        with self._model.exclusive():  # the rows are everybody's until the tokens are chosen
            lanes, failures = self._forward(first, last)
            if not lanes:
                return failures
            failed = self._begin([lane for lane in lanes if not lane.chosen or lane.pending is not None])
            lost = {failure.lane for failure in failed if failure.lane.is_search}  # there is nothing to select for them
            flight, failed_choices = self._choose(lanes, lost, self._free[0])
        if flight.lanes:
            self._free.popleft()
            self._flights.append(flight)
        return [*failures, *failed, *failed_choices]

    def _forward(self, decoding: Sequence[Lane], joining: Sequence[Lane]) -> tuple[list[Lane], list[Failure]]:
        """Enqueue the forward; return the lanes whose logits are in rows from 0 on, and those that failed."""
        try:
            self._model.mixed_forward_batch_fed(*_fed(decoding), _slices(joining), self._prefill_stream)
            failures: list[Failure] = []
        except Exception:  # written again from the start: a forward leaves nothing behind that a second one minds
            decoding, failures = self._decode_alone(decoding)
            joined: list[Lane] = []
            decoded = sum(lane.rows for lane in decoding)
            for lane in joining:
                row = decoded + len(joined)
                try:
                    self._model.prefill_batch_chunk_rows(_slices([lane]), self._prefill_stream, row)
                    joined.append(lane)
                except Exception as error:
                    failures.append(Failure(lane, error))
            joining = joined
        for lane in decoding:
            lane.seq.seq_len += 1
            if lane.pending is not None:
                lane.seq.tokens = [*lane.seq.tokens, lane.pending]
        return [*decoding, *joining], failures

    def _decode_alone(self, lanes: Sequence[Lane]) -> tuple[Sequence[Lane], list[Failure]]:
        if lanes:
            try:
                self._model.decode_batch_fed(*_fed(lanes))
            except Exception as error:
                return [], [Failure(lane, error) for lane in lanes]
        return lanes, []

    def _begin(self, lanes: list[Lane]) -> list[Failure]:
        """Tell the device how lanes choose that do so for the first time, or again; return those that cannot.

        A lane that comes back tells the device its history anew, now that the pending token belongs to it. Who cannot
        choose keeps its row in this step, where a token may be chosen that nobody will read.
        """
        failures = []
        for lane in lanes:
            request = lane.handle.request
            if request.sampling == GREEDY and request.beams is None:
                continue
            if request.beams is None:
                begin = partial(self._model.begin_sampling, lane.seq, request.sampling)
            else:
                begin = partial(self._model.begin_beams, lane.seq, request.beams, request.sampling)
            error = _twice(begin)
            if error is not None:
                failures.append(Failure(lane, error))
        return failures

    def _choose(self, lanes: list[Lane], lost: Collection[Lane], buffer: int) -> tuple[Flight, list[Failure]]:
        """Let every lane choose, but those that are lost; return who did, and who could not."""
        choosing = [lane for lane in lanes if not lane.is_search]
        searched: list[Lane] = []
        rows: list[DevicePtr] = []
        first = 0
        if len(choosing) < len(lanes):
            first, row = -1, 0
            for lane in lanes:
                if not lane.is_search:
                    first = row if first < 0 else first
                elif lane not in lost:
                    searched.append(lane)
                    rows.append(self._row(row))
                row += lane.rows
        logprobs = any(map(_LOGPROBS, choosing))
        failures = [
            *self._attempt(choosing, lambda: self._choose_tokens(choosing, first, buffer, logprobs), 2),
            *self._attempt(searched, lambda: self._select(searched, rows, buffer), 1),  # a second selection is another
        ]
        if failures:
            failed = {failure.lane for failure in failures}
            choosing = [lane for lane in choosing if lane not in failed]
            searched = [lane for lane in searched if lane not in failed]
        for lane in (*choosing, *searched):
            lane.chosen += 1
            lane.pending = None
        plain = [lane.is_plain and 1 < lane.chosen < lane.most for lane in choosing]
        return Flight(choosing, searched, buffer, logprobs, plain), failures

    @staticmethod
    def _attempt(lanes: list[Lane], call: Callable[[], None], times: int) -> list[Failure]:
        """Make a call for lanes, if there are any, at most so often; return them as failures if it never works."""
        error = _repeated(call, times) if lanes else None
        return [] if error is None else [Failure(lane, error) for lane in lanes]

    def _choose_tokens(self, lanes: list[Lane], first: int, buffer: int, logprobs: bool) -> None:
        """Enqueue the choice of lanes whose rows follow row ``first``. Choosing again gives the same tokens."""
        seqs = [lane.seq for lane in lanes]
        dst, event = self._view(buffer, len(lanes)), self._events[buffer]
        self._model.sample_batch_to_feed(self._row(first), seqs, dst, event, logprobs=logprobs, untouched=True)

    def _select(self, lanes: list[Lane], rows: list[DevicePtr], buffer: int) -> None:
        """Enqueue a step of the lanes' searches. It comes after the choice, so that the event tells of both."""
        flags = self._states(buffer, len(lanes))
        self._model.select_beams_to_feed(rows, [lane.seq for lane in lanes], flags, self._events[buffer])

    def _row(self, row: int) -> DevicePtr:
        """Return the address of a row of logits."""
        base = self._model.logits_buffer_ptr()
        if self._pointers[:1] != [base]:
            row_bytes = self._model.logits_row_bytes()
            self._pointers = [base.offset(index * row_bytes) for index in range(self._rows)]
        return self._pointers[row]

    def _states(self, buffer: int, searches: int) -> NDArray[np.int32]:
        """Return where the flags of so many searches go."""
        key = (buffer, -1 - searches)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._buffers[buffer][-self._rows :][:searches]
        return found

    def _view(self, buffer: int, lanes: int) -> NDArray[np.int32]:
        """Return where the results of so many lanes go: the same array each time, which copies know then."""
        found = self._views.get((buffer, lanes))
        if found is None:
            found = self._buffers[buffer][: _RESULTS * lanes].reshape(_RESULTS, lanes)
            self._views[buffer, lanes] = found
        return found

    def read(self) -> Outcomes:
        """Wait for the oldest step in flight and return what it chose; it is in flight no more, even if this raises."""
        flight = self._flights.popleft()
        self._free.append(flight.buffer)
        self._model.event_synchronize(self._events[flight.buffer])
        tokens, logprobs, flags = self._view(flight.buffer, len(flight.choosing))
        return Outcomes(
            flight.choosing,
            tokens.tolist(),
            logprobs.view(np.float32).tolist() if flight.logprobs else None,
            flags.tolist(),
            flight.plain,
            flight.searched,
            self._states(flight.buffer, len(flight.searched)).tolist(),
        )


def _twice(call: Callable[[], None]) -> Exception | None:
    """Make a call, and once more if it fails; return how it failed then."""
    return _repeated(call, 2)


def _repeated(call: Callable[[], None], times: int) -> Exception | None:
    """Make a call, again if it fails, at most so many times; return how it failed the last time."""
    failure = None
    for _ in range(times):
        try:
            call()
        except Exception as error:
            failure = error
        else:
            return None
    return failure


def _fed(lanes: Sequence[Lane]) -> tuple[list[FeedSource], list[SequenceState]]:
    """Return where each lane's next input id comes from, and the lanes' sequences."""
    sources = [_SAMPLED if one.pending is None else FeedSource(token=one.pending) for one in lanes]
    return sources, [one.seq for one in lanes]


def _slices(lanes: Sequence[Lane]) -> list[PrefillSlice]:
    return [PrefillSlice.whole(one.handle.request.prompt_tokens, one.seq) for one in lanes]
