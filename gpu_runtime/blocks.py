# SPDX-License-Identifier: MIT OR Apache-2.0
"""The live blocks of a backend and who was given them: what both kinds of device memory keep in the same way."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpu_runtime.errors import DeviceError, InvalidPointer
from gpu_runtime.ledger import Allocation, Ledger, counted

DLDevice = tuple[int, int]
"""A device as DLPack names it: its type and its number."""


class Orphan(NamedTuple):
    """What was left by a buffer that is gone, for the backend to let go of once no work may use it.

    Attributes
    ----------
    owner : object
        What keeps foreign memory alive; dropped.
    address, nbytes : int
        Foreign memory that the backend was told of; forgotten. None when ``nbytes`` is 0.
    block : Allocation or None
        A block that nobody else will free.
    """

    owner: Any
    address: int = 0
    nbytes: int = 0
    block: Allocation | None = None


class Blocks:
    """Blocks of device memory and page-locked host memory, their exports, and what buffers left behind.

    An export is a use of a block by somebody who does not know this backend: a DLPack consumer, a ``memoryview``. While
    there is one, the block is not freed. Exports end wherever the consumer's last reference goes, which may be inside
    a garbage collection on a thread that holds any lock; so ending one takes no lock.

    Parameters
    ----------
    device, pinned_device : tuple of int
        Where DLPack says that a block of either kind lies.
    """

    def __init__(self, device: DLDevice, pinned_device: DLDevice) -> None:
        self.device = device
        self.pinned_device = pinned_device
        self.ledger = Ledger()
        self.pinned = Ledger()
        self.orphans: deque[Orphan] = deque()
        self.closed = False
        """Whether the backend has ended: nothing that a buffer leaves can be in use any more."""
        self.exports: dict[object, Allocation] = {}
        """The exported block of each live export, by a key that the export removes when it ends."""
        self._lock = threading.RLock()
        self._ending = False

    def find(self, address: int) -> Allocation | None:
        """Return the live block, page-locked memory included, that contains ``address``, if any."""
        with self._lock:
            return self.ledger.find(address) or self.pinned.find(address)

    def is_pinned(self, address: int) -> bool:
        """Return whether ``address`` lies in page-locked memory that has not been given up."""
        with self._lock:
            return self.pinned.find(address) is not None

    def lives(self, block: Allocation) -> bool:
        """Return whether a block that `find` returned has not been freed."""
        return self.find(int(block.ptr)) is block

    # exports

    def export(self, block: Allocation, address: int, nbytes: int, *, writable: bool) -> object:
        """Count a new export of a span of ``block``; return its key in `exports`.

        Raises
        ------
        InvalidPointer
            When the block was freed.
        DeviceError
            When the backend is being closed.
        """
        key = object()
        with self._lock:
            if self._ending:
                raise DeviceError("the backend is closed")
            if not self.lives(block):
                raise InvalidPointer(f"export: expected live memory, got a block that was freed: {block}")
            self.exports[key] = block
        if writable and nbytes:
            self._written_by_others(address, nbytes)
        return key

    def _written_by_others(self, address: int, nbytes: int) -> None:
        """Note that foreign code may write a span at any time from here on."""

    def count_exports(self, blocks: Iterable[Allocation] | None = None) -> int:
        """Return the number of live exports of some blocks, or (None) of all."""
        if not self.exports:
            return 0
        exported = Counter(map(id, tuple(self.exports.values())))
        return exported.total() if blocks is None else sum(exported[id(block)] for block in blocks)

    def exports_at(self, address: int) -> int:
        """Return the number of live exports of the block that contains ``address``, or (0) of all blocks."""
        if not address:
            return self.count_exports()
        block = self.find(address)
        return 0 if block is None else self.count_exports((block,))

    def refuse_exported(self, call: str, blocks: Iterable[Allocation] | None = None) -> None:
        """Raise BufferError when one of some blocks, or (None) any, has a live export."""
        if not self.exports:
            return
        exported = tuple(self.exports.values())
        wanted = None if blocks is None else set(map(id, blocks))
        hindering = [block for block in exported if wanted is None or id(block) in wanted]
        if hindering:
            raise exported_error(call, len(hindering), str(hindering[0]))

    def end(self) -> None:
        """Begin the backend's end: no more exports. BufferError when there is one; then nothing ends."""
        with self._lock:
            self.refuse_exported("close")
            self._ending = True

    def refuse_exported_at(self, call: str, address: int) -> None:
        """Raise BufferError when the block that starts at ``address`` has a live export."""
        if self.exports:
            block = self.find(address)
            if block is not None and int(block.ptr) == address:
                self.refuse_exported(call, (block,))

    # foreign memory

    def adopt(self, address: int, nbytes: int, *, readonly: bool) -> None:
        """Get ready to work on memory of somebody else, at least one byte, that stays until `abandon`.

        Raises
        ------
        InvalidPointer
            When this device cannot reach it.
        """

    def abandon(self, address: int, nbytes: int) -> None:
        """Forget what `adopt` was told."""

    def take_orphans(self) -> list[Orphan]:
        """Return what buffers have left behind, and forget it here."""
        taken: list[Orphan] = []
        while self.orphans:
            try:
                taken.append(self.orphans.popleft())
            except IndexError:  # another thread took it
                break
        return taken


def exported_error(call: str, count: int, what: str) -> BufferError:
    """Return the error of a call that would free memory under ``count`` live exports."""
    return BufferError(
        f"{call}: {counted(count, 'live export')} of {what}: whoever imported it must let go of it first; "
        "nothing was freed"
    )
