# SPDX-License-Identifier: MIT OR Apache-2.0
"""Device memory of the CUDA backend: CuPy's allocator, a ledger, redzones, and frees that wait for every stream.

A block that is freed while a stream may still use it is kept until that stream has passed the free. Blocks come from
the arena of one stream of this backend, so CuPy's pool hands out no memory that other work is still using.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import cupy
import numpy as np
from cupy.cuda import runtime
from cupy.cuda.memory import Memory, MemoryPointer

from gpu_runtime.blocks import Blocks, Orphan
from gpu_runtime.cuda.driver import CUDA_ERRORS, Context, attempt, failure
from gpu_runtime.cuda.events import Mark
from gpu_runtime.errors import DeviceError, InvalidPointer, OutOfMemory
from gpu_runtime.faults import Fault
from gpu_runtime.ledger import Allocation
from gpu_runtime.machine import machine_bytes
from gpu_runtime.oom import out_of_memory
from gpu_runtime.pointer import DevicePtr

ALIGNMENT: Final = 256
REDZONE_BYTES: Final = 256
_REDZONE_VALUE: Final = 0xFB
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
_UNREGISTERED: Final = 0  # cudaMemoryTypeUnregistered
_DEVICE: Final = 2  # cudaMemoryTypeDevice
_NOTHING: Final = Allocation(DevicePtr.NULL, 0, "", "")
"""The entry of foreign memory that is let go of: no address lies in it."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class _Retired:
    """A block that was freed, what holds its memory, and the marks that streams must pass before it is let go."""

    entry: Allocation
    owner: Any
    marks: list[Mark]


class _Handle:
    """A stream's handle in the form in which libraries pass streams to each other."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _borrowed(handle: int, device: int) -> Any:
    """Return CuPy's form of a stream that is not CuPy's to destroy."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)  # CuPy 13


class _Pinned:
    """Page-locked memory, freed with its last array, on whatever thread that is."""

    def __init__(self, context: Context, nbytes: int) -> None:
        self.ptr = int(runtime.hostAlloc(nbytes, runtime.hostAllocPortable | runtime.hostAllocMapped))
        self._context = context
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (self.ptr, False)}

    def __del__(self) -> None:
        with suppress(Exception):  # not allocated; or, after a fork or an error that ended the context, out of reach
            self._context.call_relaxed(runtime.freeHost, self.ptr)


