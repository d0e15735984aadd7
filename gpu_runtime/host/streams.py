# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams and events of the host backend, what an order of their work has to do, and the order of every day.

Work is a closure. `InOrder` runs it as soon as it is enqueued, which is one of the orders that streams allow. Those of
`gpu_runtime.host.queued` put it into the queues of the streams, and take it out again when they please.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gpu_runtime.errors import DeviceError

if TYPE_CHECKING:
    from gpu_runtime.host.graphs import Capture, Graph

Work = Callable[[], None]
Sited = Callable[[Work], Work]
"""Makes work remember the place that enqueues it."""


@dataclass(eq=False, slots=True)
class Failure:
    """What a piece of work raised, the thread that enqueued it, and the threads that have got the error."""

    error: Exception
    thread: int
    told: set[int] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        """Whether nobody need be told any more."""
        return self.thread in self.told


@dataclass(eq=False, slots=True)
class Piece:
    """One entry of a stream's queue: work with the place and the thread that enqueued it, or a wait, or a record."""

    work: Work | None = None
    site: str = ""
    thread: int = 0
    after: Point | None = None
    """What has to be reached first, on another stream."""
    mark: Point | None = None
    """What is reached by this piece."""


@dataclass(eq=False, slots=True)
class HostStream:
    """One stream and its queue. One ``owned`` by the backend stays.

    Attributes
    ----------
    lock : RLock
        Keeps work from several threads one at a time, where the order runs it at once.
    pieces : deque of Piece
        What is enqueued and has not run. A piece leaves it when it is done.
    done : int
        How many pieces have left it.
    failures : list of tuple of int and Failure
        What went wrong on it or before what it waited for, with the number of pieces that were done then.
    priority : float or None
        For the order's own use.
    """

    handle: int
    owned: bool = False
    capture: Capture | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    pieces: deque[Piece] = field(default_factory=deque)
    done: int = 0
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    priority: float | None = None


@dataclass(eq=False, slots=True)
class Point:
    """A place on a stream, reached when ``number`` pieces are done: if it was recorded, at ``reached_at`` seconds."""

    stream: HostStream
    number: int
    reached_at: float | None = None

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.number


@dataclass(eq=False, slots=True)
class HostEvent:
    """One event: the point that it was last recorded at, or the capture, and what its stream knew there."""

    timing: bool
    point: Point | None = None
    capture: Capture | None = None
    clock: dict[HostStream, int] = field(default_factory=dict)

    def elapsed_ms(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to ``end``.

        Raises
        ------
        DeviceError
            When either has no timing or has not been reached.
        """
        if not (self.timing and end.timing):
            raise DeviceError("event_elapsed_ms: expected events created with timing=True")
        first, last = (None if event.point is None else event.point.reached_at for event in (self, end))
        if first is None or last is None:
            raise DeviceError("event_elapsed_ms: expected events that have been recorded and reached")
        return (last - first) * 1e3


class Order(Protocol):
    """When enqueued work runs. What is captured never comes here."""

    def submit(self, stream: HostStream, work: Work) -> None:
        """Enqueue ``work`` after everything already on ``stream``."""

    def launch(self, stream: HostStream, graph: Graph, sited: Sited) -> None:
        """Enqueue a graph, whose launches come one after the other, whatever streams they are on."""

    def record(self, stream: HostStream) -> Point:
        """Return the point of everything already on ``stream``."""

    def wait(self, stream: HostStream, point: Point) -> None:
        """Let what is enqueued on ``stream`` from now on come after ``point``."""

    def query(self, point: Point) -> bool:
        """Return whether ``point`` has been reached."""

    def reach(self, point: Point) -> None:
        """Return once ``point`` has been reached. Raises what went wrong before it."""

    def drain(self, stream: HostStream) -> None:
        """Return once everything on ``stream`` has run. Raises what went wrong on it."""

    def finish(self, streams: Iterable[HostStream]) -> None:
        """Return once everything has run, on ``streams`` and on those that have ended. Failures wait for who asks."""

    def close(self, streams: Iterable[HostStream]) -> None:
        """Do as `finish` does, and refuse what comes later."""

    def raise_failures(self) -> None:
        """Raise what went wrong and nobody was told."""


class InOrder:
    """Runs work in the order in which it is enqueued, before `submit` returns, which also raises what goes wrong."""

    def submit(self, stream: HostStream, work: Work) -> None:
        with stream.lock:
            work()

    def launch(self, stream: HostStream, graph: Graph, sited: Sited) -> None:
        self.submit(stream, sited(graph.replay))

    def record(self, stream: HostStream) -> Point:
        with stream.lock:  # another thread may be running work on it
            return Point(stream, 0, time.perf_counter())

    def wait(self, stream: HostStream, point: Point) -> None:
        """Do nothing: the order in which work is enqueued already puts it behind the point."""

    def query(self, point: Point) -> bool:
        return point.reached

    def reach(self, point: Point) -> None:
        """Do nothing: `record` returned when the point was reached."""

    def drain(self, stream: HostStream) -> None:
        with stream.lock:
            pass

    def finish(self, streams: Iterable[HostStream]) -> None:
        for stream in streams:
            self.drain(stream)

    def close(self, streams: Iterable[HostStream]) -> None:
        self.finish(streams)

    def raise_failures(self) -> None:
        """Do nothing: `submit` has raised them."""
