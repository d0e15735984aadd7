# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps on the device: some lanes decode, others are prefilled beside them, and every one chooses its next token.

A step is enqueued without waiting for the one before it. Its tokens are read some steps later, from page-locked memory,
when an event says that they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from metrale.engine.lane import Lane
from metrale.model import GREEDY, FeedSource, Model, PrefillSlice, SequenceState

_RESULTS = 3  # id, log-probability, flags


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step chose for one lane."""

    lane: Lane
    token: int
    logprob: float
    flags: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A lane that a step could not take along, and why."""

    lane: Lane
    error: Exception


@dataclass(slots=True, eq=False)
class _Flight:
    """A step in flight: its lanes in the order of its rows, and where their results will be."""

    lanes: list[Lane]
    buffer: int


class Steps:
    """Enqueues steps, at most ``depth`` ahead of what has been read.

    Parameters
    ----------
    model : Model
    rows : int
        Most lanes of a step.
    depth : int
    """

    def __init__(self, model: Model, rows: int, depth: int) -> None:
        self._model = model
        self._flights: deque[_Flight] = deque()
        self._buffers: list[NDArray[np.int32]] = []
        self._events: list[int] = []
        size = _RESULTS * rows * np.dtype(np.int32).itemsize
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
    def in_flight(self) -> Sequence[Lane]:
        """The lanes of all steps in flight."""
        return [lane for flight in self._flights for lane in flight.lanes]

    def close(self) -> None:
        """Give back streams, events and memory."""
        self._flights.clear()
        self._buffers.clear()
        self._teardown.close()

    def enqueue(self, decoding: Sequence[Lane], joining: Sequence[Lane]) -> list[Failure]:
        """Enqueue one step: ``decoding`` lanes in the first rows, then ``joining`` ones, which are prefilled.

        What fails is tried again in parts, so that only the lanes whose own part fails are lost.

        Returns
        -------
        list of Failure
            The lanes that the step gives no token, one perhaps twice. What their sequences hold is not known.
        """
        buffer = self._free[0]
        with self._model.exclusive():  # the rows are everybody's until the tokens are chosen
            lanes, failures = self._forward(list(decoding), list(joining))
            if not lanes:
                return failures
            failures += self._begin(lanes)
            error = self._choose(lanes, buffer)
        if error is not None:
            return [*failures, *(Failure(lane, error) for lane in lanes)]
        self._free.popleft()
        self._flights.append(_Flight(lanes, buffer))
        return failures

    def _forward(self, decoding: list[Lane], joining: list[Lane]) -> tuple[list[Lane], list[Failure]]:
        """Enqueue the forward; return the lanes whose logits are in rows 0, 1, ..., and those that failed."""
        try:
            self._model.mixed_forward_batch_fed(*_fed(decoding), _slices(joining), self._prefill_stream)
            failures: list[Failure] = []
        except Exception:  # written again from the start: a forward leaves nothing behind that a second one minds
            decoding, failures = self._decode_alone(decoding)
            joined: list[Lane] = []
            for lane in joining:
                row = len(decoding) + len(joined)
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

    def _decode_alone(self, lanes: list[Lane]) -> tuple[list[Lane], list[Failure]]:
        if lanes:
            try:
                self._model.decode_batch_fed(*_fed(lanes))
            except Exception as error:
                return [], [Failure(lane, error) for lane in lanes]
        return lanes, []

    def _begin(self, lanes: list[Lane]) -> list[Failure]:
        """Tell the device how lanes choose that do so for the first time, or again; return those that cannot.

        They keep their rows in this step, where something is chosen that nobody will read.
        """
        failures = []
        for lane in lanes:
            sampling = lane.handle.request.sampling
            # a lane that comes back tells the device its history anew, now that the pending token belongs to it
            if (lane.chosen and lane.pending is None) or sampling == GREEDY:
                continue
            error = _twice(partial(self._model.begin_sampling, lane.seq, sampling))
            if error is not None:
                failures.append(Failure(lane, error))
        return failures

    def _choose(self, lanes: list[Lane], buffer: int) -> Exception | None:
        """Let every lane choose its next token; return what went wrong. Choosing again gives the same tokens."""
        model = self._model
        seqs = [lane.seq for lane in lanes]
        logprobs = any(lane.handle.request.logprobs for lane in lanes)
        dst, event = self._view(buffer, len(lanes)), self._events[buffer]
        rows = model.logits_buffer_ptr()
        error = _twice(partial(model.sample_batch_to_feed, rows, seqs, dst, event, logprobs=logprobs))
        if error is None:
            for lane in lanes:
                lane.chosen += 1
                lane.pending = None
        return error

    def _view(self, buffer: int, lanes: int) -> NDArray[np.int32]:
        return self._buffers[buffer][: _RESULTS * lanes].reshape(_RESULTS, lanes)

    def read(self) -> list[Outcome]:
        """Wait for the oldest step in flight and return what it chose; it is in flight no more, even if this raises."""
        flight = self._flights.popleft()
        self._free.append(flight.buffer)
        self._model.event_synchronize(self._events[flight.buffer])
        results = self._view(flight.buffer, len(flight.lanes))
        ids, flags = results[0].tolist(), results[2].tolist()
        logprobs = results[1].view(np.float32).tolist()
        return [Outcome(*one) for one in zip(flight.lanes, ids, logprobs, flags, strict=True)]


def _twice(call: Callable[[], None]) -> Exception | None:
    """Make a call, and once more if it fails; return how it failed then."""
    failure = None
    for _ in range(2):
        try:
            call()
        except Exception as error:
            failure = error
        else:
            return None
    return failure


def _fed(lanes: Sequence[Lane]) -> tuple[list[FeedSource], list[SequenceState]]:
    """Return where each lane's next input id comes from, and the lanes' sequences."""
    sources = [FeedSource(sampled=True) if one.pending is None else FeedSource(token=one.pending) for one in lanes]
    return sources, [one.seq for one in lanes]


def _slices(lanes: Sequence[Lane]) -> list[PrefillSlice]:
    return [PrefillSlice.whole(one.handle.request.prompt_tokens, one.seq) for one in lanes]
