# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend's calls on memory and its copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from gpu_runtime import checks
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.handles import LaunchRecord, PinnedMemory
from gpu_runtime.host.memory import HostMemory, as_bytes
from gpu_runtime.host.stream_calls import StreamCalls
from gpu_runtime.host.streams import Order, Work
from gpu_runtime.ledger import Allocation
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike


class MemoryCalls(StreamCalls):
    """Allocation, reports and copies. A copy without a stream is one on the default stream, waited for."""

    def __init__(self, order: Order, memory: HostMemory) -> None:
        super().__init__(order)
        self._memory = memory
        self._pinned: dict[int, PinnedMemory] = {}
        self._trace_lock = threading.Lock()
        self._traces: list[list[LaunchRecord]] = []

    def alloc(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        self._check_open()
        return self._memory.alloc(checks.integer("alloc: nbytes", nbytes, low=1), tag)

    def alloc_managed(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        return self.alloc(nbytes, tag=tag)

    def free(self, ptr: int) -> None:
        self._check_open()
        address = checks.address("free: ptr", ptr)
        if address:
            self._memory.free(DevicePtr(address))

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        self._refuse_capture(self._stream(0), "memset")
        self.memset_async(ptr, value, nbytes)
        self.synchronize()

    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        fill = checks.integer("memset: value", value, 0, 255)
        start, size = self._span("memset: ptr", ptr, nbytes)
        self._traced("memset", "memset", size, stream, lambda: self._memory.bytes(start, size).fill(fill))

    def total_memory(self) -> int:
        self._check_open()
        return self._memory.total

    def free_memory(self) -> int:
        self._check_open()
        return self._memory.total - self._memory.ledger.live_bytes

    def live_bytes(self) -> int:
        self._check_open()
        return self._memory.ledger.live_bytes

    def live_alloc_count(self) -> int:
        self._check_open()
        return len(self._memory.ledger)

    def alloc_report(self) -> list[Allocation]:
        self._check_open()
        return list(self._memory.ledger)

    def sweep_unreleased(self) -> list[Allocation]:
        self._check_open()
        return self._memory.sweep()

    def scan_redzones(self) -> list[Allocation]:
        self._check_open()
        return self._memory.scan_redzones()

    def poison_redzones(self) -> None:
        self._check_open()
        self._memory.poison_redzones()

    def mark_written(self, ptr: int, nbytes: int) -> None:
        self._span("mark_written: ptr", ptr, nbytes)  # nothing else to note while reads are not checked

    def copy_h2d(self, src: Any, dst: int) -> None:
        self._refuse_capture(self._stream(0), "copy_h2d")
        self.copy_h2d_async(src, dst)
        self.synchronize()

    def copy_d2h(self, src: int, dst: Any) -> None:
        self.copy_d2h_on_stream(src, dst)

    def copy_d2d(self, src: int, dst: int, nbytes: int) -> None:
        self._refuse_capture(self._stream(0), "copy_d2d")
        self.copy_d2d_async(src, dst, nbytes)
        self.synchronize()

    def copy_d2h_on_stream(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        self._refuse_capture(self._stream(stream), "copy_d2h")
        self.copy_d2h_async(src, dst, stream)
        self.synchronize(stream)

    def copy_h2d_async(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        data = as_bytes("src", src, writable=False)
        start, size = self._span("copy_h2d: dst", dst, data.nbytes)
        self._traced("copy", "h2d", size, stream, lambda: np.copyto(self._memory.bytes(start, size), data))

    def copy_h2d_async_retained(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        self.copy_h2d_async(as_bytes("src", src, writable=False).copy(), dst, stream)

    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        data = as_bytes("dst", dst, writable=True)
        start, size = self._span("copy_d2h: src", src, data.nbytes)
        self._traced("copy", "d2h", size, stream, lambda: np.copyto(data, self._memory.bytes(start, size)))

    def copy_d2d_async(self, src: int, dst: int, nbytes: int, stream: StreamLike = 0) -> None:
        self.copy_d2d_2d_async(src, nbytes, dst, nbytes, nbytes, 1, stream)

    def copy_d2d_2d_async(
        self, src: int, src_pitch: int, dst: int, dst_pitch: int, width: int, height: int, stream: StreamLike = 0
    ) -> None:
        shape = checks.integer("copy_d2d: height", height, 0), checks.integer("copy_d2d: width", width, 0)
        size = shape[0] * shape[1]
        pitches = [
            checks.integer(f"copy_d2d: {name}", pitch, shape[1])
            for name, pitch in (("src_pitch", src_pitch), ("dst_pitch", dst_pitch))
        ]
        spans = [(shape[0] - 1) * pitch + shape[1] if size else 0 for pitch in pitches]
        first, src_span = self._span("copy_d2d: src", src, spans[0])
        second, dst_span = self._span("copy_d2d: dst", dst, spans[1])
        if size and first < second + dst_span and second < first + src_span:
            raise ValueError(f"copy_d2d: expected spans that do not overlap, got {first:#x} and {second:#x}")

        def copy() -> None:
            rows = self._memory.view(first, shape, "u8", pitches[0])
            np.copyto(self._memory.view(second, shape, "u8", pitches[1]), rows)

        self._traced("copy", "d2d", size, stream, copy)

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        self._check_open()
        size = checks.integer("alloc_host_pinned: nbytes", nbytes, low=1)
        ptr, array = self._memory.alloc_pinned(size)
        memory = PinnedMemory(int(ptr), size, array)
        self._pinned[memory.address] = memory
        return memory

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        with self._lock:
            self._pinned_entry(memory)
            del self._pinned[memory.address]
        self._memory.free_pinned(DevicePtr(memory.address))

    def host_ptr_to_device(self, memory: PinnedMemory) -> DevicePtr:
        return DevicePtr(self._pinned_entry(memory).address)

    def _pinned_entry(self, memory: PinnedMemory) -> PinnedMemory:
        self._check_open()
        if not isinstance(memory, PinnedMemory):
            raise TypeError(f"expected what alloc_host_pinned returned, got {memory!r}")
        if self._pinned.get(memory.address) is not memory:
            raise InvalidPointer(f"expected live pinned memory of this backend, got {memory.address:#x}")
        return memory

    def _span(self, what: str, ptr: int, nbytes: int) -> tuple[int, int]:
        """Return address and size as plain ints; refuse a span that no live block contains before it is enqueued."""
        self._check_open()
        address, size = checks.address(what, ptr), checks.integer(f"{what}: nbytes", nbytes, low=0)
        if size:
            try:
                self._memory.bytes(address, size)
            except InvalidPointer as error:
                raise InvalidPointer(f"{what}: {error}") from None
        return address, size

    def _traced(self, kind: Any, name: str, nbytes: int, stream: StreamLike, work: Work) -> None:
        on = self._stream(stream)
        self._trace(LaunchRecord(kind, name, nbytes=nbytes, stream=on.handle))
        if nbytes:
            self._enqueue(on, work)

    def _trace(self, record: LaunchRecord) -> None:
        for trace in self._traces:
            trace.append(record)

    def launch_trace(self) -> AbstractContextManager[list[LaunchRecord]]:
        self._check_open()
        return self._open_trace()

    @contextmanager
    def _open_trace(self) -> Iterator[list[LaunchRecord]]:
        trace: list[LaunchRecord] = []
        with self._trace_lock:
            self._traces = [*self._traces, trace]
        try:
            yield trace
        finally:
            with self._trace_lock:
                self._traces = [other for other in self._traces if other is not trace]
