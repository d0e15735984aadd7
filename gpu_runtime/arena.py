# SPDX-License-Identifier: MIT OR Apache-2.0
"""Regions of one allocation, laid out before anything is allocated, and the rows of a logits arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpu_runtime import checks, dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.device_buffer import DeviceBuffer, view
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike

REGION_ALIGNMENT: Final = 256
"""Alignment of every region in bytes."""

ROW_ALIGNMENT: Final = 64
"""A logits row is padded to a multiple of this many elements, because cuBLAS is slow on rows that are not aligned."""


class Layout:
    """Named regions placed one after another. It knows its size without allocating anything."""

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.nbytes = 0

    def add(self, name: str, nbytes: int) -> None:
        """Place a region of ``nbytes`` bytes.

        Raises
        ------
        ValueError
            When the name is taken or the size is negative.
        TypeError
            When the size is not an integer.
        """
        if name in self._offsets:
            raise ValueError(f"layout: expected a new name, got {name!r} again")
        size = checks.integer(f"layout: {name}", nbytes, low=0)
        self._offsets[name], self._sizes[name] = self.nbytes, size
        self.nbytes += -(-size // REGION_ALIGNMENT) * REGION_ALIGNMENT

    @property
    def offsets(self) -> Mapping[str, int]:
        """Byte offset of each region."""
        return MappingProxyType(self._offsets)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each region, without what aligns the next one."""
        return MappingProxyType(self._sizes)


class Arena:
    """One allocation that holds the regions of a layout.

    Parameters
    ----------
    gpu : GpuBackend
    layout : Layout
    tag : str
        What the allocation is for; shown in reports.
    """

    def __init__(self, gpu: GpuBackend, layout: Layout, tag: str) -> None:
        self._gpu = gpu
        self._offsets, self._sizes = dict(layout.offsets), dict(layout.sizes)
        self.nbytes = layout.nbytes
        self.base = gpu.alloc(max(layout.nbytes, 1), tag=tag)

    def __getitem__(self, name: str) -> DevicePtr:
        """Return the address of a region. `KeyError` when there is none of that name, InvalidPointer after `free`."""
        if self.base.is_null:
            raise InvalidPointer(f"arena: expected a live arena, got region {name!r} of one that was freed")
        return self.base.offset(self._offsets[name])

    def buffer(
        self, name: str, shape: int | Sequence[int], dtype: Any, *, readonly: bool = False, stream: StreamLike = 0
    ) -> DeviceBuffer:
        """Return a view of a region, from its start; the arguments are those of `gpu_runtime.view`.

        Raises
        ------
        KeyError
            When there is no region of that name.
        InvalidPointer
            When the arena was freed.
        ValueError
            When the region is too small.
        """
        made = view(self._gpu, self[name], shape, dtype, readonly=readonly, stream=stream)
        if made.nbytes > self._sizes[name]:
            raise ValueError(f"arena: {name}: expected at most {self._sizes[name]:,} bytes, got {made.nbytes:,}")
        return made

    def free(self) -> None:
        """Free the allocation; the regions' addresses are dead from here on. Calling it again does nothing.

        Raises BufferError while a region has a live export; the arena stays as it is.
        """
        base, self.base = self.base, DevicePtr.NULL
        try:
            self._gpu.free(base)
        except BufferError:
            self.base = base
            raise


@dataclass(frozen=True, slots=True)
class LogitsArena:
    """Rows of logits, addressed by offset: row ``i`` is ``base.offset(i * row_bytes)``.

    Attributes
    ----------
    base : DevicePtr
        Address of row 0, in memory that somebody else owns.
    rows : int
    vocab : int
        Elements of a row that are logits; the rest, up to ``row_elements``, is padding.
    dtype : str
        Element type.

    Raises
    ------
    ValueError
        When a count is below 1, or there is no such element type.
    """

    base: DevicePtr
    rows: int
    vocab: int
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", DevicePtr(self.base))
        for name in ("rows", "vocab"):
            object.__setattr__(self, name, checks.integer(f"logits: {name}", getattr(self, name), low=1))
        if self.dtype not in dtypes.FLOAT_TYPES:
            raise ValueError(f"logits: dtype: expected one of {dtypes.FLOAT_TYPES}, got {self.dtype!r}")

    @staticmethod
    def padded(vocab: int) -> int:
        """Return the elements of a row, with its padding."""
        return -(-vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def row_elements(self) -> int:
        return self.padded(self.vocab)

    @property
    def row_bytes(self) -> int:
        """Distance between rows in bytes."""
        return self.row_elements * dtypes.itemsize(self.dtype)

    def row(self, index: int) -> DevicePtr:
        """Return the address of a row.

        Raises
        ------
        InvalidPointer
            When the arena has no such row.
        """
        position = checks.integer("logits row", index)
        if not 0 <= position < self.rows:
            raise InvalidPointer(f"logits row: expected an index in [0, {self.rows}), got {position}")
        return self.base.offset(position * self.row_bytes)

    def buffer(
        self, gpu: GpuBackend, index: int, count: int = 1, *, readonly: bool = False, stream: StreamLike = 0
    ) -> DeviceBuffer:
        """Return a view of the logits of ``count`` rows, ``[count, vocab]``; its rows are ``row_bytes`` apart.

        Parameters
        ----------
        gpu : GpuBackend
            Where the rows are.
        index : int
            The first row.
        readonly, stream
            See `gpu_runtime.view`.

        Raises
        ------
        InvalidPointer
            When the arena has no such rows, or they were freed.
        """
        ptr = self.row(index)
        self.index(ptr, count)
        strides = (self.row_bytes, dtypes.itemsize(self.dtype))
        return view(gpu, ptr, (count, self.vocab), self.dtype, strides=strides, readonly=readonly, stream=stream)

    def index(self, ptr: int, count: int = 1) -> int:
        """Return the index of the row at ``ptr``, the first of ``count`` rows.

        Raises
        ------
        InvalidPointer
            When ``ptr`` is not the start of a row, or the rows run past the arena.
        """
        address, rows = checks.address("logits", ptr), checks.integer("logits: count", count)
        index, rest = divmod(address - int(self.base), self.row_bytes)
        if rest or not 0 <= index < self.rows:
            raise InvalidPointer(
                f"logits: expected the address of one of {self.rows} rows of {self.row_bytes} bytes from "
                f"{int(self.base):#x}, got {address:#x}"
            )
        if rows < 1 or index + rows > self.rows:
            raise InvalidPointer(f"logits: expected 1 to {self.rows - index} rows from row {index}, got {rows}")
        return index
