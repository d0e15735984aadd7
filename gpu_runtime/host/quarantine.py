# SPDX-License-Identifier: MIT OR Apache-2.0
"""Freed blocks, kept from being allocated again for a while, so that a stale address hits nothing else."""

from __future__ import annotations

from collections import deque
from typing import Final

from gpu_runtime.host import poison
from gpu_runtime.host.memory import redzone_damage
from gpu_runtime.host.shadow import Block
from gpu_runtime.ledger import counted

QUARANTINE_BYTES: Final = 64 << 20
"""Most bytes of freed blocks that are kept; the oldest leave first, and a block larger than this is not kept at all."""

_MOST_REMEMBERED: Final = 4096
"""Freed blocks whose call sites are remembered after their memory is gone."""


class Quarantine:
    """Freed blocks, full of a pattern. Not locked: its owner serialises access."""

    def __init__(self) -> None:
        self._kept: deque[Block] = deque()
        self._remembered: deque[Block] = deque(maxlen=_MOST_REMEMBERED)
        self._nbytes = 0

    def add(self, block: Block) -> list[str]:
        """Take in a block that was just freed; return what was found wrong with those that leave for it."""
        self._remembered.append(block)
        size = block.storage.nbytes
        if size <= QUARANTINE_BYTES:
            poison.fill(block.data, poison.FREED)
            self._kept.append(block)
            self._nbytes += size
        else:
            release(block)
        reports = []
        while self._nbytes > QUARANTINE_BYTES:
            reports += self._leave()
        return reports

    def clear(self) -> list[str]:
        """Let every block leave; return what was found wrong with them."""
        reports = []
        while self._kept:
            reports += self._leave()
        return reports

    def find(self, address: int) -> Block | None:
        """Return the block freed last that contains ``address``, if one is remembered."""
        for block in reversed(self._remembered):
            if 0 <= address - int(block.entry.ptr) < block.entry.nbytes:
                return block
        return None

    def _leave(self) -> list[str]:
        block = self._kept.popleft()
        self._nbytes -= block.storage.nbytes
        places, beside = poison.changed(block.data, poison.FREED), redzone_damage(block.storage)
        release(block)
        reports = []
        if places is not None:
            first = int(places[0])
            reports.append(f"{counted(places.size)} written after the free, the first is byte {first:,} of {block}")
        if beside is not None:
            reports.append(f"{beside} {block}")
        return reports


def release(block: Block) -> None:
    """Let go of a block's memory, keeping what is said of it."""
    block.storage = block.data = block.storage[:0].copy()
    block.shadow.clear()
