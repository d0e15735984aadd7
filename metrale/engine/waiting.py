# SPDX-License-Identifier: MIT OR Apache-2.0
"""The requests that wait for a lane: bounded, by priority, and none waits for ever.

A request's effective priority is its own plus one for every ``aging`` seconds since its submission. As all gain at the
same rate, the order of two requests never changes: it is that of ``submitted_at - priority * aging``, a number that is
known from the start. A request of priority 0 is passed by those of priority p that come within ``p * aging`` seconds,
and by no later one.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal

from metrale.checks import real
from metrale.engine.errors import EngineClosed, QueueFull
from metrale.engine.handle import RequestHandle, Wakeup
from metrale.engine.wakeup import LoopWakeup, ThreadWakeup
from metrale.errors import InvalidInput

AGING_SECONDS: Final = 2.0
"""Default of how long a request waits to gain one priority."""

_SLACK: Final = 32
"""Dead entries that a heap may have beside as many as it has live ones."""


class WaitingQueue:
    """A priority queue of handles, with back-pressure.

    Any thread puts, and waits while ``bound`` requests are there; of those that wait, the one that goes first in the
    queue's own order is let in first. One thread takes. Everything is O(log n), amortised.

    Parameters
    ----------
    bound : int
        Most requests that wait. Only `requeue` goes beyond it.
    aging : float
        Seconds in which a request gains one priority.
    on_arrival : callable or None
        Called after a request came in, in the thread that put it; it must not block.

    Raises
    ------
    InvalidInput
        When ``bound`` is below 1, or ``aging`` not above 0.
    """

    def __init__(
        self, bound: int, *, aging: float = AGING_SECONDS, on_arrival: Callable[[], None] | None = None
    ) -> None:
        if bound < 1:
            raise InvalidInput("bound", "at least 1", bound)
        aging = real("aging", aging, sys.float_info.min, math.inf, "a finite number of seconds above 0")
        self._bound = bound
        self._aging = aging
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._closed = False
        self._tickets = 0
        self._waiting = _Heap()
        self._blocked = _Heap()  # the handles of producers that wait to be let in
        self._deadlines = _Heap()  # of both
        self._producers: dict[RequestHandle, _Producer] = {}

    def __len__(self) -> int:
        """Return how many requests wait, without those whose producers are blocked."""
        return len(self._waiting)

    @property
    def blocked(self) -> int:
        """How many producers wait to be let in."""
        return len(self._blocked)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # Producers: any thread.

    def put(self, handle: RequestHandle, *, block: bool = True, timeout: float | None = None) -> None:
        """Let a handle in, which is not there yet; wait for room if ``block``, at most ``timeout`` seconds.

        Raises
        ------
        QueueFull
            When there was no room.
        EngineClosed
            When the queue is closed, or was closed meanwhile.
        """
        wakeup = ThreadWakeup()
        producer = self._enter(handle, wakeup if block else None)
        if producer is not None:
            try:
                wakeup.wait(timeout)
            except BaseException:  # an interrupt: the caller will never have the handle
                self._abandon(handle, producer)
                raise
            self._settle(handle, producer)
        self._announce()

    async def aput(self, handle: RequestHandle) -> None:
        """Do as `put` in an event loop, which goes on meanwhile.

        A task that is cancelled while it waits leaves nothing behind: if its request was just let in, it is cancelled.

        Raises
        ------
        EngineClosed
            When the queue is closed, or was closed meanwhile.
        """
        wakeup = LoopWakeup()
        producer = self._enter(handle, wakeup)
        if producer is not None:
            try:
                await wakeup.wait()
            except GeneratorExit:  # comes from the garbage collector, perhaps while this very thread holds the lock
                handle.cancel()
                raise
            except BaseException:
                self._abandon(handle, producer)
                raise
            self._settle(handle, producer)
        self._announce()

    def close(self) -> None:
        """Take no more: blocked producers raise EngineClosed. What waits can still be taken."""
        with self._lock:
            self._closed = True
            producers = list(self._producers.values())
            while (handle := self._blocked.take()) is not None:
                self._deadlines.remove(handle)
            self._producers.clear()
            for producer in producers:
                producer.outcome = "closed"
        for producer in producers:
            producer.wakeup.wake()

    # The one consumer.

    def peek(self) -> RequestHandle | None:
        """Return what `pop` would, and leave it there."""
        with self._lock:
            return self._waiting.first()

    def pop(self) -> RequestHandle | None:
        """Take the first request out; None when there is none."""
        with self._lock:
            handle = self._waiting.take()
            if handle is None:
                return None
            self._deadlines.remove(handle)
            admitted = self._fill()
        _wake(admitted)
        return handle

    def remove(self, handle: RequestHandle) -> bool:
        """Take one request out, wherever it stands, that of a blocked producer included; return whether it was there.

        Such a producer's `put` returns, as if its request had been let in and taken.
        """
        with self._lock:
            self._deadlines.remove(handle)
            admitted = self._take_out(handle)
        _wake(admitted or [])
        return admitted is not None

    def expired(self, now: float) -> list[RequestHandle]:
        """Take out, as `remove` does, and return every request whose deadline has come."""
        late = []
        admitted: list[_Producer] = []
        with self._lock:
            while (handle := self._deadlines.first()) is not None:
                if handle.deadline is None or handle.deadline > now:
                    break
                self._deadlines.take()
                admitted += self._take_out(handle) or []
                late.append(handle)
        _wake(admitted)
        return late

    def requeue(self, handle: RequestHandle) -> None:
        """Put back what was taken, at the place where it stood. The bound does not matter, nor whether it is closed."""
        with self._lock:
            self._add(handle)

    # With the lock held, but for `_wake` and `_announce`.

    def _place(self, handle: RequestHandle) -> tuple[float, int]:
        if handle.place is None:
            self._tickets += 1  # decides between equal times: first come, first served
            handle.place = (handle.submitted_at - handle.request.priority * self._aging, self._tickets)
        return handle.place

    def _add(self, handle: RequestHandle) -> None:
        self._waiting.add(self._place(handle), handle)
        if handle.deadline is not None and handle not in self._deadlines:
            self._deadlines.add((handle.deadline, 0), handle)

    def _fill(self) -> list[_Producer]:
        """Let blocked producers' handles in while there is room; return the producers, to be woken without the lock."""
        admitted = []
        while len(self._waiting) < self._bound and (handle := self._blocked.take()) is not None:
            self._add(handle)
            admitted.append(self._admitted(handle))
        return admitted

    def _take_out(self, handle: RequestHandle) -> list[_Producer] | None:
        """Take a handle out of either heap; return the producers to be woken, None when it was in neither."""
        if self._waiting.remove(handle):
            return self._fill()
        return [self._admitted(handle)] if self._blocked.remove(handle) else None

    def _admitted(self, handle: RequestHandle) -> _Producer:
        producer = self._producers.pop(handle)
        producer.outcome = "admitted"
        return producer

    def _enter(self, handle: RequestHandle, wakeup: Wakeup | None) -> _Producer | None:
        """Let the handle in, or return its producer, which has to wait."""
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if len(self._waiting) < self._bound:  # then nobody is blocked either
                self._add(handle)
                return None
            if wakeup is None:
                raise QueueFull(f"the queue is full: {len(self._waiting)} of {self._bound} wait")
            producer = self._producers[handle] = _Producer(wakeup)
            self._blocked.add(self._place(handle), handle)
            if handle.deadline is not None:
                self._deadlines.add((handle.deadline, 0), handle)
            return producer

    def _settle(self, handle: RequestHandle, producer: _Producer) -> None:
        """Return if a producer that waited was let in, raise if not."""
        with self._lock:
            self._withdraw(handle, producer)
        if producer.outcome == "closed":
            raise EngineClosed("the engine was closed while the request waited to be let in")
        if producer.outcome == "blocked":
            raise QueueFull(f"the queue is full: {self._bound} of {self._bound} wait, and none left in time")

    def _abandon(self, handle: RequestHandle, producer: _Producer) -> None:
        """Undo a put that was interrupted."""
        with self._lock:
            self._withdraw(handle, producer)
        if producer.outcome == "admitted":
            handle.cancel()
            self._announce()

    def _withdraw(self, handle: RequestHandle, producer: _Producer) -> None:
        if producer.outcome == "blocked":
            del self._producers[handle]
            self._blocked.remove(handle)
            self._deadlines.remove(handle)

    def _announce(self) -> None:
        if self._on_arrival is not None:
            self._on_arrival()


