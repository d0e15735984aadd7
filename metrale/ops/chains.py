# SPDX-License-Identifier: MIT OR Apache-2.0
"""How our own kernels cut k, or a row that they normalise, so that all of them sum in one order.

``kernels/common/chains.cuh`` is the order itself.
"""

from __future__ import annotations

from typing import Final

UNIT: Final = 128
"""Columns that chains are counted in."""

MOST_CHAINS: Final = 16
"""Of k."""


def chain_units(k: int) -> int:
    """Return how many units a chain has."""
    return max(1, -(-k // (MOST_CHAINS * UNIT)))


def chains_of(k: int) -> int:
    """Return how many chains k has, the last of them perhaps shorter."""
    return -(-k // (chain_units(k) * UNIT))
