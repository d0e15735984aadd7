# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who may use memory that several pieces of work share, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_runtime.backend import GpuBackend
from gpu_runtime.streams import StreamLike


class Turn:
    """Memory that one piece of work at a time uses, whatever their streams: each comes after the one before it.

    As every use waits for the last one, waiting for the latest is waiting for all so far.

    Attributes
    ----------
    event : int
        Recorded at the end of the latest use; never recorded before the first, which is no wait.
    """

    def __init__(self, gpu: GpuBackend) -> None:
        self._gpu = gpu
        self.event = gpu.create_event()

    def wait(self, stream: StreamLike) -> None:
        """Let later work of ``stream`` come after every use so far; the host goes on."""
        self._gpu.stream_wait_event(stream, self.event)

    @contextmanager
    def use(self, stream: StreamLike) -> Iterator[None]:
        """Enqueue one use inside the context, on ``stream``. One that fails half way counts: its work is enqueued."""
        self.wait(stream)
        try:
            yield
        finally:
            self._gpu.record_event(self.event, stream)

    def free(self) -> None:
        """Destroy the event. Who waits for it is not disturbed."""
        self._gpu.destroy_event(self.event)
