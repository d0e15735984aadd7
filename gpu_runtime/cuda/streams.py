# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streams that a CUDA backend knows: its own, and foreign ones that callers passed in."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import cupy
from cupy.cuda import runtime

from gpu_runtime.cuda.driver import Context
from gpu_runtime.cuda.events import Mark, Marks
from gpu_runtime.errors import DeviceError
from gpu_runtime.streams import DEFAULT_STREAM, PER_THREAD_STREAM, StreamLike, stream_handle

_MOST_PENDING: Final = 16
_LARGE: Final = 1 << 16
"""Asking whether work is done takes as long as enqueuing it: it is asked when this many buffers are kept, or a large
one (in bytes) has come."""

_LEAST_HANDLE: Final = 0x1000  # smaller ones, apart from 1 and 2, cannot be the address of a stream


StreamKey = tuple[int, int]
"""What tells streams apart: the handle, and for the per-thread handle, which is another stream on every thread, the
thread."""


def key_of(handle: int) -> StreamKey:
    """Return what tells a stream apart from the others, on the calling thread."""
    return handle, threading.get_ident() if handle == PER_THREAD_STREAM else 0


@dataclass(slots=True, eq=False)
class Capture:
    """A capture in progress: where it began, who joined it, and what must live as long as its graph."""

    origin: StreamKey
    streams: set[StreamKey]
    kept: list[Any] = field(default_factory=list)
    ended: bool = False


