# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streams that a CUDA backend knows: its own, and foreign ones that callers passed in."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

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
        self.default = self._new()
        self._only_ours = {self.default}
        """The handles that nobody else knows: only this backend begins captures on those."""
        self.service = self._new()
        """A stream that no capture and no caller's work ever comes to: for what an allocation does by itself."""
        self.own: dict[int, int] = {DEFAULT_STREAM: self.default, self.default: self.default}
        """The handle of each stream of this backend, by what a caller may pass for it."""
        self._created: set[int] = set()
        self._spare: list[int] = []
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

    def _new(self) -> int:
        return int(self._context.call_relaxed(runtime.streamCreateWithFlags, runtime.streamNonBlocking))

    def create(self) -> int:
        """Return a non-blocking stream: one that was given back, or a new one."""
        with self._lock:
            if self._spare:
                handle = self._spare.pop()
                self._dead.remove(handle)
            else:
                handle = self._new()
                self._created.add(handle)
            self.own[handle] = handle
        return handle

    def destroy(self, handle: int) -> None:
        """Finish the work of a stream that `create` returned, and take it back.

        CUDA's stream stays for the next `create`: a driver gives the number of a dead stream to somebody else's, and
        does not survive a dead one. Frees go on waiting for its work meanwhile.
        """
        with self._lock:
            if handle not in self._created or handle not in self.own:
                raise DeviceError(f"destroy_stream: expected a stream made by create_stream, got {handle:#x}")
            self.refuse_capture(handle, "destroy_stream")
            del self.own[handle]
            self._dead.add(handle)
        self._context.call_relaxed(runtime.streamSynchronize, handle)
        with self._lock:
            done = self._pending.pop(key_of(handle), None)
            self._spare.append(handle)
        del done  # outside the lock: what ends with it may be anything

    def show(self, handle: int) -> int:
        """Return a handle that others will know, or whose stream joins a capture, which others may end elsewhere."""
        self._only_ours.discard(handle)
        return handle

    # captures

    def is_capturing(self, handle: int) -> bool:
        """Return whether work on a stream goes to a capture, which may be somebody else's."""
        if handle in self._only_ours:  # to ask the driver takes as long as to enqueue something
            return (handle, 0) in self._captures
        try:
            return bool(self._context.call(runtime.streamIsCapturing, handle))
        except DeviceError:
            raise
        except RuntimeError:  # CuPy's word for a capture that an error has spoilt; it is there until it is ended
            return True

    def is_plain(self, handle: int) -> bool:
        """Return whether a stream is one of this backend's own, and not capturing."""
        return handle in self.own and not self.is_capturing(handle)

    def refuse_capture(self, handle: int, call: str) -> None:
        """Raise DeviceError when a stream is capturing: CUDA would refuse, and spoil the capture."""
        if self.is_capturing(handle):
            raise DeviceError(f"{call}: stream {handle:#x} is capturing, and a capture cannot wait")

    def capture_of(self, handle: int) -> Capture | None:
        """Return the capture that a stream belongs to, when this backend began it."""
        capture = self._captures.get(key_of(handle))
        if capture is not None and not self.is_capturing(handle):
            self.release(capture)  # foreign code has ended it, or it was another thread's, which is gone
            return None
        return capture

    def begin(self, handle: int, stream: StreamLike) -> None:
        """Begin a capture. No mark is set meanwhile: it would become part of the capture."""
        with self._lock:
            if self.is_capturing(handle):
                raise DeviceError(f"begin_capture: stream {handle:#x} is capturing already")
            # Relaxed: an allocation or a wait for another stream is no part of the capture and need not break it.
            self._context.call_relaxed(runtime.streamBeginCapture, handle, runtime.streamCaptureModeRelaxed)
            key = key_of(handle)
            self._captures[key] = Capture(key, {key}, [stream])

    def wait(self, handle: int, event: int, capture: Capture | None) -> None:
        """Let a stream wait for an event; when that was recorded in ``capture``, the stream joins it."""
        with self._lock:
            self._context.call(runtime.streamWaitEvent, handle, event)
            if capture is not None:
                capture.streams.add(key_of(handle))
                self._captures[key_of(handle)] = capture

    def release(self, capture: Capture) -> list[Any]:
        """Take every stream out of a capture that has ended, and return what its graph needs to live.

        An event that was recorded in the capture still knows it, but not that.
        """
        with self._lock:
            capture.ended = True
            for key in capture.streams:
                self._captures.pop(key, None)
            kept, capture.kept = capture.kept, []
        return kept

    # how far streams have got

    def note(self, handle: int, stream: StreamLike, keep: Any = None, *, locked: bool = False) -> None:
        """Note that work was put on a stream; ``keep``, and a stream that is an object, live until it is done.

        ``locked`` says that ``keep`` is page-locked memory of this backend. To give that back waits for work of our own
        streams anyway, so a mark for it, which takes longer than a copy, is set only where there is more to know.
        """
        own = handle in self.own
        if own and (keep is None or (locked and not self.is_capturing(handle))):
            return
        done: list[Any] = []
        try:
            with self._lock:
                capture = self.capture_of(handle)
                if capture is not None:
                    capture.kept.append((stream, keep))
                elif self.is_capturing(handle):
                    # Somebody else's capture: its graph may be launched as long as this backend lives.
                    self._kept_for_good.append((stream, keep))
                else:
                    self._set_mark(handle, own, stream, keep, done)
        except DeviceError:
            self._kept_for_good.append((stream, keep))  # nobody will know when it is done
            raise

    def _set_mark(self, handle: int, own: bool, stream: StreamLike, keep: Any, done: list[Any]) -> None:
        key = key_of(handle)
        last = self._last.get(key)
        if last is not None:
            last.put_before(handle)  # the handle may be another stream's by now; this mark then stands for both
        mark = self._marks.set(handle)
        if not own:
            self._last[key] = mark
        queue = self._pending.setdefault(key, deque())
        queue.append((mark, stream, keep))
        if len(queue) >= _MOST_PENDING or getattr(keep, "nbytes", 0) >= _LARGE:
            self._take_done(queue, done)

    def _take_done(self, queue: deque[tuple[Mark, StreamLike, Any]], done: list[Any]) -> None:
        """Move what only finished work needed to ``done``, for the caller to drop outside the lock."""
        with self._context.relaxed():
            while queue and queue[0][0].passed():
                done.append(queue.popleft())

    def keep(self, handle: int, kept: Any) -> None:
        """Let an object live until the work is done that has been put on a stream of this backend."""
        with self._lock:
            if handle in self._spare:  # it was destroyed, and so waited for
                return
            if self.is_capturing(handle):  # a mark would become part of it
                self._kept_for_good.append((handle, kept))
                return
        self.note(handle, handle, kept)

    def drop_done(self, handle: int) -> None:
        """Let go of what only finished work of a stream needed."""
        done: list[Any] = []
        with self._lock:
            queue = self._pending.get(key_of(handle))
            if queue:
                self._take_done(queue, done)

    def marks(self) -> list[Mark]:
        """Return marks that are passed once all work enqueued so far is done, captured work excepted."""
        with self._lock, self._context.relaxed():
            self._last = {key: mark for key, mark in self._last.items() if not mark.passed()}
            handles = {self.default, *self._created}
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
            done = [self._pending, self._last, self._kept_for_good]
            self._pending, self._last, self._kept_for_good = {}, {}, []
            self.own.clear()
        done.clear()
        for handle in (*created, self.default, self.service):
            self._context.call(runtime.streamDestroy, handle)

    def abort(self, capture: Capture) -> None:
        """End a capture and throw away what it recorded."""
        self.release(capture)
        handle, _ = capture.origin
        if key_of(handle) != capture.origin:
            return  # another thread's stream; its capture ends with the thread
        try:
            graph = self._context.call_relaxed(runtime.streamEndCapture, handle)
        except DeviceError:  # it was spoilt or not joined; either way it has ended
            return
        if graph:
            self._context.call(runtime.graphDestroy, graph)
