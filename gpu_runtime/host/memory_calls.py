# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend's calls on memory and its copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from gpu_runtime.backend import LaunchRecord, PinnedMemory
from gpu_runtime.errors import InvalidPointer
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
        self._traces: list[list[LaunchRecord]] = []

    def alloc(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        self._check_open()
        if nbytes < 1:
            raise ValueError(f"alloc: nbytes: expected at least 1, got {nbytes}")
        return self._memory.alloc(nbytes, tag)

    def alloc_managed(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        return self.alloc(nbytes, tag=tag)

    def free(self, ptr: int) -> None:
        self._check_open()
        if ptr:
            self._memory.free(DevicePtr(ptr))

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        self._refuse_capture(self._stream(0), "memset")
        self.memset_async(ptr, value, nbytes)
        self.synchronize()

    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        if not 0 <= value <= 255:
            raise ValueError(f"memset: value: expected 0 to 255, got {value}")
        self._span("memset: ptr", ptr, nbytes)
        self._traced("memset", "memset", nbytes, stream, lambda: self._memory.bytes(ptr, nbytes).fill(value))

    def total_memory(self) -> int:
        return self._memory.total

    def free_memory(self) -> int:
        return self._memory.total - self._memory.ledger.live_bytes

    def live_bytes(self) -> int:
        return self._memory.ledger.live_bytes

    def live_alloc_count(self) -> int:
        return len(self._memory.ledger)

    def alloc_report(self) -> list[Allocation]:
        return list(self._memory.ledger)

    def sweep_unreleased(self) -> list[Allocation]:
        self._check_open()
        report = self.alloc_report()
        for entry in report:
            self._memory.free(entry.ptr)
        return report

    def scan_redzones(self) -> list[Allocation]:
        return self._memory.scan_redzones()

    def poison_redzones(self) -> None:
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
        self._span("copy_h2d: dst", dst, data.nbytes)
        self._traced("copy", "h2d", data.nbytes, stream, lambda: np.copyto(self._memory.bytes(dst, data.nbytes), data))

    def copy_h2d_async_retained(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        self.copy_h2d_async(as_bytes("src", src, writable=False).copy(), dst, stream)

    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        data = as_bytes("dst", dst, writable=True)
        self._span("copy_d2h: src", src, data.nbytes)
        self._traced("copy", "d2h", data.nbytes, stream, lambda: np.copyto(data, self._memory.bytes(src, data.nbytes)))

    def copy_d2d_async(self, src: int, dst: int, nbytes: int, stream: StreamLike = 0) -> None:
        self.copy_d2d_2d_async(src, nbytes, dst, nbytes, nbytes, 1, stream)

    def copy_d2d_2d_async(
        self, src: int, src_pitch: int, dst: int, dst_pitch: int, width: int, height: int, stream: StreamLike = 0
    ) -> None:
        if width < 0 or height < 0 or (height > 1 and min(src_pitch, dst_pitch) < width):
            raise ValueError(
                f"copy_d2d: expected pitches of at least the width, got {src_pitch}, {dst_pitch} and width {width}"
            )
        src_span, dst_span = ((height - 1) * pitch + width if height else 0 for pitch in (src_pitch, dst_pitch))
        self._span("copy_d2d: src", src, src_span)
        self._span("copy_d2d: dst", dst, dst_span)
        if src < dst + dst_span and dst < src + src_span and height:
            raise ValueError(f"copy_d2d: expected spans that do not overlap, got {src:#x} and {dst:#x}")
        shape = (height, width)

        def copy() -> None:
            rows = self._memory.view(src, shape, "u8", src_pitch)
            np.copyto(self._memory.view(dst, shape, "u8", dst_pitch), rows)

        self._traced("copy", "d2d", width * height, stream, copy)

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        self._check_open()
        if nbytes < 1:
            raise ValueError(f"alloc_host_pinned: nbytes: expected at least 1, got {nbytes}")
        array = np.zeros(nbytes, dtype=np.uint8)
        memory = PinnedMemory(array.ctypes.data, nbytes, array)
        self._pinned[memory.address] = memory
        return memory

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self._pinned_entry(memory)
        del self._pinned[memory.address]

    def host_ptr_to_device(self, memory: PinnedMemory) -> DevicePtr:
        return DevicePtr(self._pinned_entry(memory).address)

    def _pinned_entry(self, memory: PinnedMemory) -> PinnedMemory:
        self._check_open()
        if self._pinned.get(memory.address) is not memory:
            raise InvalidPointer(f"expected live pinned memory of this backend, got {memory.address:#x}")
        return memory

    def _span(self, what: str, ptr: int, nbytes: int) -> None:
        """Refuse a span that no live block contains, before anything is enqueued."""
        self._check_open()
        if nbytes < 0:
            raise ValueError(f"{what}: expected at least 0 bytes, got {nbytes}")
        if nbytes:
            try:
                self._memory.bytes(ptr, nbytes)
            except InvalidPointer as error:
                raise InvalidPointer(f"{what}: {error}") from None

    def _traced(self, kind: Any, name: str, nbytes: int, stream: StreamLike, work: Work) -> None:
        on = self._stream(stream)
        self._trace(LaunchRecord(kind, name, nbytes=nbytes, stream=on.handle))
        if nbytes:
            self._enqueue(on, work)

    def _trace(self, record: LaunchRecord) -> None:
        for trace in self._traces:
            trace.append(record)

    def launch_trace(self) -> AbstractContextManager[list[LaunchRecord]]:
        return self._open_trace()

    @contextmanager
    def _open_trace(self) -> Iterator[list[LaunchRecord]]:
        trace: list[LaunchRecord] = []
        self._traces = [*self._traces, trace]
        try:
            yield trace
        finally:
            self._traces = [other for other in self._traces if other is not trace]
