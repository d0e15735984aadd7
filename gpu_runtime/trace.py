# SPDX-License-Identifier: MIT OR Apache-2.0
"""Traces of what is enqueued on a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpu_runtime.handles import LaunchRecord


class Traces:
    """The traces that are open: ``active`` is empty when there are none, and then nothing need be described.

    ``on_change`` is called when one has been opened or closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.active: tuple[list[LaunchRecord], ...] = ()
        self.on_change: Callable[[], None] = lambda: None

    def add(self, record: LaunchRecord) -> None:
        """Append ``record`` to every open trace."""
        for trace in self.active:
            trace.append(record)

    @contextmanager
    def open(self) -> Iterator[list[LaunchRecord]]:
        """Return a context whose value lists what is added inside it."""
        trace: list[LaunchRecord] = []
        with self._lock:
            self.active = (*self.active, trace)
            self.on_change()
        try:
            yield trace
        finally:
            with self._lock:
                self.active = tuple(other for other in self.active if other is not trace)
                self.on_change()