class _Producer:
    """A caller that waits to be let in."""

    __slots__ = ("outcome", "wakeup")

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup = wakeup
        self.outcome: Literal["blocked", "admitted", "closed"] = "blocked"


def _wake(producers: list[_Producer]) -> None:
    for producer in producers:
        producer.wakeup.wake()


class _Heap:
    """A heap from which any handle can be removed. Its entry stays, dead and without it, until many are dead."""

    __slots__ = ("_entries", "_live", "_serial")

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []  # [key, serial, handle or None]; no two serials are equal
        self._live: dict[RequestHandle, list[Any]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, handle: RequestHandle) -> bool:
        return handle in self._live

    def add(self, key: tuple[float, int], handle: RequestHandle) -> None:
        assert handle not in self._live, "a handle is in the queue once"
        self._serial += 1  # a handle that comes back may meet its own dead entry, which has the same key
        entry = self._live[handle] = [key, self._serial, handle]
        heappush(self._entries, entry)

    def first(self) -> RequestHandle | None:
        while self._entries:
            handle: RequestHandle | None = self._entries[0][-1]
            if handle is not None:
                return handle
            heappop(self._entries)
        return None

    def take(self) -> RequestHandle | None:
        handle = self.first()
        if handle is not None:
            heappop(self._entries)
            del self._live[handle]
        return handle

    def remove(self, handle: RequestHandle) -> bool:
        entry = self._live.pop(handle, None)
        if entry is None:
            return False
        entry[-1] = None
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            self._entries = [entry for entry in self._entries if entry[-1] is not None]
            heapify(self._entries)
        return True
