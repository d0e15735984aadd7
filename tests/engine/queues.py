# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles for a queue, at the times of a clock that the test sets."""

from __future__ import annotations

import itertools

from metrale.engine.handle import RequestHandle
from metrale.engine.request import Request
from metrale.engine.waiting import WaitingQueue
from tests.engine.clock import FakeClock


class Maker:
    """Makes handles at the times of one clock. A handle's name is its request's only token."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._names = itertools.count(3)

    def __call__(self, priority: int = 0, timeout: float | None = None) -> RequestHandle:
        request = Request([next(self._names)], eos_ids=frozenset({2}), priority=priority, timeout=timeout)
        return RequestHandle(request, clock=self.clock)


def drain(queue: WaitingQueue) -> list[RequestHandle]:
    return list(iter(queue.pop, None))


def full(make: Maker, bound: int = 1) -> WaitingQueue:
    queue = WaitingQueue(bound)
    for _ in range(bound):
        queue.put(make())
    return queue
