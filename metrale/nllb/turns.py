# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who may use memory that several pieces of work share, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_runtime.backend import GpuBackend
from gpu_runtime.streams import StreamLike


class Turn:
    """Memory that one piece of work at a time uses, whatever their streams: each comes after the one before it.

    As every use waits for the last one, waiting for the latest is waiting for all so far. Of uses and waits that follow
    each other on the default stream nobody needs to be told. Of other streams that is not so sure: one may have been
    destroyed since, and a new one have its handle.

    Attributes
    ----------
    event : int
        Recorded at the end of the latest use; never recorded before the first, which is no wait.
    """

    def __init__(self, gpu: GpuBackend) -> None:
        self._gpu = gpu
        self.event = gpu.create_event()
        self._on_default = False  # whether the latest use was on the default stream

    def wait(self, stream: StreamLike) -> None:
        """Let later work of ``stream`` come after every use so far; the host goes on."""
        if not (self._on_default and _is_default(stream)):
            self._gpu.stream_wait_event(stream, self.event)

    @contextmanager
    def use(self, stream: StreamLike) -> Iterator[None]:
        """Enqueue one use inside the context, on ``stream``. One that fails half way counts: its work is enqueued."""
        self.wait(stream)
        try:
            yield
        finally:
            self._gpu.record_event(self.event, stream)
            self._on_default = _is_default(stream)

    def free(self) -> None:
        """Destroy the event. Who waits for it is not disturbed."""
        self._gpu.destroy_event(self.event)


def _is_default(stream: StreamLike) -> bool:
    return type(stream) is int and stream == 0
