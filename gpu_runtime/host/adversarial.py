# SPDX-License-Identifier: MIT OR Apache-2.0
"""An order that looks for trouble: by a seed, any order of work that streams and events allow.

As in probabilistic concurrency testing (Burckhardt et al., 2010), each stream has a random priority, the ready stream
of highest priority runs, and priorities change at random moments. Streams of the upper half run ahead by themselves, at
any call; those of the lower half lag until somebody waits for them. How often work runs by itself, how often priorities
change and how often they are ignored is drawn once for each seed, so that seeds differ in kind and not only in detail.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import Final

from gpu_runtime.host.queued import Queued, ready
from gpu_runtime.host.streams import HostStream, Point

_AHEAD: Final = 0.5
"""The priority from which a stream runs by itself."""

_PACES: Final = (0.0, 0.2, 0.6, 1.0)
"""How likely it is that work runs by itself at a call."""

_AMOUNTS: Final = (1, 2, 5, 1 << 30)
"""How many pieces it may then be."""

_CHANGES: Final = (0.0, 0.05, 0.3)
"""How likely it is that a priority is drawn anew, for each piece that runs and for each call."""

_WHIMS: Final = (0.0, 0.1, 0.5)
"""How likely it is that a piece is chosen without regard to priorities."""


class Adversarial(Queued):
    """Chooses what runs, and when, by a seed. The same calls from one thread give the same order.

    A call that waits runs what it needs, and what runs ahead of that. A `query` of a point that has not been reached
    runs something every other time, so that a loop of queries comes to an end.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._pace = self._random.choice(_PACES)
        self._change = self._random.choice(_CHANGES)
        self._whim = self._random.choice(_WHIMS)

    def query(self, point: Point) -> bool:
        if not point.reached and self._random.random() < 0.5:
            self._run_some(self._needed([point]), 1)
        return point.reached

    def _go_on(self) -> None:
        with self._lock:
            if self._random.random() < self._change and self.pending:
                self._random.choice(list(self.pending)).priority = self._random.random()
        if self._random.random() < self._pace:
            self._run_some({}, self._random.choice(_AMOUNTS))

    def _run_some(self, needed: dict[HostStream, int], most: int) -> None:
        """Run up to ``most`` pieces, unless another thread is running something."""
        for _ in range(most):
            if not self._turn.acquire(blocking=False):
                return
            try:
                with self._as_runner():
                    stream = self._choose(needed)
                    if stream is None:
                        return
                    self._run_head(stream)
            finally:
                self._turn.release()

    def _run(self, goals: list[Point]) -> None:
        needed = self._needed(goals)
        for goal in goals:
            while not goal.reached:
                with self._my_turn():
                    stream = None if goal.reached else self._choose(needed)
                    if stream is not None:
                        self._run_head(stream)

    def _needed(self, goals: list[Point]) -> dict[HostStream, int]:
        """Return the streams with pieces that have to be done before ``goals`` are reached, and how many have to be."""
        needed: dict[HostStream, int] = {}
        rest = list(goals)
        with self._lock:
            while rest:
                point = rest.pop()
                stream = point.stream
                known = max(needed.get(stream, 0), stream.done)
                if point.number > known:
                    needed[stream] = point.number
                    pieces = islice(stream.pieces, known - stream.done, point.number - stream.done)
                    rest += [piece.after for piece in pieces if piece.after is not None]
        return needed

    def _choose(self, needed: dict[HostStream, int]) -> HostStream | None:
        """Return the stream to run the next piece of: one that is needed, or one that runs ahead."""
        with self._lock:
            rivals = []
            for stream in self.pending:
                if stream.priority is None:
                    stream.priority = self._random.random()
                if (stream.priority >= _AHEAD or stream.done < needed.get(stream, 0)) and ready(stream):
                    rivals.append((stream.priority, stream))
            if not rivals:
                return None
            whim = self._random.random() < self._whim
            _, chosen = self._random.choice(rivals) if whim else max(rivals, key=lambda rival: rival[0])
            if self._random.random() < self._change:
                chosen.priority = self._random.random()
            return chosen
