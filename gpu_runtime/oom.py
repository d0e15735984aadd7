# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is said when memory runs out: what was asked, what is live, and who holds the most of it."""

from __future__ import annotations

from typing import Final

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.ledger import Ledger

_HOLDERS_SHOWN: Final = 5


def out_of_memory(ledger: Ledger, nbytes: int, tag: str, limit: int, reason: str = "") -> OutOfMemory:
    """Return the error for ``nbytes`` bytes that do not fit beside the live blocks of ``ledger``."""
    holders = "".join(f"\n  {entry}" for entry in ledger.largest(_HOLDERS_SHOWN))
    return OutOfMemory(
        f"alloc: {nbytes:,} bytes{f' for {tag}' if tag else ''} do not fit: "
        f"{ledger.live_bytes:,} of {limit:,} bytes are live in {len(ledger)} blocks"
        + (f" ({reason})" if reason else "")
        + (f"; the largest:{holders}" if holders else ""),
        requested=nbytes,
        live=ledger.live_bytes,
        limit=limit,
    )
