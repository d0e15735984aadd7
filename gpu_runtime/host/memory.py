# SPDX-License-Identifier: MIT OR Apache-2.0
"""Device memory of the host backend: ordinary memory whose addresses are real, so that C code may read it.

Every block lies between two redzones, and every view is checked against the ledger, so an address outside a live
block is an error here and not a silent read of something else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.blocks import Blocks, Orphan
from gpu_runtime.errors import InvalidPointer, OutOfMemory
from gpu_runtime.faults import Fault
from gpu_runtime.host.foreign import Foreign, ForeignSpan
from gpu_runtime.host.streams import Work
from gpu_runtime.ledger import Allocation, Ledger, call_site, counted
from gpu_runtime.oom import out_of_memory
from gpu_runtime.pointer import DevicePtr

if TYPE_CHECKING:
    from gpu_runtime.host.shadow import Block

Array = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT: Final = 256
"""Alignment of every block in bytes, as CUDA's allocators give."""

REDZONE_BYTES: Final = 256
_REDZONE_VALUE: Final = 0xFB


class Span(NamedTuple):
    """A span that a call names by parameter ``what``; ``block`` is what a checking memory found there."""

    what: str
    address: int
    nbytes: int
    block: Block | None = None


class HostMemory(Blocks):
    """Blocks, views of them, and the gathers and scatters that indirect ops use.

    Page-locked host memory has a ledger of its own: kernels reach it like device memory, but it is not counted as such.

    Parameters
    ----------
    limit : int or None
        Most bytes that may be live; None takes the machine's memory.
    faults : sequence of Fault
        Asked before every allocation of device memory.
    """

    def __init__(self, limit: int | None = None, faults: Sequence[Fault] = ()) -> None:
        super().__init__(device=(1, 0), pinned_device=(1, 0))  # DLPack's kDLCPU
        self.total = machine_bytes() if limit is None else checks.integer("memory_limit", limit, low=0)
        self._faults = tuple(faults)
        self._storage: dict[int, Array] = {}
        self._foreign = Foreign()
        self.generation = 0
        """Counts releases: a view made at an earlier count may be of memory that is no longer live."""
        self.on_release: Callable[[], None] = lambda: None

    def alloc(self, nbytes: int, tag: str, *, managed: bool = False) -> DevicePtr:
        """Return the address of a new block, aligned to `ALIGNMENT`. Its content is unspecified.

        Raises
        ------
        OutOfMemory
            When it does not fit, or a fault refuses it.
        """
        with self._lock:
            for fault in self._faults:
                try:
                    fault.allocate(nbytes, tag, self.ledger.live_bytes)
                except OutOfMemory as error:
                    raise out_of_memory(self.ledger, nbytes, tag, error.limit, str(error)) from None
            if self.ledger.live_bytes + nbytes > self.total:
                raise out_of_memory(self.ledger, nbytes, tag, self.total)
            return self._new_block(self.ledger, nbytes, tag, host_visible=managed)

    def alloc_pinned(self, nbytes: int) -> tuple[DevicePtr, Array]:
        """Return the address and the bytes, all zero, of new page-locked memory."""
        with self._lock:
            ptr = self._new_block(self.pinned, nbytes, "pinned host memory", host_visible=True)
            array = self.bytes(ptr, nbytes)
        array.fill(0)
        return ptr, array

    def _new_block(self, ledger: Ledger, nbytes: int, tag: str, *, host_visible: bool) -> DevicePtr:
        """Make a block, which the host may write at any time if it is ``host_visible``."""
        try:
            raw = np.empty(nbytes + 2 * REDZONE_BYTES + ALIGNMENT, dtype=np.uint8)
        except (MemoryError, ValueError, OverflowError):  # the latter two when no array can be that large
            raise out_of_memory(self.ledger, nbytes, tag, self.total) from None
        start = -(raw.ctypes.data + REDZONE_BYTES) % ALIGNMENT
        block = raw[start : start + nbytes + 2 * REDZONE_BYTES]
        ptr = DevicePtr(block.ctypes.data + REDZONE_BYTES)
        self._storage[int(ptr)] = block
        self._fill_redzones(block)
        ledger.add(ptr, nbytes, tag)
        return ptr

    def free(self, ptr: DevicePtr) -> None:
        """Release the block that starts at ``ptr``."""
        self._release(self.ledger, ptr)

    def free_pinned(self, ptr: DevicePtr) -> None:
        """Release page-locked memory."""
        self._release(self.pinned, ptr)

    def _release(self, ledger: Ledger, ptr: DevicePtr) -> None:
        with self._lock:
            self.refuse_exported_at("free", int(ptr))
            entry = ledger.remove(ptr)
            del self._storage[int(entry.ptr)]
            self.generation += 1
            self.on_release()

    def finish(self) -> None:
        """Let go of what is kept of freed blocks, when the device is closed."""

    def report(self, call: str) -> None:
        """Raise what was found wrong with blocks that ``call`` released."""

    def sweep(self) -> list[Allocation]:
        """Release every live block that is not page-locked and return what they were."""
        with self._lock:
            entries = list(self.ledger)
            self.refuse_exported("sweep_unreleased", entries)
            for entry in entries:
                self.free(entry.ptr)
        return entries

    # memory of others

    def adopt(self, address: int, nbytes: int, *, readonly: bool) -> None:
        with self._lock:
            self._adopted(self._foreign.add(address, nbytes, readonly=readonly))

    def abandon(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._abandoned(self._foreign.remove(address, nbytes))
            self.generation += 1
            self.on_release()

    def let_go(self, orphan: Orphan) -> None:
        """Let go of what a buffer left behind, which no work uses any more."""
        if orphan.nbytes:
            self.abandon(orphan.address, orphan.nbytes)
        if orphan.block is not None and self.lives(orphan.block):
            self.free(orphan.block.ptr)

    def _adopted(self, span: ForeignSpan) -> None:
        """Hear of foreign memory that will be used."""

    def _abandoned(self, span: ForeignSpan) -> None:
        """Hear of foreign memory that will not be used any more."""

    # addresses

    def bytes(self, ptr: int, nbytes: int) -> Array:
        """Return a writable ``uint8`` view of a span.

        Raises
        ------
        InvalidPointer
            When no single live block contains the whole span.
        ValueError
            When ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"span at {ptr:#x}: expected at least 0 bytes, got {nbytes}")
        with self._lock:
            entry = self._holder(ptr)
            data = self._data(entry)
        start = ptr - int(entry.ptr)
        if start + nbytes > entry.nbytes:
            past = f"{counted(start + nbytes - entry.nbytes)} past {entry}"
            raise InvalidPointer(f"span of {counted(nbytes)} at {ptr:#x} ends {past}; used at {self.site()}")
        return data[start : start + nbytes]

    def _data(self, entry: Allocation) -> Array:
        storage = self._storage.get(int(entry.ptr))
        if storage is None:
            return self._foreign.data(entry)
        return storage[REDZONE_BYTES : REDZONE_BYTES + entry.nbytes]

    def _holder(self, address: int) -> Allocation:
        with self._lock:
            entry = self.find(address) or self._foreign.find(address)
        if entry is None:
            raise InvalidPointer(
                f"expected an address inside a live allocation, got {address:#x}: {self.whereabouts(address)}; "
                f"used at {self.site()}"
            )
        return entry

    def whereabouts(self, address: int) -> str:
        """Return what is known of an address that lies in no live block."""
        with self._lock:
            entry = self.ledger.nearest(address)
        return "nothing is allocated" if entry is None else f"the nearest is {entry.place(address)}"

    def site(self) -> str:
        """Return the place in the caller's code that is to blame for what goes on now."""
        return call_site()

    def sited(self, work: Work) -> Work:
        """Return ``work``, made to remember the place that enqueues it."""
        return work

    def tag_of(self, address: int) -> str:
        """Return the tag of the live block that contains ``address``, "" when none does."""
        entry = self.find(address)
        return entry.tag if entry else ""

    # the spans of copies

    def span(self, what: str, address: int, nbytes: int) -> Span:
        """Return a span that work is to use.

        Raises
        ------
        InvalidPointer
            When it is not empty and no live block contains it.
        """
        if nbytes:
            try:
                self.bytes(address, nbytes)
            except InvalidPointer as error:
                raise InvalidPointer(f"{what}: {error}") from None
        return Span(what, address, nbytes)

    def read(self, span: Span) -> Array:
        """Return the bytes of a span, to be read."""
        return self.bytes(span.address, span.nbytes)

    def write(self, span: Span) -> Array:
        """Return the bytes of a span, every one of which will be written."""
        return self.bytes(span.address, span.nbytes)

    def copy_rows(self, src: Span, src_pitch: int, dst: Span, dst_pitch: int, shape: tuple[int, int]) -> None:
        """Copy ``shape[0]`` rows of ``shape[1]`` bytes, which begin a pitch apart."""
        rows = self.view(src.address, shape, "u8", src_pitch)
        np.copyto(self.view(dst.address, shape, "u8", dst_pitch), rows)

    def mark(self, span: Span) -> None:
        """Note that foreign code wrote a span."""

    # views

    def view(self, ptr: int, shape: tuple[int, ...], dtype: str, row_stride: int | None = None) -> Array:
        """Return a writable view of a row-major array at ``ptr`` whose rows are ``row_stride`` elements apart."""
        if row_stride is None:
            numpy_type = dtypes.NUMPY[dtype]
            return np.ndarray(shape, numpy_type, self.bytes(ptr, math.prod(shape) * numpy_type.itemsize))
        inner = tuple(math.prod(shape[axis + 1 :]) for axis in range(1, len(shape)))
        return self.strided(ptr, shape, dtype, (row_stride, *inner))

    def strided(self, ptr: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> Array:
        """Return a writable view whose neighbours along each axis are that axis' stride, in elements, apart."""
        numpy_type = dtypes.NUMPY[dtype]
        size = numpy_type.itemsize
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        buffer = self.bytes(ptr, (reach + 1) * size if all(shape) else 0)
        steps = (stride * size if extent > 1 else 0 for extent, stride in zip(shape, strides, strict=True))
        return np.ndarray(shape, numpy_type, buffer, strides=tuple(steps))  # NumPy looks at every step, used or not

    def gather_rows(
        self,
        addresses: Array,
        lengths: Array,
        *,
        offset: int,
        stride: int,
        width: int,
        dtype: str,
        room: int | None = None,
    ) -> Array:
        """See `gpu_runtime.op.DeviceMemory.gather_rows`."""
        last = np.asarray(lengths, dtype=np.int64) - 1
        table = self._row_table(addresses, last, offset, stride, width, dtype)
        size = dtypes.itemsize(dtype)
        if table is None:  # look every entry up before anything of the table's size is allocated
            spans = [
                self.view(int(address) + offset * size, (int(end) + 1, width), dtype, stride)
                for address, end in zip(addresses, last, strict=True)
            ]
        rows = np.minimum(np.arange(int(last.max()) + 1 if room is None else room), last[:, None])
        if table is not None:
            return np.asarray(table[0][table[1][:, None] + rows])
        return np.stack([span[row] for span, row in zip(spans, rows, strict=True)])

    def scatter_rows(
        self, addresses: Array, positions: Array, values: Array, *, offset: int, stride: int, dtype: str
    ) -> None:
        """See `gpu_runtime.op.DeviceMemory.scatter_rows`."""
        where = np.asarray(positions, dtype=np.int64)
        width = values.shape[1]
        table = self._row_table(addresses, where, offset, stride, width, dtype)
        if table is not None:
            table[0][table[1] + where] = values
            return
        size = dtypes.itemsize(dtype)
        for address, position, row in zip(addresses, where, values, strict=True):
            span = self.view(int(address) + offset * size, (int(position) + 1, width), dtype, stride)
            span[-1] = row

    def _row_table(
        self, addresses: Array, last: Array, offset: int, stride: int, width: int, dtype: str
    ) -> tuple[Array, Array] | None:
        """Return one strided view that holds every addressed row, and each entry's first row in it.

        Possible when all addresses lie in one block at a multiple of the row pitch from each other, as the spans of a
        KV pool do; NumPy then gathers all entries in one call. None when they do not.

        Raises
        ------
        InvalidPointer
            When a row is negative, misaligned or outside the block; what None leaves open, the caller's views check.
        """
        size = dtypes.itemsize(dtype)
        if stride < 0 or int(last.min()) < 0 or np.any(addresses % size):
            raise InvalidPointer(
                f"address table: expected rows of at least 0, addresses aligned to {size} bytes and a stride of at "
                f"least 0, got rows from {int(last.min())}, addresses from {int(addresses.min()):#x}, stride {stride}"
            )
        entry = self._holder(int(addresses[0]))
        pitch = stride * size
        start = addresses.astype(np.int64) - int(entry.ptr)  # host addresses are below 2**63
        residue = int(start[0]) % pitch if pitch else 0
        if not pitch or start.min() < 0 or start.max() >= entry.nbytes or np.any(start % pitch != residue):
            return None
        origin = residue + offset * size
        end = int((start + last * pitch).max()) + (offset + width) * size
        if end > entry.nbytes:
            raise InvalidPointer(
                f"a row of an address table ends {end - entry.nbytes:,} bytes past {entry}; used at {self.site()}"
            )
        count = (entry.nbytes - origin - width * size) // pitch + 1
        return self.view(int(entry.ptr) + origin, (count, width), dtype, stride), start // pitch

    def poison_redzones(self) -> None:
        """Write the redzone pattern around every live block again."""
        with self._lock:
            for block in self._storage.values():
                self._fill_redzones(block)

    def scan_redzones(self) -> list[Allocation]:
        """Return the live blocks whose redzones no longer hold the pattern."""
        with self._lock:
            blocks = [(entry, self._storage[int(entry.ptr)]) for entry in self.ledger]
        return [entry for entry, block in blocks if redzone_damage(block) is not None]

    @staticmethod
    def _fill_redzones(block: Array) -> None:
        block[:REDZONE_BYTES] = _REDZONE_VALUE
        block[-REDZONE_BYTES:] = _REDZONE_VALUE


def redzone_damage(block: Array) -> str | None:
    """Return what happened to the redzones of a block, which are its first and last bytes; None when nothing did.

    The text goes before the block's description.
    """
    before, after = block[:REDZONE_BYTES] != _REDZONE_VALUE, block[-REDZONE_BYTES:] != _REDZONE_VALUE
    found = []
    for damage, side in ((before[::-1], "before the first byte"), (after, "past the last byte")):
        if damage.any():
            nearest = counted(int(damage.argmax()) + 1)
            found.append(f"{counted(int(np.count_nonzero(damage)))} overwritten, the nearest {nearest} {side}")
    return " and ".join(found) + " of" if found else None


def machine_bytes() -> int:
    """Return the machine's physical memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
