# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory that finds faults: what a GPU would let pass, and what it would answer with another program's crash.

Fresh and freed memory is full of NaN, freed blocks wait in quarantine, and a shadow says for each byte whether it was
ever written. Enqueued work runs one piece at a time and remembers the place that enqueued it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_runtime.errors import GuardViolation, InvalidPointer, UninitializedRead
from gpu_runtime.faults import Fault
from gpu_runtime.host import poison
from gpu_runtime.host.foreign import ForeignSpan
from gpu_runtime.host.memory import REDZONE_BYTES, HostMemory, Span, redzone_damage
from gpu_runtime.host.quarantine import Quarantine
from gpu_runtime.host.shadow import Block, Region, Shadow
from gpu_runtime.host.streams import Work
from gpu_runtime.ledger import Allocation, Ledger, call_site, counted
from gpu_runtime.oom import out_of_memory
from gpu_runtime.pointer import DevicePtr

Array = np.ndarray[Any, np.dtype[Any]]


class _Sites(threading.local):
    """Where the work that this thread runs was enqueued: outermost first, as a graph's launch encloses its nodes."""

    def __init__(self) -> None:
        self.stack: list[str] = []


class CheckedMemory(HostMemory):
    """`HostMemory` that knows what was written, what was freed, and who did it.

    Parameters
    ----------
    limit : int or None
        Most bytes that may be live; None takes the machine's memory. What is in quarantine does not count.
    faults : sequence of Fault
        Asked before every allocation of device memory.
    """

    def __init__(self, limit: int | None = None, faults: Sequence[Fault] = ()) -> None:
        super().__init__(limit, faults)
        self._work = threading.RLock()  # taken before the memory's own lock
        self._sites = _Sites()
        self._blocks: dict[int, Block] = {}
        self._foreign_blocks: dict[int, Block] = {}
        self._quarantine = Quarantine()
        self._damage: list[str] = []

    # places

    def site(self) -> str:
        stack = self._sites.stack
        if not stack:
            return call_site()
        return ", replayed at ".join(reversed(stack))

    def sited(self, work: Work) -> Work:
        """Return ``work``, made to remember the place that enqueues it, and to run while no other work does."""
        site = call_site()

        def run() -> None:
            with self._work:
                self._sites.stack.append(site)
                try:
                    work()
                finally:
                    self._sites.stack.pop()

        return run

    def block_at(self, address: int) -> Block:
        """Return the live block that contains ``address``. InvalidPointer when none does."""
        with self._lock:
            entry = self._holder(address)
            return self._blocks.get(int(entry.ptr)) or self._foreign_blocks[id(entry)]

    def require_live(self, what: str, block: Block) -> None:
        """Refuse a block that was freed after the work that uses it was enqueued."""
        if block.freed is not None:
            raise InvalidPointer(f"{what}: use after free of {block}; used at {self.site()}")

    def whereabouts(self, address: int) -> str:
        with self._lock:
            block = self._quarantine.find(address)
        if block is None:
            return super().whereabouts(address)
        return f"use after free of byte {address - int(block.entry.ptr):,} of {block}"

    # blocks

    def _new_block(self, ledger: Ledger, nbytes: int, tag: str, *, host_visible: bool) -> DevicePtr:
        pinned = ledger is self.pinned  # comes as zeros, and its owner writes it as an array
        try:
            shadow = Shadow(0 if pinned else nbytes)
        except (MemoryError, ValueError, OverflowError):
            raise out_of_memory(self.ledger, nbytes, tag, self.total) from None
        ptr = super()._new_block(ledger, nbytes, tag, host_visible=host_visible)
        entry = ledger.find(int(ptr))
        assert entry is not None
        storage = self._storage[int(ptr)]
        data = storage[REDZONE_BYTES : REDZONE_BYTES + nbytes]
        if not pinned:
            poison.fill(data, poison.FRESH)
        self._blocks[int(ptr)] = Block(entry, storage, data, shadow, host_visible=host_visible)
        return ptr

    def _release(self, ledger: Ledger, ptr: DevicePtr) -> None:
        with self._work, self._lock:
            try:
                super()._release(ledger, ptr)
            except InvalidPointer as error:
                raise InvalidPointer(self._wrong_free(int(ptr), error)) from None
            block = self._blocks.pop(int(ptr))
            block.freed = call_site()
            found = redzone_damage(block.storage)
            if found is not None:
                self._damage.append(f"{found} {block}")
                self._fill_redzones(block.storage)  # what is damaged from here on is another fault
            self._damage += self._quarantine.add(block)

    def _written_by_others(self, address: int, nbytes: int) -> None:
        with self._work:
            block = self.block_at(address)
            block.shadow.write(Region.span("export", block, address - int(block.entry.ptr), nbytes))
            block.host_visible = True

    def _adopted(self, span: ForeignSpan) -> None:
        block = Block(span.entry, span.data, span.data, Shadow(0), host_visible=True)
        self._foreign_blocks[id(span.entry)] = block

    def _abandoned(self, span: ForeignSpan) -> None:
        self._foreign_blocks.pop(id(span.entry)).freed = call_site()

    def sweep(self) -> list[Allocation]:
        with self._work:  # before the memory's own lock, as everywhere: work that runs now may wait for that one
            return super().sweep()

    def _wrong_free(self, address: int, error: InvalidPointer) -> str:
        block = self._quarantine.find(address)
        if block is None or self.ledger.find(address) or self.pinned.find(address):
            where = "" if self.ledger.find(address) else f"; {super().whereabouts(address)}"
            return f"{error}{where}; freed at {call_site()}"
        if int(block.entry.ptr) == address:
            return f"free: freed twice: {block}, and again at {call_site()}"
        return f"free: {address:#x} lies inside a block that was freed already: {block}; freed at {call_site()}"

    def poison_redzones(self) -> None:
        with self._work:
            super().poison_redzones()

    def finish(self) -> None:
        with self._work, self._lock:
            self._damage += self._quarantine.clear()

    def report(self, call: str) -> None:
        with self._lock:
            damage, self._damage = self._damage, []
        if damage:
            raise GuardViolation("\n".join(f"{call}: {one}" for one in damage))

    # reading and writing

    def span(self, what: str, address: int, nbytes: int) -> Span:
        found = super().span(what, address, nbytes)
        return found._replace(block=self.block_at(address)) if nbytes else found

    def region(self, span: Span) -> Region:
        """Return the region of a span that is not empty."""
        assert span.block is not None
        self.require_live(span.what, span.block)
        return Region.span(span.what, span.block, span.address - int(span.block.entry.ptr), span.nbytes)

    def rows(self, span: Span, pitch: int, shape: tuple[int, int]) -> Region:
        """Return the region of ``shape[0]`` rows of ``shape[1]`` bytes that begin a pitch apart."""
        first = self.region(span)
        return Region.of(span.what, first.block, first.start, self.view(span.address, shape, "u8", pitch))

    def read(self, span: Span) -> Array:
        region = self.region(span)
        self.require_written(region)
        return region.within(region.block.data)

    def write(self, span: Span) -> Array:
        region = self.region(span)
        region.block.shadow.write(region)
        return region.within(region.block.data)

    def copy_rows(self, src: Span, src_pitch: int, dst: Span, dst_pitch: int, shape: tuple[int, int]) -> None:
        """Copy rows. Bytes that were never written are copied as such: only who uses them is at fault."""
        origin, target = self.rows(src, src_pitch, shape), self.rows(dst, dst_pitch, shape)
        np.copyto(target.within(target.block.data).reshape(shape), origin.within(origin.block.data).reshape(shape))
        target.block.shadow.copy(target, origin.block.shadow, origin)

    def mark(self, span: Span) -> None:
        if span.nbytes:
            with self._work:
                region = self.region(span)
                region.block.shadow.write(region)

    def require_written(self, region: Region) -> None:
        """Refuse to read a region of which something was never written."""
        if region.block.shadow.covers(region):
            return
        flags = region.block.shadow.unwritten(region)
        first, count = int(flags.argmax()), int(np.count_nonzero(flags))
        entry = region.block.entry
        content = region.within(region.block.data).reshape(-1)[flags]
        foreign = int(np.isin(content, poison.BYTES, invert=True).sum())
        raise UninitializedRead(
            f"{region.what}: never written: {count:,} of {counted(flags.size)}, the first in element "
            f"{region.element(first)}, {entry.place(int(entry.ptr) + region.offset(first))}; read at {self.site()}"
            + (f" (yet {counted(foreign)} changed: who writes by address calls mark_written)" if foreign else "")
        )
