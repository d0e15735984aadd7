# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams, events and graphs of the host backend.

Work is a closure. `InOrder` runs it as soon as it is enqueued, which is one of the orders that streams allow; other
orders are other classes with the same two methods. A capturing stream keeps its closures for a graph instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpu_runtime.errors import DeviceError

Work = Callable[[], None]
Clock = dict[int, int]
"""For each stream of a capture, how many of its nodes are known to come before."""


class Order(Protocol):
    """When enqueued work runs."""

    def submit(self, stream: HostStream, work: Work) -> None:
        """Enqueue ``work`` after everything already on ``stream``."""

    def drain(self, stream: HostStream) -> None:
        """Return once everything on ``stream`` has run."""


class InOrder:
    """Runs work in the order in which it is enqueued, before `submit` returns."""

    def submit(self, stream: HostStream, work: Work) -> None:
        with stream.lock:
            work()

    def drain(self, stream: HostStream) -> None:
        with stream.lock:  # another thread may be running work on it
            pass


@dataclass(eq=False, slots=True)
class Graph:
    """A captured sequence of work, replayed with the addresses it was captured with, one replay after the other."""

    nodes: list[Work] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def replay(self) -> None:
        with self.lock:
            for node in self.nodes:
                node()


@dataclass(eq=False, slots=True)
class Capture:
    """A capture in progress: the graph, the stream that began it, and what each joined stream knows."""

    origin: HostStream
    graph: Graph = field(default_factory=Graph)
    clocks: dict[HostStream, Clock] = field(default_factory=dict)
    ended: bool = False

    def join(self, stream: HostStream, clock: Clock) -> None:
        """Let ``stream`` come after everything in ``clock``."""
        known = self.clocks.setdefault(stream, {})
        for handle, count in clock.items():
            known[handle] = max(known.get(handle, 0), count)
        stream.capture = self

    def add(self, stream: HostStream, work: Work) -> None:
        """Append one node from ``stream``."""
        clock = self.clocks[stream]
        clock[stream.handle] = clock.get(stream.handle, 0) + 1
        self.graph.nodes.append(work)

    def unjoined(self) -> list[HostStream]:
        """Return the streams with work that the origin does not wait for."""
        known = self.clocks[self.origin]
        return [
            stream for stream, clock in self.clocks.items() if known.get(stream.handle, 0) < clock.get(stream.handle, 0)
        ]

    def release(self) -> Graph:
        """End the capture: take every joined stream out of it, and return what it recorded.

        The graph is the caller's alone: an event that was recorded in the capture knows the latter for as long as it
        lives, and need not keep the buffers of captured copies that long.
        """
        self.ended = True
        for stream in self.clocks:
            stream.capture = None
        graph, self.graph = self.graph, Graph()
        return graph


@dataclass(eq=False, slots=True)
class HostStream:
    """One stream. ``lock`` keeps work from several threads one at a time. One ``owned`` by the backend stays."""

    handle: int
    owned: bool = False
    capture: Capture | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(eq=False, slots=True)
class HostEvent:
    """One event: when it was last reached, or the capture that it was recorded in."""

    timing: bool
    reached_at: float | None = None
    pending: int = 0
    capture: Capture | None = None
    clock: Clock = field(default_factory=dict)

    @property
    def recorded(self) -> bool:
        """Whether it was last recorded outside a capture."""
        return self.capture is None and (self.pending > 0 or self.reached_at is not None)

    def reach(self) -> None:
        """Note that the stream got here. The caller serialises it with recording."""
        self.reached_at = time.perf_counter()
        self.pending -= 1

    def elapsed_ms(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to ``end``.

        Raises
        ------
        DeviceError
            When either has no timing or has not been reached.
        """
        for event in (self, end):
            if not event.timing:
                raise DeviceError("event_elapsed_ms: expected events created with timing=True")
            if event.pending or event.reached_at is None:
                raise DeviceError("event_elapsed_ms: expected events that have been recorded and reached")
        assert self.reached_at is not None
        assert end.reached_at is not None
        return (end.reached_at - self.reached_at) * 1e3
