# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checking backend knows of a block: which of its bytes have been written, and whether it was freed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_runtime.ledger import Allocation

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_KNOWN: Final = 4096
"""Spans found written that a block remembers. Past this many it forgets them and looks again."""


class Block:
    """One block, live or freed.

    Attributes
    ----------
    entry : Allocation
    storage : array
        Its bytes with the redzones on either side.
    data : array
        Its bytes.
    host_visible : bool
        Whether the host may write it at any time, unseen: page-locked and managed memory.
    shadow : Shadow
    freed : str or None
        Where it was freed; None while it lives.
    """

    __slots__ = ("data", "entry", "freed", "host_visible", "shadow", "storage")

    def __init__(self, entry: Allocation, storage: Array, data: Array, shadow: Shadow, *, host_visible: bool) -> None:
        self.entry = entry
        self.storage = storage
        self.data = data
        self.host_visible = host_visible
        self.shadow = shadow
        self.freed: str | None = None

    def __str__(self) -> str:
        return str(self.entry) if self.freed is None else f"{self.entry}, freed at {self.freed}"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of one block that a piece of work reads or writes.

    Attributes
    ----------
    what : str
        The call and the parameter that name it, for reports.
    block : Block
    start : int
        First byte, from the block's start.
    shape : tuple of int
        In elements; none is 0.
    itemsize : int
        Of an element, in bytes.
    outer, steps : tuple of int
        Extents, and strides in bytes, of the axes along which the region is not one run of bytes.
    run : int
        Bytes of each run.
    """

    what: str
    block: Block
    start: int
    shape: tuple[int, ...]
    itemsize: int
    outer: tuple[int, ...]
    steps: tuple[int, ...]
    run: int

    @classmethod
    def span(cls, what: str, block: Block, start: int, nbytes: int) -> Region:
        """Return a region of contiguous bytes."""
        return cls(what, block, start, (nbytes,), 1, (), (), nbytes)

    @classmethod
    def of(cls, what: str, block: Block, start: int, array: Array) -> Region:
        """Return the region that a view of a block covers."""
        run = array.itemsize
        axes = [(extent, step) for extent, step in zip(array.shape, array.strides, strict=True) if extent != 1]
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        outer, steps = tuple(extent for extent, _ in axes), tuple(step for _, step in axes)
        return cls(what, block, start, array.shape, array.itemsize, outer, steps, run)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells regions of one block apart."""
        return self.start, self.run, self.outer, self.steps

    @property
    def end(self) -> int:
        """The byte after its last, from the block's start."""
        return self.start + self.run + sum((n - 1) * step for n, step in zip(self.outer, self.steps, strict=True))

    def within(self, per_byte: Array) -> Array:
        """Return the region's part of an array that has an element for each byte of the block."""
        if not self.outer:
            return per_byte[self.start : self.start + self.run]
        return np.ndarray((*self.outer, self.run), per_byte.dtype, per_byte, self.start, (*self.steps, 1))

    def element(self, byte: int) -> str:
        """Return the index of the element that holds a byte of the region, counted without gaps."""
        index = np.unravel_index(byte // self.itemsize, self.shape)
        return f"[{', '.join(str(int(axis)) for axis in index)}]"

    def offset(self, byte: int) -> int:
        """Return where a byte of the region, counted without gaps, lies in the block."""
        places = np.unravel_index(byte, (*self.outer, self.run))
        return self.start + sum(int(place) * step for place, step in zip(places, (*self.steps, 1), strict=True))


class Shadow:
    """Which bytes of a block have never been written. The caller serialises access.

    Parameters
    ----------
    nbytes : int
        Size of the block; 0 when its bytes count as written from the start.
    """

    __slots__ = ("_known", "_rows", "_unwritten")

    def __init__(self, nbytes: int) -> None:
        self._unwritten: Array | None = np.ones(nbytes, dtype=np.bool_) if nbytes else None
        self._known: set[tuple[Any, ...]] = set()
        self._rows: dict[tuple[int, int, int], int] = {}

    def covers(self, region: Region) -> bool:
        """Return whether every byte of ``region`` has been written."""
        if self._unwritten is None or region.key in self._known:
            return True
        if region.within(self._unwritten).any():
            return False
        self._remember(region.key)
        return True

    def unwritten(self, region: Region) -> Array:
        """Return a flag for each byte of ``region``, ``[bytes]``: whether it was never written."""
        if self._unwritten is None:
            return np.zeros(math.prod((*region.outer, region.run)), dtype=np.bool_)
        return region.within(self._unwritten).reshape(-1)

    def write(self, region: Region) -> None:
        """Note that every byte of ``region`` is written."""
        if self._unwritten is None or region.key in self._known:
            return
        if region.run == self._unwritten.size:
            self._unwritten = None
            return
        region.within(self._unwritten)[...] = False
        self._remember(region.key)

    def copy(self, region: Region, source: Shadow, origin: Region) -> None:
        """Note that ``region`` now holds what ``origin`` holds, unwritten bytes included."""
        if source.covers(origin):
            self.write(region)
            return
        self.forget(region, source.unwritten(origin))

    def forget(self, region: Region, unwritten: Array | None = None) -> None:
        """Note that bytes of ``region`` (None: all of them) are as good as never written, and the others written."""
        if self._unwritten is None:
            self._unwritten = np.zeros(region.block.entry.nbytes, dtype=np.bool_)
        here = region.within(self._unwritten)
        here[...] = True if unwritten is None else unwritten.reshape(here.shape)
        self._known.clear()
        self._rows.clear()

    def _remember(self, key: tuple[Any, ...]) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(key)

    def clear(self) -> None:
        """Forget everything: the memory is gone."""
        self._unwritten = None
        self._known.clear()
        self._rows.clear()

    # rows that a table of addresses points at

    def first_unwritten_row(self, start: int, count: int, pitch: int, run: int) -> int | None:
        """Return the first of ``count`` rows of ``run`` bytes that is not written; None when all are.

        Rows found written are remembered: a KV cache grows by a row a step, and is read from its start every time.
        """
        if self._unwritten is None:
            return None
        key = (start, pitch, run)
        known = self._rows.get(key, 0)
        if known >= count:
            return None
        rows = np.ndarray((count - known, run), np.bool_, self._unwritten, start + known * pitch, (pitch, 1))
        if rows.any():
            return known + int(rows.any(axis=1).argmax())
        if len(self._rows) >= _MOST_KNOWN:
            self._rows.clear()
        self._rows[key] = count
        return None

    def write_rows(self, starts: Array, run: int) -> None:
        """Note that ``run`` bytes from each of ``starts`` are written."""
        if self._unwritten is not None:
            size = self._unwritten.size
            windows: Array = np.ndarray((size - run + 1, run), np.bool_, self._unwritten, 0, (1, 1))
            windows[starts] = False