class CudaMemory(Blocks):
    """Blocks of one device.

    Parameters
    ----------
    context : Context
    stream : int
        CuPy's allocator is asked with this stream current.
    pool : bool
        Whether blocks come from CuPy's current allocator; otherwise each is a ``cudaMalloc`` of exactly its size, as
        memory checkers need it.
    redzones : bool
        Whether a pattern surrounds every block.
    limit : int or None
        Most bytes that may be live; None takes the device's memory.
    faults : sequence of Fault
    """

    def __init__(
        self,
        context: Context,
        stream: int,
        *,
        pool: bool,
        redzones: bool,
        limit: int | None,
        faults: Sequence[Fault],
    ) -> None:
        super().__init__(device=(2, context.device), pinned_device=(3, 0))  # DLPack's kDLCUDA and kDLCUDAHost
        self._context = context
        self._stream = stream
        self._cupy_stream = _borrowed(stream, context.device)
        self._pool = pool
        self._margin = REDZONE_BYTES if redzones else 0
        self._limit = limit
        self._faults = faults
        self._owners: dict[int, Any] = {}
        self._retired: deque[_Retired] = deque()
        self.generation = 0
        """Counts frees: a span that was checked at an earlier count may not be live any more."""

    @property
    def total(self) -> int:
        """Bytes that the device has, or the limit."""
        return int(self._context.call(runtime.memGetInfo)[1]) if self._limit is None else self._limit

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated: free on the device, or kept for reuse by CuPy's pool."""
        with self._context.current():
            free = int(attempt(runtime.memGetInfo)[0])
            if self._pool and cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc:
                free += int(cupy.get_default_memory_pool().free_bytes())
        if self._limit is not None:
            free = min(free, self._limit - self.ledger.live_bytes)
        return max(free, 0)

    def alloc(self, nbytes: int, tag: str, *, managed: bool = False) -> DevicePtr:
        """Return the address of a new block, aligned to `ALIGNMENT`. Its content is unspecified."""
        with self._lock:
            self._check_faults(nbytes, tag)
            if self._limit is not None and self.ledger.live_bytes + nbytes > self._limit:
                raise out_of_memory(self.ledger, nbytes, tag, self._limit)
            self.reclaim()
            owner = self._take(nbytes, managed)
            if owner is None:
                self.reclaim(wait=True)
                owner = self._take(nbytes, managed)
            if owner is None:
                raise out_of_memory(self.ledger, nbytes, tag, self.total, f"{self.free_bytes():,} bytes are free")
            ptr = DevicePtr(owner.ptr + self._margin)
            if ptr % ALIGNMENT:
                raise DeviceError(f"alloc: expected memory aligned to {ALIGNMENT} from CuPy's allocator, got {ptr}")
            self._fill_redzones(ptr, nbytes)
            self._owners[int(ptr)] = owner
            self.ledger.add(ptr, nbytes, tag)
            return ptr

    def _check_faults(self, nbytes: int, tag: str) -> None:
        for fault in self._faults:
            try:
                fault.allocate(nbytes, tag, self.ledger.live_bytes)
            except OutOfMemory as error:
                raise out_of_memory(self.ledger, nbytes, tag, error.limit, str(error)) from None

    def _take(self, nbytes: int, managed: bool) -> Any:
        """Return what owns ``nbytes`` and the margins, or None when they do not fit."""
        size = nbytes + 2 * self._margin
        if size >= 1 << 63:
            return None
        try:
            with self._context.current(), self._context.relaxed(), self._cupy_stream:
                if managed:
                    return cupy.cuda.malloc_managed(size)
                return cupy.cuda.alloc(size) if self._pool else MemoryPointer(Memory(size), 0)
        except MemoryError:
            return None
        except CUDA_ERRORS as error:
            if getattr(error, "status", None) == _OUT_OF_MEMORY:
                return None
            raise failure("alloc", (nbytes,), error) from None

    def free(self, ptr: DevicePtr, marks: Callable[[], list[Mark]]) -> None:
        """Give up the block that starts at ``ptr`` once the streams have passed the marks.

        Raises
        ------
        InvalidPointer
            When no live block starts there.
        """
        with self._lock:
            self.refuse_exported_at("free", int(ptr))
            passed = marks()  # first: when it fails, nothing has changed
            entry = self.ledger.remove(ptr)
            self._retired.append(_Retired(entry, self._owners.pop(int(ptr)), passed))
            self.generation += 1
            self.reclaim()

    def sweep(self, marks: Callable[[], list[Mark]]) -> list[Allocation]:
        """Free every live block and return what they were."""
        with self._lock:
            entries = list(self.ledger)
            self.refuse_exported("sweep_unreleased", entries)
            for entry in entries:
                self.free(entry.ptr, marks)
        return entries

    def let_go(self, marks: Callable[[], list[Mark]], *, wait: bool = False) -> None:
        """Let go of what buffers left behind once the streams have passed the marks; that may leave more.

        Of what was given up before, something may hold an export of ours: where there are any, it is looked at again.
        """
        while self.orphans or ((wait or self.exports) and self._retired):
            with self._lock:
                for orphan in self.take_orphans():
                    self._retire(orphan, marks)
                self.reclaim(wait=wait)
            if not self.orphans:
                return

    def _retire(self, orphan: Orphan, marks: Callable[[], list[Mark]]) -> None:
        if orphan.block is not None and self.lives(orphan.block):
            self.free(orphan.block.ptr, marks)
        if orphan.owner is not None:
            self._retired.append(_Retired(_NOTHING, orphan.owner, marks()))

    def adopt(self, address: int, nbytes: int, *, readonly: bool) -> None:
        self.check_span("foreign memory", address, nbytes)
        if address >= 1 << 63:
            raise InvalidPointer(f"foreign memory: expected an address that a device can have, got {address:#x}")
        found = self._context.call(runtime.pointerGetAttributes, address)
        if found.type == _UNREGISTERED or (found.type == _DEVICE and found.device != self._context.device):
            where = f"of device {found.device}" if found.type == _DEVICE else "that CUDA does not know"
            raise InvalidPointer(
                f"foreign memory: expected an address that device {self._context.device} can reach, got {address:#x} "
                f"{where}"
            )

    def is_page_locked(self, address: int) -> bool:
        """Return whether host memory is page-locked, by this backend or by anybody else."""
        if self.is_pinned(address):
            return True
        return int(self._context.call(runtime.pointerGetAttributes, address).type) != _UNREGISTERED

    def kernels_reach(self, host: int, nbytes: int, device: int) -> bool:
        """Return whether a host span is page-locked by this backend, and ``device`` an address in a block of it."""
        with self._lock:
            entry = self.pinned.find(host)
            inside = entry is not None and host + nbytes <= int(entry.ptr) + entry.nbytes
            return inside and self.ledger.find(device) is not None

    def reclaim(self, *, wait: bool = False) -> None:
        """Let go of the freed blocks that every stream has passed, or of all of them after waiting."""
        with self._lock, self._context.relaxed():
            while self._retired:
                block = self._retired[0]  # what was freed later waits for the same streams, and longer
                if wait:
                    for mark in block.marks:
                        mark.wait()
                elif not all(mark.passed() for mark in block.marks):
                    return
                self._retired.popleft()
                with self._context.current():
                    block.owner = None  # CuPy frees it in the context that is current

    def alloc_pinned(self, nbytes: int) -> tuple[DevicePtr, Bytes]:
        """Return the address and the bytes, all zero, of new page-locked memory.

        Raises
        ------
        OutOfMemory
            When the host cannot lock as much.
        """
        owner = self.locked(nbytes)
        array: Bytes = np.asarray(owner)  # keeps the memory while anybody has it
        array.fill(0)
        with self._lock:
            ptr = DevicePtr(owner.ptr)
            self._owners[int(ptr)] = owner
            self.pinned.add(ptr, nbytes, "pinned host memory")
        return ptr, array

    def locked(self, nbytes: int) -> _Pinned:
        """Return what owns new page-locked memory, its content unspecified.

        Raises
        ------
        OutOfMemory
            When the host cannot lock as much.
        """
        reason: BaseException | None = None
        if nbytes < 1 << 63:
            try:
                with self._context.current(), self._context.relaxed():
                    return _Pinned(self._context, nbytes)
            except CUDA_ERRORS as error:
                reason = error
        if reason is not None and getattr(reason, "status", None) != _OUT_OF_MEMORY:
            raise failure("alloc_host_pinned", (nbytes,), reason) from None
        why = "the host could not lock them"
        raise out_of_memory(self.pinned, nbytes, "pinned host memory", machine_bytes(), why)

    def free_pinned(self, ptr: DevicePtr, marks: Callable[[], list[Mark]]) -> None:
        """Give up page-locked memory once the streams have passed the marks."""
        with self._lock:
            self.refuse_exported_at("free_host_pinned", int(ptr))
            passed = marks()
            entry = self.pinned.remove(ptr)
            self._retired.append(_Retired(entry, self._owners.pop(int(ptr)), passed))
            self.generation += 1
            self.reclaim()

    def holder(self, address: int) -> Allocation | None:
        """Return the live block, or the page-locked memory, that contains ``address``; None for foreign memory.

        Raises
        ------
        InvalidPointer
            When the block was freed, and waits for a stream.
        """
        with self._lock:
            entry = self.find(address)
            if entry is None:
                for block in self._retired:
                    if block.entry.ptr <= address < block.entry.ptr + block.entry.nbytes:
                        raise InvalidPointer(f"{address:#x} lies in a block that was freed: {block.entry}")
        return entry

    def check_span(self, what: str, address: int, nbytes: int) -> str:
        """Return the tag of the block that contains a span, "" for foreign memory.

        Raises
        ------
        InvalidPointer
            When the span starts in a block of this backend and ends outside it, or starts at NULL.
        """
        try:
            entry = self.holder(address)
        except InvalidPointer as error:
            raise InvalidPointer(f"{what}: {error}") from None
        if entry is None:
            if not address:
                raise InvalidPointer(f"{what}: expected a device address, got NULL")
            self._refuse_margins(what, address)
            return ""
        past = address + nbytes - int(entry.ptr) - entry.nbytes
        if past > 0:
            raise InvalidPointer(f"{what}: span of {nbytes:,} bytes at {address:#x} ends {past:,} bytes past {entry}")
        return entry.tag

    def _refuse_margins(self, what: str, address: int) -> None:
        """Raise InvalidPointer for an address in the redzone of a block: it is off by little, and nobody else's."""
        with self._lock:
            near = self.ledger.nearest(address)
        if near is not None and -self._margin <= address - int(near.ptr) < near.nbytes + self._margin:
            raise InvalidPointer(f"{what}: {address:#x} lies just outside {near}")

    # redzones

    def _margins(self, ptr: int, nbytes: int) -> Iterable[int]:
        return (ptr - self._margin, ptr + nbytes) if self._margin else ()

    def _fill_redzones(self, ptr: int, nbytes: int) -> None:
        for start in self._margins(ptr, nbytes):
            self._context.call(runtime.memsetAsync, start, _REDZONE_VALUE, self._margin, self._stream)
        # Memory of a stream-ordered allocator is only valid on other streams once this one has got here.
        self._context.call_relaxed(runtime.streamSynchronize, self._stream)

    def poison_redzones(self) -> None:
        """Write the redzone pattern around every live block again."""
        with self._lock:
            for entry in self.ledger:
                self._fill_redzones(int(entry.ptr), entry.nbytes)

    def scan_redzones(self) -> list[Allocation]:
        """Return the live blocks whose redzones no longer hold the pattern.

        Raises
        ------
        DeviceError
            When the backend keeps no redzones.
        """
        if not self._margin:
            raise DeviceError("scan_redzones: this backend was opened with redzones=False")
        with self._lock:
            return [entry for entry in self.ledger if not self._intact(entry)]

    def _intact(self, entry: Allocation) -> bool:
        found = np.empty(self._margin, dtype=np.uint8)
        for start in self._margins(int(entry.ptr), entry.nbytes):
            where = (found.ctypes.data, start, found.nbytes, runtime.memcpyDefault, self._stream)
            self._context.call(runtime.memcpyAsync, *where)
            self._context.call_relaxed(runtime.streamSynchronize, self._stream)
            if np.any(found != _REDZONE_VALUE):
                return False
        return True
