# SPDX-License-Identifier: MIT OR Apache-2.0
"""Captures and graphs of the host backend: work that is kept instead of run, with what comes before what."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpu_runtime.host.streams import HostStream, Point, Sited, Work

Clock = dict[HostStream, int]
"""For each stream of a capture, how many of its nodes are known to come before."""

Mark = TypeVar("Mark")


class Target(Protocol[Mark]):
    """What the nodes of a graph are put on: the streams of an order, or another capture."""

    def add(self, stream: HostStream, work: Work) -> None:
        """Put ``work`` behind what is on ``stream``."""

    def mark(self, stream: HostStream) -> Mark:
        """Return what stands for everything on ``stream``."""

    def join(self, stream: HostStream, mark: Mark) -> None:
        """Let what is put on ``stream`` from now on come after ``mark``."""


@dataclass(frozen=True, slots=True)
class Node:
    """One piece of captured work, the stream that it was put on, and the nodes that come before it."""

    work: Work
    stream: HostStream
    after: Clock


@dataclass(eq=False, slots=True)
class Graph:
    """Captured work, launched with the addresses it was captured with. ``last`` is the end of its last launch."""

    nodes: list[Node] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    last: Point | None = None

    def replay(self) -> None:
        """Run every node, in the order of the capture and after other replays."""
        with self.lock:
            for node in self.nodes:
                node.work()

    def unfold(self, target: Target[Mark], stream: HostStream, sited: Sited) -> None:
        """Put every node on ``target``, behind what is on ``stream`` and before what comes next on it.

        Each stream of the capture becomes a new one, so that nodes are ordered as far as the capture says and no more.
        """
        start = target.mark(stream)
        lanes: dict[HostStream, HostStream] = {}
        marks: dict[HostStream, list[Mark]] = {}
        known: dict[HostStream, Clock] = {}
        for node in self.nodes:
            one = node.stream
            if one not in lanes:
                lanes[one], marks[one], known[one] = HostStream(one.handle), [], {}
                target.join(lanes[one], start)
            for other, count in node.after.items():
                if other is not one and count > known[one].get(other, 0):
                    target.join(lanes[one], marks[other][count - 1])
                    known[one][other] = count
            target.add(lanes[one], sited(node.work))
            marks[one].append(target.mark(lanes[one]))
        for ends in marks.values():
            target.join(stream, ends[-1])


@dataclass(eq=False, slots=True)
class Capture:
    """A capture in progress: the graph, the stream that began it, and what each joined stream knows."""

    origin: HostStream
    graph: Graph = field(default_factory=Graph)
    clocks: dict[HostStream, Clock] = field(default_factory=dict)
    ended: bool = False

    def join(self, stream: HostStream, mark: Clock) -> None:
        """Let ``stream``, which becomes part of the capture, come after everything in ``mark``."""
        known = self.clocks.setdefault(stream, {})
        for other, count in mark.items():
            known[other] = max(known.get(other, 0), count)
        stream.capture = self

    def mark(self, stream: HostStream) -> Clock:
        """Return what ``stream`` knows."""
        return dict(self.clocks[stream])

    def add(self, stream: HostStream, work: Work) -> None:
        """Append one node from ``stream``."""
        clock = self.clocks[stream]
        self.graph.nodes.append(Node(work, stream, dict(clock)))
        clock[stream] = clock.get(stream, 0) + 1

    def unjoined(self) -> list[HostStream]:
        """Return the streams with work that the origin does not wait for."""
        known = self.clocks[self.origin]
        return [stream for stream, clock in self.clocks.items() if known.get(stream, 0) < clock.get(stream, 0)]

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
