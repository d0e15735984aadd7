# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend's calls on memory and its copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpu_runtime import checks
from gpu_runtime.blocks import Blocks
from gpu_runtime.buffers import as_bytes
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.faults import Fault
from gpu_runtime.files import checked_spans, read_exactly
from gpu_runtime.handles import LaunchRecord, PinnedMemory
from gpu_runtime.host.memory import HostMemory, Span
from gpu_runtime.host.stream_calls import StreamCalls
from gpu_runtime.host.streams import HostStream, Order, Work
from gpu_runtime.ledger import Allocation
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike


class MemoryCalls(StreamCalls):
    """Allocation, reports and copies. A copy without a stream is one on the default stream, waited for."""

    def __init__(self, order: Order, memory: HostMemory, faults: Sequence[Fault]) -> None:
        super().__init__(order, faults)
        self._memory = memory
        self._pinned: dict[int, PinnedMemory] = {}

    def _sited(self, work: Work) -> Work:
        return self._memory.sited(work)

    @property
    def _blocks(self) -> Blocks:
        self._check_open()
        return self._memory

    def _let_go(self, *, wait: bool = False) -> None:
        self._check_open()
        while orphans := self._memory.take_orphans():
            try:
                self._finish_work()
            finally:
                for orphan in orphans:
                    self._memory.let_go(orphan)
            del orphans, orphan  # which may leave more of them

    def alloc(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        self._let_go()
        return self._memory.alloc(checks.integer("alloc: nbytes", nbytes, low=1), tag)

    def alloc_managed(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        self._let_go()
        return self._memory.alloc(checks.integer("alloc: nbytes", nbytes, low=1), tag, managed=True)

    def free(self, ptr: int) -> None:
        self._let_go()
        address = checks.address("free: ptr", ptr)
        if address:
            self._memory.refuse_exported_at("free", address)
            self._finish_work()
            self._memory.free(DevicePtr(address))
            self._memory.report("free")

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        self._refuse_capture(self._stream(0), "memset")
        self.memset_async(ptr, value, nbytes)
        self.synchronize()

    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        fill = checks.integer("memset: value", value, 0, 255)
        span = self._span("memset: ptr", ptr, nbytes)
        self._put("memset", "memset", span, span.nbytes, stream, lambda: self._memory.write(span).fill(fill))

    def total_memory(self) -> int:
        self._check_open()
        return self._memory.total

    def free_memory(self) -> int:
        self._let_go()
        return self._memory.total - self._memory.ledger.live_bytes

    def live_bytes(self) -> int:
        self._let_go()
        return self._memory.ledger.live_bytes

    def live_alloc_count(self) -> int:
        self._let_go()
        return len(self._memory.ledger)

    def alloc_report(self) -> list[Allocation]:
        self._let_go()
        return list(self._memory.ledger)

    def find_block(self, address: int) -> Allocation | None:
        self._check_open()
        return self._memory.find(checks.address("find_block: address", address))

    def sweep_unreleased(self) -> list[Allocation]:
        self._let_go()
        self._memory.refuse_exported("sweep_unreleased", self._memory.ledger)
        self._finish_work()
        entries = self._memory.sweep()
        self._memory.report("sweep_unreleased")
        return entries

    def scan_redzones(self) -> list[Allocation]:
        self._check_open()
        return self._memory.scan_redzones()

    def poison_redzones(self) -> None:
        self._check_open()
        self._memory.poison_redzones()

    def mark_written(self, ptr: int, nbytes: int) -> None:
        self._memory.mark(self._span("mark_written: ptr", ptr, nbytes))

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

    def copy_h2d_on_stream(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        self._refuse_capture(self._stream(stream), "copy_h2d")
        self.copy_h2d_async(src, dst, stream)
        self.synchronize(stream)

    def copy_files_h2d(self, spans: Iterable[tuple[int, int, int, int]], stream: StreamLike = 0) -> None:
        checked = list(checked_spans(spans))
        places = [self._span("copy_files_h2d: dst", span.dst, span.nbytes) for span in checked]
        self._refuse_capture(self._stream(stream), "copy_files_h2d")
        for place in places:
            self._announce("copy", "h2d", place, place.nbytes, stream)
        self.synchronize(stream)
        for span, place in zip(checked, places, strict=True):
            read_exactly(span.descriptor, span.offset, self._memory.write(place))

    def copy_h2d_async(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        data = as_bytes("src", src, writable=False)
        span = self._span("copy_h2d: dst", dst, data.nbytes)
        self._put("copy", "h2d", span, span.nbytes, stream, lambda: np.copyto(self._memory.write(span), data))

    def copy_h2d_async_retained(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        self.copy_h2d_async(as_bytes("src", src, writable=False).copy(), dst, stream)

    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        data = as_bytes("dst", dst, writable=True)
        span = self._span("copy_d2h: src", src, data.nbytes)
        self._put("copy", "d2h", span, span.nbytes, stream, lambda: np.copyto(data, self._memory.read(span)))

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
        first = self._span("copy_d2d: src", src, spans[0])
        second = self._span("copy_d2d: dst", dst, spans[1])
        apart = first.address - second.address
        if size and -first.nbytes < apart < second.nbytes:
            raise ValueError(
                f"copy_d2d: expected spans that do not overlap, got {first.address:#x} and {second.address:#x}"
            )
        self._put(
            "copy",
            "d2d",
            second,
            size,
            stream,
            lambda: self._memory.copy_rows(first, pitches[0], second, pitches[1], shape),
        )

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        self._let_go()
        size = checks.integer("alloc_host_pinned: nbytes", nbytes, low=1)
        ptr, array = self._memory.alloc_pinned(size)
        memory = PinnedMemory(int(ptr), size, array)
        self._pinned[memory.address] = memory
        return memory

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self._let_go()
        with self._lock:
            self._pinned_entry(memory)
            self._memory.refuse_exported_at("free_host_pinned", memory.address)
            del self._pinned[memory.address]
        self._finish_work()
        self._memory.free_pinned(DevicePtr(memory.address))
        self._memory.report("free_host_pinned")

    def host_ptr_to_device(self, memory: PinnedMemory) -> DevicePtr:
        return DevicePtr(self._pinned_entry(memory).address)

    def _pinned_entry(self, memory: PinnedMemory) -> PinnedMemory:
        self._check_open()
        if not isinstance(memory, PinnedMemory):
            raise TypeError(f"expected what alloc_host_pinned returned, got {memory!r}")
        if self._pinned.get(memory.address) is not memory:
            where = self._memory.whereabouts(memory.address)
            raise InvalidPointer(f"expected live pinned memory of this backend, got {memory.address:#x}: {where}")
        return memory

    def _span(self, what: str, ptr: int, nbytes: int) -> Span:
        """Return a span; refuse one that no live block contains before anything is enqueued."""
        self._check_open()
        address, size = checks.address(what, ptr), checks.integer(f"{what}: nbytes", nbytes, low=0)
        return self._memory.span(what, address, size)

    def _put(self, kind: Any, name: str, span: Span, nbytes: int, stream: StreamLike, work: Work) -> None:
        """Trace and enqueue a copy or memset of ``nbytes`` bytes."""
        on = self._announce(kind, name, span, nbytes, stream)
        if nbytes:
            self._enqueue(on, work)

    def _announce(self, kind: Any, name: str, span: Span, nbytes: int, stream: StreamLike) -> HostStream:
        """Tell faults, with the tag of ``span``'s block, and traces of a copy or memset; return its stream."""
        on = self._stream(stream)
        if self._faults:
            tag = self._memory.tag_of(span.address) if span.nbytes else ""
            self._ask_faults(name if kind == "memset" else f"copy_{name}", tag)
        if self._traces.active:
            self._traces.add(LaunchRecord(kind, name, nbytes=nbytes, stream=on.handle))
        return on

    def launch_trace(self) -> AbstractContextManager[list[LaunchRecord]]:
        self._check_open()
        return self._traces.open()
