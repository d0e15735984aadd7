# SPDX-License-Identifier: MIT OR Apache-2.0
"""The names of what `beam_select` reads and writes: columns, bits, and the rows of the pool."""

from __future__ import annotations

from typing import Final

GROUP_COLUMNS: Final = ("row", "member", "beams", "k", "fresh", "length", "mode", "eos")
"""Columns of ``counts``: the group's first candidate row; the place of its first beam in ``members``; its beams;
candidates that are kept, at least as many; 1 at the first step, else 0; ids in its history, which is the place of the
new one; bits, as below; the slot whose plane 1 of ``bans`` has the EOS ids."""

GROUP_SETTINGS: Final = ("norm", "bound_norm")
"""Columns of ``settings``: what the score of a hypothesis that ends here is divided by, and the best running score."""

AT_LIMIT: Final = 1
"""Mode: the new id is the last that may be; every candidate is finished."""
EARLY: Final = 2
"""Mode: early stopping, which is done as soon as the pool is full."""

DONE: Final = 1
"""State: nothing changes any more."""
NOT_FINITE: Final = 2
"""State: done, because a candidate row was flagged; the step was not made."""
NO_CHOICE: Final = 4
"""State: done with an empty pool."""
STOPPED: Final = 8
"""State: no running beam can better the pool."""

MAX_BEAMS: Final = 64
"""Most beams of a group."""
MAX_KEPT: Final = 256
"""Most candidates that a group keeps."""

ORDER: Final = 0
"""Column of a pool row: in member i's, the member whose row has the i-th best hypothesis, -1 for none."""
SCORE: Final = 1
"""Column of a pool row: the bits of the hypothesis' score."""
LENGTH: Final = 2
"""Column of a pool row: the hypothesis' ids."""
IDS: Final = 3
"""First column of a pool row with ids; behind them, the bits of as many log-probabilities."""


def pool_width(capacity: int) -> int:
    """Return the columns of a pool row for histories of at most ``capacity`` ids."""
    return IDS + 2 * capacity
