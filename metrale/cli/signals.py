# SPDX-License-Identifier: MIT OR Apache-2.0
"""SIGINT and SIGTERM as a request to stop, which a thread of its own passes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Final

from metrale.cli.failure import SIGNALLED

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, by an exception: what is held is let go of on the way.

    The exception is SystemExit, with a shell's exit code for the signal. A signal that is ignored stays ignored, and
    outside of the main thread, where Python allows no handlers, nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(SIGNALLED + number)


class Signals:
    """Within its context, after `arm`, the first SIGINT or SIGTERM calls a function; a second ends the process at once.

    A handler runs in the middle of anything that the main thread does, also while that holds a lock. So it does nothing
    but hand the signal's number to a thread that waits for it, and put the default action back, by which the system
    ends the process itself. A signal that is ignored stays ignored, as for a command that a script runs in the
    background. Outside of the main thread, where Python allows no handlers, nothing changes.

    Attributes
    ----------
    received : int or None
        The first signal's number.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._queue: SimpleQueue[int | None] = SimpleQueue()  # its put may interrupt itself
        self._before: dict[signal.Signals, Any] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Signals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watcher is not None:
            self._queue.put(None)
            self._watcher.join()

    def arm(self, stop: Callable[[], None]) -> None:
        """Have ``stop`` called, on another thread, when a signal comes."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._watcher = threading.Thread(target=self._watch, args=(stop,), name="metrale signals", daemon=True)
        self._watcher.start()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # None: set by C code, and not ours to replace
                self._before[number] = before
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._queue.put(number)

    def _watch(self, stop: Callable[[], None]) -> None:
        if self._queue.get() is not None:
            stop()
