# SPDX-License-Identifier: MIT OR Apache-2.0
"""Marks: untimed CUDA events that note how far a stream had got, reused when nobody holds them any more."""

from __future__ import annotations

from typing import Final

from cupy.cuda import runtime

from gpu_runtime.cuda.driver import NOT_READY, Context, failure

DISABLE_TIMING: Final = 2
"""``cudaEventDisableTiming``: such events are cheaper to record and to wait for."""


def passed(context: Context, event: int) -> bool:
    """Return whether what ``event`` stands for is done. Raises DeviceError when it failed."""
    status = int(context.call_relaxed(runtime.eventQuery, event))
    if status not in (0, NOT_READY):
        raise failure("eventQuery", (event,), f"status {status}: earlier work on the device failed")
    return status == 0


class Mark:
    """Stands for the work that was on a stream when it was set. May be held by several."""

    __slots__ = ("_context", "_event", "_spare")

    def __init__(self, context: Context, event: int, spare: list[int]) -> None:
        self._context = context
        self._event = event
        self._spare = spare

    def passed(self) -> bool:
        """Return whether the work is done. Raises DeviceError when it failed."""
        return passed(self._context, self._event)

    def wait(self) -> None:
        """Wait for the work. Raises DeviceError when it failed."""
        self._context.call_relaxed(runtime.eventSynchronize, self._event)

    def put_before(self, stream: int) -> None:
        """Let later work on ``stream``, which must not be capturing, come after the work."""
        self._context.call(runtime.streamWaitEvent, stream, self._event)

    def __del__(self) -> None:
        self._spare.append(self._event)  # one step, so no lock: this may run wherever memory is collected


class Marks:
    """Makes marks from a pool of events."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._spare: list[int] = []

    def set(self, stream: int) -> Mark:
        """Return a mark on ``stream``, which must not be capturing."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = int(self._context.call(runtime.eventCreateWithFlags, DISABLE_TIMING))
        self._context.call(runtime.eventRecord, event, stream)
        return Mark(self._context, event, self._spare)

    def close(self) -> None:
        """Destroy the events that no mark holds."""
        while self._spare:
            self._context.call(runtime.eventDestroy, self._spare.pop())