class Streams:
    """Handles of live streams, how far foreign ones have got, and what pending copies still read or write.

    A foreign stream is marked after each piece of work put on it by this backend, so that its handle need not be
    valid any more when a free or a copy asks how far it had got.
    """

    def __init__(self, context: Context, marks: Marks) -> None:
        self._context = context
        self._marks = marks
        self._lock = threading.RLock()
        with context.current():
            self.default = cupy.cuda.Stream(non_blocking=True)
            self.service = cupy.cuda.Stream(non_blocking=True)
        self.own: dict[int, int] = {DEFAULT_STREAM: self.default.ptr, self.default.ptr: self.default.ptr}
        """The handle of each stream of this backend, by what a caller may pass for it."""
        self._created: set[int] = set()
        self._dead: set[int] = set()
        self._last: dict[StreamKey, Mark] = {}
        self._pending: dict[StreamKey, deque[tuple[Mark, StreamLike, Any]]] = {}
        self._kept_for_good: list[Any] = []
        self._captures: dict[StreamKey, Capture] = {}

    def handle(self, stream: StreamLike) -> int:
        """Return the ``cudaStream_t`` that an argument stands for.

        Raises
        ------
        DeviceError
            When it is a stream of this backend that was destroyed, or cannot be a stream.
        """
        handle = stream_handle(stream)
        found = self.own.get(handle)
        if found is not None:
            return found
        if isinstance(stream, int):
            if handle in self._dead:
                raise DeviceError(f"stream: expected a live stream, got {handle:#x}, which was destroyed")
            if PER_THREAD_STREAM < handle < _LEAST_HANDLE:
                raise DeviceError(f"stream: expected a live stream, got {handle:#x}")
        return handle

    def create(self) -> int:
        """Create a non-blocking stream."""
        with self._lock:
            handle = int(self._context.call(runtime.streamCreateWithFlags, runtime.streamNonBlocking))
            self._dead.discard(handle)
            self._created.add(handle)
            self.own[handle] = handle
        return handle

    def destroy(self, handle: int) -> None:
        """Finish the work of a stream that `create` made, and destroy it.

        Whoever takes it out of the table first destroys it; a driver does not survive a dead handle. Until its work is
        done, frees go on waiting for it.
        """
        with self._lock:
            if handle not in self._created or handle not in self.own:
                raise DeviceError(f"destroy_stream: expected a stream made by create_stream, got {handle:#x}")
            self.refuse_capture(handle, "destroy_stream")
            del self.own[handle]
            self._dead.add(handle)
        self._context.call(runtime.streamSynchronize, handle)
        with self._lock:
            self._created.remove(handle)
            self._context.call(runtime.streamDestroy, handle)

    # captures

    def is_capturing(self, handle: int) -> bool:
        """Return whether work on a stream goes to a capture, which may be somebody else's."""
        try:
            return bool(self._context.call(runtime.streamIsCapturing, handle))
        except DeviceError:
            raise
        except RuntimeError:  # CuPy's word for a capture that an error has spoilt; it is there until it is ended
            return True

    def refuse_capture(self, handle: int, call: str) -> None:
        """Raise DeviceError when a stream is capturing: CUDA would refuse, and spoil the capture."""
        if self.is_capturing(handle):
            raise DeviceError(f"{call}: stream {handle:#x} is capturing, and a capture cannot wait")

    def capture_of(self, handle: int) -> Capture | None:
        """Return the capture that a stream belongs to, when this backend began it."""
        return self._captures.get(key_of(handle))

    def join(self, handle: int, capture: Capture) -> None:
        """Note that a stream belongs to a capture."""
        with self._lock:
            capture.streams.add(key_of(handle))
            self._captures[key_of(handle)] = capture

    def release(self, capture: Capture) -> None:
        """Take every stream out of a capture that has ended."""
        with self._lock:
            capture.ended = True
            for key in capture.streams:
                self._captures.pop(key, None)

    # how far streams have got

    def note(self, handle: int, stream: StreamLike, keep: Any = None) -> None:
        """Note that work was put on a stream; ``keep``, and a stream that is an object, live until it is done."""
        own = handle in self.own
        if own and keep is None:
            return
        capture = self.capture_of(handle)
        if capture is not None:
            capture.kept.append((stream, keep))
        elif self.is_capturing(handle):  # somebody else's capture, whose graph may run as long as this backend lives
            self._kept_for_good.append((stream, keep))
        else:
            mark, key = self._marks.set(handle), key_of(handle)
            with self._lock:
                if not own:
                    self._last[key] = mark
                queue = self._pending.setdefault(key, deque())
                queue.append((mark, stream, keep))
                if len(queue) >= _MOST_PENDING or getattr(keep, "nbytes", 0) >= _LARGE:
                    self._drop_done(queue)

    @staticmethod
    def _drop_done(queue: deque[tuple[Mark, StreamLike, Any]]) -> None:
        while queue and queue[0][0].passed():
            queue.popleft()

    def drop_done(self, handle: int) -> None:
        """Let go of what only finished work of a stream needed."""
        with self._lock:
            queue = self._pending.get(key_of(handle))
            if queue:
                self._drop_done(queue)

    def marks(self) -> list[Mark]:
        """Return marks that are passed once all work enqueued so far is done, captured work excepted."""
        with self._lock:
            self._last = {key: mark for key, mark in self._last.items() if not mark.passed()}
            handles = {self.default.ptr, *self._created}
            own = [self._marks.set(handle) for handle in handles if not self.is_capturing(handle)]
            return [*own, *self._last.values()]

    def finish(self) -> None:
        """Wait for all work, captured work excepted."""
        for mark in self.marks():
            mark.wait()

    def close(self) -> None:
        """Drop captures and destroy the streams; the work must be finished."""
        for capture in set(self._captures.values()):
            self.abort(capture)
        with self._lock:
            created, self._created = self._created, set()
            self.own.clear()
            self._pending.clear()
            self._last.clear()
            self._kept_for_good.clear()
        for handle in created:
            self._context.call(runtime.streamDestroy, handle)
        with self._context.current():
            del self.default, self.service

    def abort(self, capture: Capture) -> None:
        """End a capture and throw away what it recorded."""
        self.release(capture)
        handle, _ = capture.origin
        if key_of(handle) != capture.origin:
            return  # another thread's stream; its capture ends with the thread
        try:
            graph = self._context.call(runtime.streamEndCapture, handle)
        except DeviceError:  # it was spoilt or not joined; either way it has ended
            return
        if graph:
            self._context.call(runtime.graphDestroy, graph)
