# SPDX-License-Identifier: MIT OR Apache-2.0
"""One wait for one wake-up: by a thread, or by a task of an event loop. Whoever wakes need not know which."""

from __future__ import annotations

import asyncio
import threading


class ThreadWakeup:
    """A thread's wait. `wake` is called at most once, from any thread."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        """End the wait, or let a coming one end at once."""
        self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `wake`, at most ``timeout`` seconds; return whether it came."""
        return self._gate.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))


class LoopWakeup:
    """A task's wait in the running event loop, which goes on meanwhile. `wake` may be called from any thread."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """End the wait. When the loop is closed nobody waits any more, and nothing happens."""
        try:
            self._loop.call_soon_threadsafe(_resolve, self._future)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def wait(self) -> None:
        """Wait for `wake`."""
        await self._future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # the task may have been cancelled since
        future.set_result(None)
