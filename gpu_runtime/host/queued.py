# SPDX-License-Identifier: MIT OR Apache-2.0
"""Orders in which enqueued work waits in the queues of its streams until the order lets it run.

A stream's queue is run from its head. A piece that waits for an event carries the point that it waits for, which was
enqueued before it; hence waits cannot form a cycle, and what a point needs can always be run. Pieces run one at a
time, on whichever thread takes the turn: one that waits for them, or, if the order likes, one that happens to call.

A piece that fails is done; what comes after it runs all the same, as it would if the caller of an `InOrder` backend had
caught the error. The error is kept for the calls that wait: for the piece's stream, for an event that comes after the
piece, or for a stream that waited for such an event. It is raised once by each thread that makes such a call, until the
thread that enqueued the piece has got it; `close` raises it if nobody did. A call that has several to raise raises what
came first, with notes of the others. A note names the place that enqueued the work. Calls that only make sure that all
work is done, such as `free`, raise none of this.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpu_runtime.errors import DeviceError
from gpu_runtime.host.graphs import Graph
from gpu_runtime.host.streams import Failure, HostStream, Piece, Point, Sited, Work
from gpu_runtime.ledger import call_site


class Queued(abc.ABC):
    """The queues, their waits and failures. Which piece runs next, and when, is the subclass' affair."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of all queues; a finalizer may enqueue on a thread that holds it
        self._turn = threading.Lock()  # held while a piece runs, and taken before the former
        self._runner: int | None = None
        self._closed = False
        self._failures: list[Failure] = []
        self.pending: dict[HostStream, None] = {}
        """The streams with something in their queue, in the order in which they got it."""

    @abc.abstractmethod
    def _run(self, goals: list[Point]) -> None:
        """Run what ``goals`` need until they are reached."""

    @abc.abstractmethod
    def _go_on(self) -> None:
        """Run what the order likes to run by itself, after a call has enqueued something."""

    # enqueueing

    def submit(self, stream: HostStream, work: Work) -> None:
        self._push(stream, Piece(work, call_site(), threading.get_ident()))
        self._go_on()

    def launch(self, stream: HostStream, graph: Graph, sited: Sited) -> None:
        with self._lock:
            if graph.last is not None:
                self.join(stream, graph.last)
            graph.unfold(self, stream, sited)
            graph.last = self.mark(stream)
        self._go_on()

    def record(self, stream: HostStream) -> Point:
        with self._lock:
            point = self.mark(stream)
            point.number += 1
            self._push(stream, Piece(mark=point))
        self._go_on()
        return point

    def wait(self, stream: HostStream, point: Point) -> None:
        self.join(stream, point)
        self._go_on()

    def _push(self, stream: HostStream, piece: Piece) -> None:
        with self._lock:
            if self._closed:
                raise DeviceError("the backend is closed")
            stream.pieces.append(piece)
            self.pending[stream] = None

    # what a graph is unfolded on

    def add(self, stream: HostStream, work: Work) -> None:
        """Put ``work`` behind what is on ``stream``."""
        self._push(stream, Piece(work, call_site(), threading.get_ident()))

    def mark(self, stream: HostStream) -> Point:
        """Return the point of everything on ``stream``."""
        with self._lock:
            return Point(stream, stream.done + len(stream.pieces))

    def join(self, stream: HostStream, mark: Point) -> None:
        """Let what is put on ``stream`` from now on come after ``mark``."""
        if mark.stream is not stream and not (mark.reached and not mark.stream.failures):
            self._push(stream, Piece(after=mark))

    # waiting

    def query(self, point: Point) -> bool:
        return point.reached

    def reach(self, point: Point) -> None:
        self._run([point])
        self._raise_failures_before(point)

    def drain(self, stream: HostStream) -> None:
        self.reach(self.mark(stream))

    def finish(self, streams: Iterable[HostStream]) -> None:
        with self._lock:
            goals = [self.mark(stream) for stream in self.pending]
        self._run(goals)

    def close(self, streams: Iterable[HostStream]) -> None:
        with self._lock:
            self._closed = True
        self.finish(streams)

    # running

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        """Return a context in which no other thread runs anything.

        Raises
        ------
        DeviceError
            In a piece of work, which cannot wait for another one: they would wait for each other.
        """
        if self._runner == threading.get_ident():
            raise DeviceError("a call that waits was made while this thread runs a piece of work (by a finalizer?)")
        with self._turn, self._as_runner():
            yield

    @contextmanager
    def _as_runner(self) -> Iterator[None]:
        self._runner = threading.get_ident()
        try:
            yield
        finally:
            self._runner = None

    def _run_head(self, stream: HostStream) -> None:
        """Run the first piece of a queue, which must be `ready`. The caller has the turn."""
        piece = stream.pieces[0]
        try:
            if piece.work is not None:
                piece.work()
        except Exception as error:
            self._fail(stream, piece, error)
        finally:
            self._pass(stream, piece)

    def _fail(self, stream: HostStream, piece: Piece, error: Exception) -> None:
        error.add_note(f"enqueued at {piece.site}")
        failure = Failure(error, piece.thread)
        with self._lock:
            self._failures.append(failure)
            stream.failures.append((stream.done + 1, failure))

    def _pass(self, stream: HostStream, piece: Piece) -> None:
        """Take the first piece, which is done, out of a queue."""
        with self._lock:
            if piece.after is not None:
                known = [failure for _, failure in stream.failures]
                fresh = [failure for failure in failures_before(piece.after) if failure not in known]
                stream.failures += [(stream.done + 1, failure) for failure in fresh]
            if piece.mark is not None:
                piece.mark.reached_at = time.perf_counter()
            stream.pieces.popleft()
            stream.done += 1
            if not stream.pieces:
                del self.pending[stream]

    # failures

    def raise_failures(self) -> None:
        with self._lock:
            self._raise([one for one in self._failures if not one.told])

    def _raise_failures_before(self, point: Point) -> None:
        with self._lock:
            try:
                self._raise(failures_before(point))
            finally:
                point.stream.failures = [one for one in point.stream.failures if not one[1].settled]

    def _raise(self, failures: list[Failure]) -> None:
        """Raise what this thread has not been told of ``failures``."""
        thread = threading.get_ident()
        errors = [one.error for one in failures if thread not in one.told]
        for one in failures:
            one.told.add(thread)
        self._failures = [one for one in self._failures if not one.settled]
        if errors:
            for other in errors[1:]:
                text = "; ".join([f"{type(other).__name__}: {other}", *getattr(other, "__notes__", [])])
                errors[0].add_note(f"and then {text}")
            raise errors[0]


def ready(stream: HostStream) -> bool:
    """Return whether the first piece of a queue waits for nothing that has not been reached."""
    after = stream.pieces[0].after
    return after is None or after.reached


def failures_before(point: Point) -> list[Failure]:
    """Return what went wrong before a point and is not settled, in the order in which its stream learnt of it."""
    return [one for number, one in point.stream.failures if number <= point.number and not one.settled]


class Deferred(Queued):
    """Runs nothing until somebody waits, and then only what that needs: every stream lags as far as it can."""

    def _run(self, goals: list[Point]) -> None:
        for goal in goals:
            while not goal.reached:
                with self._my_turn():
                    if not goal.reached:
                        self._run_head(self._first(goal.stream))

    def _go_on(self) -> None:
        """Run nothing."""

    @staticmethod
    def _first(stream: HostStream) -> HostStream:
        """Return the stream whose first piece is what the first piece of ``stream`` waits for, or that one itself."""
        while (after := stream.pieces[0].after) is not None and not after.reached:
            stream = after.stream
        return stream
