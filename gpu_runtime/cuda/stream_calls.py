# SPDX-License-Identifier: MIT OR Apache-2.0
"""The CUDA backend's calls on streams, events and graphs.

What a capture forbids is checked before CUDA is asked: most calls that CUDA refuses during a capture spoil it, and the
contract is that a refused call changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupy.cuda import runtime

from gpu_runtime import checks
from gpu_runtime.backend import GpuBackend
from gpu_runtime.cuda.driver import Context
from gpu_runtime.cuda.events import DISABLE_TIMING, Marks, passed
from gpu_runtime.cuda.graphs import Graph, add_child, instantiate
from gpu_runtime.cuda.lifetime import Lifetime
from gpu_runtime.cuda.streams import Capture, Streams, key_of
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import Fault
from gpu_runtime.handles import LaunchRecord
from gpu_runtime.streams import LEGACY_STREAM, StreamLike
from gpu_runtime.trace import Traces


@dataclass(slots=True, eq=False)
class _Event:
    """An event: its handle, whether it has a time, and where it was last recorded (in whose capture, if any)."""

    handle: int
    timing: bool
    recorded: bool = False
    capture: Capture | None = None
    foreign_capture: bool = False


class StreamCalls(GpuBackend):
    """Streams, events and graphs by handle."""

    def __init__(self, device: int, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._traces = Traces()
        self._lock = threading.RLock()
        self._context = Context(device)
        self._marks = Marks(self._context)
        self._streams = Streams(self._context, self._marks)
        self._lifetime = Lifetime(self._streams.own)
        self._events: dict[int, _Event] = {}
        self._graphs: dict[int, Graph] = {}

    def _check_open(self) -> None:
        if self._lifetime.refusal:
            raise DeviceError(self._lifetime.refusal)

    def _stream(self, stream: StreamLike) -> int:
        self._check_open()
        return self._streams.handle(stream)

    def _event(self, event: int) -> _Event:
        self._check_open()
        handle = checks.integer("event", event)
        found = self._events.get(handle)
        if found is None:
            raise DeviceError(f"event: expected a live event of this backend, got {handle:#x}")
        return found

    def _ask_faults(self, name: str, what: str) -> None:
        for fault in self._faults:
            fault.call(name, what)

    # streams

    def default_stream(self) -> int:
        self._check_open()
        return self._streams.show(self._streams.default)

    def create_stream(self) -> int:
        self._check_open()
        return self._streams.create()

    def destroy_stream(self, stream: int) -> None:
        self._streams.destroy(self._stream(stream))

    def synchronize(self, stream: StreamLike = 0) -> None:
        handle = self._stream(stream)
        self._streams.refuse_capture(handle, "synchronize")
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "stream", stream=handle))
        self._context.call_relaxed(runtime.streamSynchronize, handle)
        self._streams.drop_done(handle)

    # events

    def create_event(self, *, timing: bool = False) -> int:
        self._check_open()
        flags = 0 if timing else DISABLE_TIMING
        handle = int(self._context.call(runtime.eventCreateWithFlags, flags))
        self._events[handle] = _Event(handle, timing)
        return handle

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        found, on = self._event(event), self._stream(stream)
        if self._faults:
            self._ask_faults("record_event", "")
        with self._lock:
            self._context.call(runtime.eventRecord, found.handle, on)
            found.capture, found.recorded = self._streams.capture_of(on), True
            found.foreign_capture = found.capture is None and self._streams.is_capturing(on)
        self._streams.note(on, stream)

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        on, found = self._stream(stream), self._event(event)
        with self._lock:
            if not found.recorded:
                return
            capture = self._streams.capture_of(on)
            if found.capture is None:
                if not found.foreign_capture and self._streams.is_capturing(on):
                    raise DeviceError("stream_wait_event: a capture cannot wait for work outside it")
            elif found.capture.ended:
                raise DeviceError("stream_wait_event: the event was recorded in a capture that has ended")
            elif on == LEGACY_STREAM:
                raise DeviceError("stream_wait_event: the legacy stream cannot join a capture")
            elif capture not in (None, found.capture):
                raise DeviceError("stream_wait_event: the stream belongs to another capture")
            if found.capture is not None or found.foreign_capture:
                self._streams.show(on)
            self._streams.wait(on, found.handle, found.capture)
        self._streams.note(on, stream)

    def event_query(self, event: int) -> bool:
        found = self._event(event)
        self._refuse_captured_event(found, "event_query")
        return passed(self._context, found.handle)

    def event_synchronize(self, event: int) -> None:
        found = self._event(event)
        self._refuse_captured_event(found, "event_synchronize")
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "event"))
        self._context.call_relaxed(runtime.eventSynchronize, found.handle)

    @staticmethod
    def _refuse_captured_event(event: _Event, call: str) -> None:
        if event.capture is not None or event.foreign_capture:
            raise DeviceError(f"{call}: the event was recorded in a capture; it has no time of its own")

    def event_elapsed_ms(self, start: int, end: int) -> float:
        first, last = self._event(start), self._event(end)
        for event in (first, last):
            self._refuse_captured_event(event, "event_elapsed_ms")
            if not event.timing:
                raise DeviceError("event_elapsed_ms: expected events created with timing=True")
            if not event.recorded or not passed(self._context, event.handle):
                raise DeviceError("event_elapsed_ms: expected events that have been recorded and reached")
        return float(self._context.call(runtime.eventElapsedTime, first.handle, last.handle))

    def destroy_event(self, event: int) -> None:
        found = self._event(event)
        if self._events.pop(found.handle, None) is not None:
            self._context.call(runtime.eventDestroy, found.handle)

    # graphs

    def begin_capture(self, stream: StreamLike = 0) -> None:
        on = self._stream(stream)
        if on == LEGACY_STREAM:
            raise DeviceError("begin_capture: the legacy stream cannot be captured")
        self._streams.begin(on, stream)

    def end_capture(self, stream: StreamLike = 0) -> int:
        on = self._stream(stream)
        with self._lock:
            capture = self._streams.capture_of(on)
            if capture is None or capture.origin != key_of(on):
                raise DeviceError(f"end_capture: stream {on:#x} did not begin a capture")
            kept = self._streams.release(capture)
            template = int(self._context.call_relaxed(runtime.streamEndCapture, on))
            graph = instantiate(self._context, template, kept)
            self._graphs[graph.handle] = graph
        return graph.handle

    def launch_graph(self, graph: int, stream: StreamLike = 0) -> None:
        on = self._stream(stream)
        handle = checks.integer("graph", graph)
        found = self._graphs.get(handle)
        if found is None:
            raise DeviceError(f"launch_graph: expected a live graph of this backend, got {handle:#x}")
        if self._faults:
            self._ask_faults("launch_graph", "")
        with found.lock:
            captured = self._streams.is_capturing(on)
            if captured:
                add_child(self._context, on, found)
            else:
                self._context.call(runtime.graphLaunch, found.executable, on)
        if captured or on not in self._streams.own:
            self._streams.note(on, stream, found)
            return
        found.launched_on.add(on)  # a mark for each launch would take longer than the launch
        if handle not in self._graphs:  # another thread has destroyed it meanwhile
            self._streams.keep(on, found)

    def destroy_graph(self, graph: int) -> None:
        self._check_open()
        handle = checks.integer("graph", graph)
        found = self._graphs.pop(handle, None)
        if found is None:
            raise DeviceError(f"destroy_graph: expected a live graph of this backend, got {handle:#x}")
        for on in tuple(found.launched_on):
            self._streams.keep(on, found)

    def stream_is_capturing(self, stream: StreamLike = 0) -> bool:
        return self._streams.is_capturing(self._stream(stream))

    def abort_capture_if_active(self, stream: StreamLike = 0) -> bool:
        on = self._stream(stream)
        with self._lock:
            capture = self._streams.capture_of(on)
            if capture is None:
                return False
            self._streams.abort(capture)
        return True

    def _close_streams(self) -> None:
        """Drop graphs, events and streams; the work must be finished."""
        self._graphs.clear()
        events: list[Any] = list(self._events.values())
        self._events.clear()
        for event in events:
            self._context.call(runtime.eventDestroy, event.handle)
        self._streams.close()
        self._marks.close()
