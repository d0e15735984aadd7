# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend's calls on streams, events and graphs."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import ClassVar

from gpu_runtime import checks
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import Fault
from gpu_runtime.handles import LaunchRecord
from gpu_runtime.host.graphs import Capture, Graph
from gpu_runtime.host.streams import HostEvent, HostStream, Order, Work
from gpu_runtime.streams import DEFAULT_STREAM, LEGACY_STREAM, PER_THREAD_STREAM, StreamLike, stream_handle
from gpu_runtime.trace import Traces


class _Alive:
    """Lives as long as the thread that holds it in its thread-local storage."""


class StreamCalls(GpuBackend):
    """Streams and events by handle; work goes to the order, or to the capture that the stream belongs to."""

    # From 0x100, clear of 0, 1 and 2, which have a meaning of their own. One count for the process, as a driver has, so
    # that a handle of one backend means nothing to another.
    _handles: ClassVar[itertools.count[int]] = itertools.count(0x100)

    def __init__(self, order: Order, faults: Sequence[Fault]) -> None:
        self._order = order
        self._faults = tuple(faults)
        self._traces = Traces()
        self._lock = threading.RLock()
        self._closed = False
        default = HostStream(next(self._handles), owned=True)
        self._default = default.handle
        self._streams = {default.handle: default, LEGACY_STREAM: HostStream(LEGACY_STREAM, owned=True)}
        self._per_thread = threading.local()
        self._events: dict[int, HostEvent] = {}
        self._graphs: dict[int, Graph] = {}

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the backend is closed")

    def _ask_faults(self, name: str, what: str) -> None:
        for fault in self._faults:
            fault.call(name, what)

    def _stream(self, stream: StreamLike) -> HostStream:
        self._check_open()
        handle = stream_handle(stream)
        if handle == PER_THREAD_STREAM:
            handle = self._thread_stream()
        found = self._streams.get(self._default if handle == DEFAULT_STREAM else handle)
        if found is None:
            raise DeviceError(f"stream: expected a live stream of this backend, got {handle:#x}")
        return found

    def _thread_stream(self) -> int:
        handle: int | None = getattr(self._per_thread, "handle", None)
        if handle is None:
            handle = self._per_thread.handle = self._add_stream(owned=True)
            alive = self._per_thread.alive = _Alive()
            weakref.finalize(alive, self._streams.pop, handle, None).atexit = False
        return handle

    def _event(self, event: int) -> HostEvent:
        self._check_open()
        handle = checks.integer("event", event)
        found = self._events.get(handle)
        if found is None:
            raise DeviceError(f"event: expected a live event of this backend, got {handle:#x}")
        return found

    def _sited(self, work: Work) -> Work:
        """Return ``work``, made to remember the place that enqueues it where that is asked for."""
        return work

    def _enqueue(self, stream: HostStream, work: Work) -> None:
        sited = self._sited(work)
        with self._lock:
            capture = stream.capture
            if capture is not None:
                capture.add(stream, sited)
                return
        self._order.submit(stream, sited)

    def _finish_work(self) -> None:
        """Run what is enqueued: it may use a block that the caller is about to free."""
        with self._lock:
            streams = tuple(self._streams.values())
        self._order.finish(streams)

    def _refuse_capture(self, stream: HostStream, call: str) -> None:
        if stream.capture is not None:
            raise DeviceError(f"{call}: stream {stream.handle:#x} is capturing, and a capture cannot wait")

    def default_stream(self) -> int:
        self._check_open()
        return self._default

    def create_stream(self) -> int:
        self._check_open()
        return self._add_stream(owned=False)

    def _add_stream(self, *, owned: bool) -> int:
        stream = HostStream(next(self._handles), owned)
        with self._lock:
            self._streams[stream.handle] = stream
        return stream.handle

    def destroy_stream(self, stream: int) -> None:
        found = self._stream(stream)
        if found.owned:
            raise DeviceError("destroy_stream: expected a stream made by create_stream, got one that the backend owns")
        self._refuse_capture(found, "destroy_stream")
        try:
            self._order.drain(found)
        finally:
            with self._lock:
                self._streams.pop(found.handle, None)

    def synchronize(self, stream: StreamLike = 0) -> None:
        found = self._stream(stream)
        self._refuse_capture(found, "synchronize")
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "stream", stream=found.handle))
        self._order.drain(found)

    def create_event(self, *, timing: bool = False) -> int:
        self._check_open()
        with self._lock:
            handle = next(self._handles)
            self._events[handle] = HostEvent(timing)
        return handle

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        found, on = self._event(event), self._stream(stream)
        if self._faults:
            self._ask_faults("record_event", "")
        with self._lock:
            if on.capture is not None:
                found.capture, found.clock = on.capture, on.capture.mark(on)
                return
        point = self._order.record(on)
        with self._lock:
            found.point, found.capture = point, None

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        on, found = self._stream(stream), self._event(event)
        with self._lock:
            point = found.point
            if found.capture is not None:
                self._join_capture(on, found, found.capture)
                return
            if on.capture is not None and point is not None:
                raise DeviceError("stream_wait_event: a capture cannot wait for work outside it")
        if point is not None:
            self._order.wait(on, point)

    @staticmethod
    def _join_capture(on: HostStream, event: HostEvent, capture: Capture) -> None:
        if capture.ended:
            raise DeviceError("stream_wait_event: the event was recorded in a capture that has ended")
        if on.handle == LEGACY_STREAM:
            raise DeviceError("stream_wait_event: the legacy stream cannot join a capture")
        if on.capture not in (None, capture):
            raise DeviceError("stream_wait_event: the stream belongs to another capture")
        capture.join(on, event.clock)

    def event_query(self, event: int) -> bool:
        found = self._event(event)
        self._refuse_captured_event(found, "event_query")
        return found.point is None or self._order.query(found.point)

    def event_synchronize(self, event: int) -> None:
        found = self._event(event)
        self._refuse_captured_event(found, "event_synchronize")
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "event"))
        if found.point is not None:
            self._order.reach(found.point)

    @staticmethod
    def _refuse_captured_event(event: HostEvent, call: str) -> None:
        if event.capture is not None:
            raise DeviceError(f"{call}: the event was recorded in a capture; it has no time of its own")

    def event_elapsed_ms(self, start: int, end: int) -> float:
        first, last = self._event(start), self._event(end)
        for event in (first, last):
            self._refuse_captured_event(event, "event_elapsed_ms")
        return first.elapsed_ms(last)

    def destroy_event(self, event: int) -> None:
        self._event(event)
        with self._lock:
            self._events.pop(event, None)

    def begin_capture(self, stream: StreamLike = 0) -> None:
        found = self._stream(stream)
        if found.handle == LEGACY_STREAM:
            raise DeviceError("begin_capture: the legacy stream cannot be captured")
        with self._lock:
            if found.capture is not None:
                raise DeviceError(f"begin_capture: stream {found.handle:#x} is capturing already")
            Capture(found).join(found, {})

    def end_capture(self, stream: StreamLike = 0) -> int:
        found = self._stream(stream)
        with self._lock:
            capture = found.capture
            if capture is None or capture.origin is not found:
                raise DeviceError(f"end_capture: stream {found.handle:#x} did not begin a capture")
            graph = capture.release()
            loose = capture.unjoined()
            if loose:
                names = ", ".join(f"{one.handle:#x}" for one in loose)
                raise DeviceError(f"end_capture: work of streams {names} was not joined back by an event")
            handle = next(self._handles)
            self._graphs[handle] = graph
        return handle

    def launch_graph(self, graph: int, stream: StreamLike = 0) -> None:
        on = self._stream(stream)
        handle = checks.integer("graph", graph)
        found = self._graphs.get(handle)
        if found is None:
            raise DeviceError(f"launch_graph: expected a live graph of this backend, got {handle:#x}")
        if self._faults:
            self._ask_faults("launch_graph", "")
        with self._lock:
            if on.capture is not None:
                found.unfold(on.capture, on, self._sited)
                return
        self._order.launch(on, found, self._sited)

    def destroy_graph(self, graph: int) -> None:
        self._check_open()
        handle = checks.integer("graph", graph)
        if self._graphs.pop(handle, None) is None:
            raise DeviceError(f"destroy_graph: expected a live graph of this backend, got {handle:#x}")

    def stream_is_capturing(self, stream: StreamLike = 0) -> bool:
        return self._stream(stream).capture is not None

    def abort_capture_if_active(self, stream: StreamLike = 0) -> bool:
        return self._drop_capture(self._stream(stream))

    def _drop_capture(self, stream: HostStream) -> bool:
        with self._lock:
            if stream.capture is None:
                return False
            stream.capture.release()
        return True
