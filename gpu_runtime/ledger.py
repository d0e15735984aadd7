# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every live allocation of a backend, with the place in the caller's code that made it."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_runtime.errors import InvalidPointer
from gpu_runtime.pointer import DevicePtr

_PACKAGE = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class Allocation:
    """One live block: ``nbytes`` bytes at ``ptr``, made for ``tag`` at ``site`` (``file:line in function``)."""

    ptr: DevicePtr
    nbytes: int
    tag: str
    site: str

    def __str__(self) -> str:
        label = f" for {self.tag}" if self.tag else ""
        return f"{self.nbytes:,} bytes at {int(self.ptr):#x}{label}, allocated at {self.site}"

    def place(self, address: int) -> str:
        """Return where ``address`` lies: before, in or past this block, and how far."""
        offset = address - int(self.ptr)
        if offset < 0:
            return f"{counted(-offset)} before {self}"
        past = offset - self.nbytes
        if past < 0:
            return f"byte {offset:,} of {self}"
        return f"{counted(past)} past the end of {self}" if past else f"the end of {self}"


def counted(number: int, noun: str = "byte") -> str:
    """Return ``"1 byte"`` or ``"2 bytes"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def call_site() -> str:
    """Return ``file:line in function`` of the nearest caller outside the device layer."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Ledger:
    """The live allocations, found by address. Not locked: its backend serialises access.

    Attributes
    ----------
    live_bytes : int
    removals : int
        Blocks that were removed so far: what was found before is there as long as it stays the same.
    """

    def __init__(self) -> None:
        self._by_base: dict[int, Allocation] = {}
        self._bases: list[int] = []
        self.live_bytes = 0
        self.removals = 0

    def __len__(self) -> int:
        return len(self._bases)

    def __iter__(self) -> Iterator[Allocation]:
        """Iterate over the live allocations, oldest first."""
        return iter(tuple(self._by_base.values()))

    def add(self, ptr: DevicePtr, nbytes: int, tag: str) -> Allocation:
        """Record a new block and return its entry."""
        entry = Allocation(ptr, nbytes, tag, call_site())
        self._by_base[int(ptr)] = entry
        insort(self._bases, int(ptr))
        self.live_bytes += nbytes
        return entry

    def remove(self, ptr: DevicePtr) -> Allocation:
        """Forget the block that starts at ``ptr``.

        Raises
        ------
        InvalidPointer
            When no live block starts there: freed before, never allocated, or inside a block.
        """
        entry = self._by_base.get(int(ptr))
        if entry is None:
            inside = self.find(int(ptr))
            where = f"it lies inside {inside}" if inside else "no live allocation starts there (freed twice?)"
            raise InvalidPointer(f"free: expected the start of a live allocation, got {int(ptr):#x}: {where}")
        del self._by_base[int(ptr)]
        del self._bases[bisect_right(self._bases, int(ptr)) - 1]
        self.live_bytes -= entry.nbytes
        self.removals += 1
        return entry

    def find(self, address: int) -> Allocation | None:
        """Return the live block that contains ``address``, if any."""
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        entry = self._by_base[self._bases[index]]
        return entry if address < int(entry.ptr) + max(entry.nbytes, 1) else None

    def nearest(self, address: int) -> Allocation | None:
        """Return the live block that is nearest to ``address``, if there is any."""
        index = bisect_right(self._bases, address)
        around = [self._by_base[base] for base in self._bases[max(index - 1, 0) : index + 1]]
        return min(
            around, key=lambda one: max(int(one.ptr) - address, address - int(one.ptr) - one.nbytes + 1), default=None
        )

    def largest(self, count: int) -> list[Allocation]:
        """Return the ``count`` largest live blocks, largest first."""
        return sorted(self._by_base.values(), key=lambda entry: entry.nbytes, reverse=True)[:count]
