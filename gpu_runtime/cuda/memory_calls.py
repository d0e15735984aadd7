# SPDX-License-Identifier: MIT OR Apache-2.0
"""The CUDA backend's calls on memory and its copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from cupy.cuda import runtime

from gpu_runtime import checks
from gpu_runtime.blocks import Blocks
from gpu_runtime.buffers import Bytes, as_bytes
from gpu_runtime.cuda.driver import attempt
from gpu_runtime.cuda.file_copies import copy_files
from gpu_runtime.cuda.memory import CudaMemory
from gpu_runtime.cuda.small_copies import SMALL_COPY_BYTES, SmallCopies
from gpu_runtime.cuda.stream_calls import StreamCalls
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.faults import Fault
from gpu_runtime.files import checked_spans
from gpu_runtime.handles import LaunchRecord, PinnedMemory
from gpu_runtime.ledger import Allocation
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike

_MOST_PITCH: Final = (1 << 31) - 1  # of cudaMemcpy2D on every device there is

_MOST_READY: Final = 256  # copies that are known from before; past this many, all are forgotten


class _Ready(NamedTuple):
    """A small copy that was made before, as `SmallCopies.enqueue` takes it.

    Attributes
    ----------
    host : ndarray
        It lives as long as this, so that no other object can have its ``id``.
    dst, src, nbytes, on : int
        ``on`` is the stream's handle.
    removals : tuple of int
        Blocks of either kind that had been given up: while it stays the same, both spans are where they were.
    """

    host: Any
    dst: int
    src: int
    nbytes: int
    on: int
    removals: tuple[int, int]


class MemoryCalls(StreamCalls):
    """Allocation, reports and copies. A copy without a stream is one on the default stream, waited for."""

    def __init__(
        self,
        device: int,
        *,
        arch: str,
        cache: Path | None,
        pool: bool,
        redzones: bool,
        memory_limit: int | None,
        faults: Sequence[Fault],
    ) -> None:
        super().__init__(device, faults)
        limit = None if memory_limit is None else checks.integer("memory_limit", memory_limit, low=0)
        self._memory = CudaMemory(
            self._context, self._streams.service, pool=pool, redzones=redzones, limit=limit, faults=self._faults
        )
        self._small_copies = SmallCopies(self._context, arch, cache)
        self._pinned: dict[int, PinnedMemory] = {}
        self._ready: dict[tuple[int, int, int, bool], _Ready] = {}

    @property
    def _blocks(self) -> Blocks:
        self._check_open()
        return self._memory

    def _let_go(self, *, wait: bool = False) -> None:
        self._check_open()
        self._memory.let_go(self._streams.marks, wait=wait)

    def _settle_exports(self, ptr: int = 0) -> None:
        """Let the exports end that only wait for work, where there are any of a block (0: of all)."""
        if self._memory.exports_at(ptr):
            self._let_go(wait=True)

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
            self._settle_exports(address)
            self._memory.free(DevicePtr(address), self._streams.marks)

    def total_memory(self) -> int:
        self._check_open()
        return self._memory.total

    def free_memory(self) -> int:
        self._let_go()
        return self._memory.free_bytes()

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
        self._settle_exports()
        return self._memory.sweep(self._streams.marks)

    def scan_redzones(self) -> list[Allocation]:
        self._check_open()
        self._streams.finish()
        return self._memory.scan_redzones()

    def poison_redzones(self) -> None:
        self._check_open()
        self._streams.finish()
        self._memory.poison_redzones()

    def mark_written(self, ptr: int, nbytes: int) -> None:
        self._span("mark_written: ptr", ptr, nbytes)  # reads are not checked here

    # copies

    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        self._streams.refuse_capture(self._stream(0), "memset")
        self.memset_async(ptr, value, nbytes)
        self.synchronize()

    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        fill = checks.integer("memset: value", value, 0, 255)
        start, size, tag = self._span("memset: ptr", ptr, nbytes)
        on = self._about_to("memset", "memset", size, stream, tag)
        if size:
            self._context.call(runtime.memsetAsync, start, fill, size, on)
            self._streams.note(on, stream)

    def copy_h2d(self, src: Any, dst: int) -> None:
        self._streams.refuse_capture(self._stream(0), "copy_h2d")
        self.copy_h2d_async(src, dst)
        self.synchronize()

    def copy_d2h(self, src: int, dst: Any) -> None:
        self.copy_d2h_on_stream(src, dst)

    def copy_d2d(self, src: int, dst: int, nbytes: int) -> None:
        self._streams.refuse_capture(self._stream(0), "copy_d2d")
        self.copy_d2d_async(src, dst, nbytes)
        self.synchronize()

    def copy_d2h_on_stream(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        self._streams.refuse_capture(self._stream(stream), "copy_d2h")
        self.copy_d2h_async(src, dst, stream)
        self.synchronize(stream)

    def copy_h2d_on_stream(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        data = as_bytes("src", src, writable=False)
        start, size, tag = self._span("copy_h2d: dst", dst, data.nbytes)
        self._streams.refuse_capture(self._stream(stream), "copy_h2d")
        on = self._about_to("copy", "h2d", size, stream, tag)
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "stream", stream=on))
        with self._context.current(), self._context.relaxed():
            if size:
                attempt(runtime.memcpyAsync, start, _address(data), size, runtime.memcpyDefault, on)
            attempt(runtime.streamSynchronize, on)

    def copy_files_h2d(self, spans: Iterable[tuple[int, int, int, int]], stream: StreamLike = 0) -> None:
        on = self._stream(stream)
        self._streams.refuse_capture(on, "copy_files_h2d")
        checked = list(checked_spans(spans))
        for span in checked:
            _, _, tag = self._span("copy_files_h2d: dst", span.dst, span.nbytes)
            if self._faults or self._traces.active:
                self._about_to("copy", "h2d", span.nbytes, stream, tag)
        if self._traces.active:
            self._traces.add(LaunchRecord("wait", "stream", stream=on))
        copy_files(self._context, self._memory.locked, checked, on)

    def copy_h2d_async(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        if self._copied_again(src, dst, stream, to_device=True):
            return
        data = as_bytes("src", src, writable=False)
        start, size, tag = self._span("copy_h2d: dst", dst, data.nbytes)
        on = self._about_to("copy", "h2d", size, stream, tag)
        host = _address(data)
        if self._is_small(host, size, start):
            self._copy_small(start, host, size, on, stream, data)
            self._keep_ready(src, dst, stream, (start, host, size, on), to_device=True)
        else:
            self._copy(start, host, size, on, stream, data)

    def copy_h2d_async_retained(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        self.copy_h2d_async(as_bytes("src", src, writable=False).copy(), dst, stream)

    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        if self._copied_again(dst, src, stream, to_device=False):
            return
        data = as_bytes("dst", dst, writable=True)
        start, size, tag = self._span("copy_d2h: src", src, data.nbytes)
        on = self._about_to("copy", "d2h", size, stream, tag)
        host = _address(data)
        if self._is_small(host, size, start):
            self._copy_small(host, start, size, on, stream, data)
            self._keep_ready(dst, src, stream, (host, start, size, on), to_device=False)
            return
        if size and not self._memory.is_page_locked(host) and not self._streams.is_capturing(on):
            # CUDA would wait for the stream inside of the copy, and hold what other threads' calls need meanwhile.
            self._context.call_relaxed(runtime.streamSynchronize, on)
        self._copy(host, start, size, on, stream, data)

    def copy_d2d_async(self, src: int, dst: int, nbytes: int, stream: StreamLike = 0) -> None:
        self.copy_d2d_2d_async(src, nbytes, dst, nbytes, nbytes, 1, stream)

    def copy_d2d_2d_async(
        self, src: int, src_pitch: int, dst: int, dst_pitch: int, width: int, height: int, stream: StreamLike = 0
    ) -> None:
        rows, columns = checks.integer("copy_d2d: height", height, 0), checks.integer("copy_d2d: width", width, 0)
        size = rows * columns
        pitches = [
            checks.integer(f"copy_d2d: {name}", pitch, columns)
            for name, pitch in (("src_pitch", src_pitch), ("dst_pitch", dst_pitch))
        ]
        reach = [(rows - 1) * pitch + columns if size else 0 for pitch in pitches]
        first, src_reach, _ = self._span("copy_d2d: src", src, reach[0])
        second, dst_reach, tag = self._span("copy_d2d: dst", dst, reach[1])
        if size and first < second + dst_reach and second < first + src_reach:
            raise ValueError(f"copy_d2d: expected spans that do not overlap, got {first:#x} and {second:#x}")

        on = self._about_to("copy", "d2d", size, stream, tag)
        if rows == 1:
            self._copy(second, first, columns, on, stream)
        elif size and max(pitches) > _MOST_PITCH:
            for row in range(rows):
                self._copy(second + row * pitches[1], first + row * pitches[0], columns, on, stream)
        elif size:
            places = (second, pitches[1], first, pitches[0], columns, rows, runtime.memcpyDefault, on)
            self._context.call(runtime.memcpy2DAsync, *places)
            self._streams.note(on, stream)

    def _copy(self, dst: int, src: int, size: int, on: int, stream: StreamLike, keep: Bytes | None = None) -> None:
        """Enqueue a copy; ``keep`` lives until it is done."""
        if size:
            self._context.call_relaxed(runtime.memcpyAsync, dst, src, size, runtime.memcpyDefault, on)
            locked = keep is not None and self._memory.is_pinned(_address(keep))
            self._streams.note(on, stream, keep, locked=locked)

    def _is_small(self, host: int, nbytes: int, device: int) -> bool:
        """Return whether a kernel is to make a copy. Of memory that others locked, it is not known that kernels can."""
        return 0 < nbytes <= SMALL_COPY_BYTES and self._memory.kernels_reach(host, nbytes, device)

    def _copy_small(self, dst: int, src: int, size: int, on: int, stream: StreamLike, keep: Bytes) -> None:
        """Enqueue a copy by a kernel; ``keep``, page-locked memory of this backend, lives until it is done.

        On a stream of ours it may start early: there, all kernels that do so wait for those ahead. Of a foreign
        stream's kernels nothing is known, and in a capture there may be several ahead, on streams that were joined.
        """
        early = self._streams.is_plain(on)
        self._small_copies.enqueue(dst, src, size, on, early=early)
        if not early:  # else there is nothing to note of work on page-locked memory
            self._streams.note(on, stream, keep, locked=True)

    def _removals(self) -> tuple[int, int]:
        return self._memory.ledger.removals, self._memory.pinned.removals

    def _copied_again(self, host: Any, device: int, stream: StreamLike, *, to_device: bool) -> bool:
        """Enqueue a copy if it was made before and its checks still hold; return whether it was.

        A decode step makes the same few copies each time, and to check them takes longer than to enqueue them.
        """
        if type(stream) is not int or not isinstance(device, int):
            return False
        ready = self._ready.get((id(host), device, stream, to_device))
        if (
            ready is None
            or ready.host is not host
            or ready.nbytes != host.nbytes
            or ready.removals != self._removals()
            or self._streams.own.get(stream) != ready.on  # also when this backend is closed
            or self._faults
            or self._traces.active
            or not (to_device or host.flags.writeable)
            or self._streams.is_capturing(ready.on)
        ):
            return False
        self._small_copies.enqueue(ready.dst, ready.src, ready.nbytes, ready.on, early=True)
        return True

    def _keep_ready(
        self, host: Any, device: int, stream: StreamLike, copy: tuple[int, int, int, int], *, to_device: bool
    ) -> None:
        """Keep a copy that was made for `_copied_again`, if it is of a kind that may come again."""
        if type(host) is not np.ndarray or type(stream) is not int or copy[-1] not in self._streams.own:
            return
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[id(host), int(device), stream, to_device] = _Ready(host, *copy, self._removals())

    def _about_to(self, kind: Any, name: str, nbytes: int, stream: StreamLike, tag: str) -> int:
        """Return the handle of the stream that a copy or memset goes to, once faults and traces have heard of it."""
        on = self._stream(stream)
        if self._faults:
            self._ask_faults(name if kind == "memset" else f"copy_{name}", tag)
        if self._traces.active:
            self._traces.add(LaunchRecord(kind, name, nbytes=nbytes, stream=on))
        return on

    def _span(self, what: str, ptr: int, nbytes: int) -> tuple[int, int, str]:
        """Return address, size and the block's tag; refuse a span that reaches out of a block of this backend."""
        self._check_open()
        address, size = checks.address(what, ptr), checks.integer(f"{what}: nbytes", nbytes, low=0)
        return address, size, self._memory.check_span(what, address, size) if size else ""

    # page-locked memory

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        self._let_go()
        size = checks.integer("alloc_host_pinned: nbytes", nbytes, low=1)
        self._small_copies.load()
        ptr, array = self._memory.alloc_pinned(size)
        memory = PinnedMemory(int(ptr), size, array)
        self._pinned[memory.address] = memory
        return memory

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self._let_go()  # before the lock, which a forked child may find held for ever
        with self._lock:
            self._settle_exports(self._pinned_entry(memory).address)
            self._memory.refuse_exported_at("free_host_pinned", memory.address)
            del self._pinned[memory.address]
        self._memory.free_pinned(DevicePtr(memory.address), self._streams.marks)
        self._ready.clear()  # their arrays would hold the memory

    def host_ptr_to_device(self, memory: PinnedMemory) -> DevicePtr:
        """Return the address itself: with unified addressing, page-locked memory has the same one on the device."""
        return DevicePtr(self._pinned_entry(memory).address)

    def _pinned_entry(self, memory: PinnedMemory) -> PinnedMemory:
        self._check_open()
        if not isinstance(memory, PinnedMemory):
            raise TypeError(f"expected what alloc_host_pinned returned, got {memory!r}")
        if self._pinned.get(memory.address) is not memory:
            raise InvalidPointer(f"expected live pinned memory of this backend, got {memory.address:#x}")
        return memory

    def launch_trace(self) -> AbstractContextManager[list[LaunchRecord]]:
        self._check_open()
        return self._traces.open()


def _address(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])
