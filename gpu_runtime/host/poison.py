# SPDX-License-Identifier: MIT OR Apache-2.0
"""Patterns that make memory useless: NaN in every float type, and far out of range as an index, a length or an address.

They are two bytes, repeated: 0x7ff* is NaN as float16 and as bfloat16, 0x7ff*7ff* as float32, and about two thousand
million as int32. They differ from each other, so that a debugger shows what a byte was, and none is a NaN that
arithmetic makes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

FRESH: Final = 0x7FFF
"""Memory that was just allocated."""

FREED: Final = 0x7FFE
"""Memory that was freed."""

OUTPUT: Final = 0x7FFD
"""An output before its kernel runs."""

SCRATCH: Final = 0x7FFB
"""A workspace before and after the work that may use it."""

BYTES: Final = (0x7F, 0xFF, 0xFE, 0xFD, 0xFB)
"""The bytes that these patterns are made of."""

SECOND_OUTPUT: Final = 0x3F3F
"""An output before a second run of its kernel: a small number, with which arithmetic goes on."""


def fill(span: Array, pattern: int) -> None:
    """Fill contiguous bytes with ``pattern``. The first is its low byte, wherever the span begins."""
    pairs, rest = _split(span)
    pairs.fill(pattern)
    rest.fill(pattern & 0xFF)


def changed(span: Array, pattern: int) -> Array | None:
    """Return the places in ``span`` that no longer hold what `fill` put there, or None when all do."""
    pairs, rest = _split(span)
    if (pairs == pattern).all() and (rest == pattern & 0xFF).all():
        return None
    expected = np.empty_like(span)
    fill(expected, pattern)
    return np.flatnonzero(span != expected)


def _split(span: Array) -> tuple[Array, Array]:
    even = span.size & ~1
    return span[:even].view("<u2"), span[even:]


def bits(array: Array) -> Array:
    """Return a view of an array's elements as unsigned integers of their size."""
    return array.view(f"<u{array.itemsize}")


def element(pattern: int, itemsize: int) -> int:
    """Return what an element of ``itemsize`` bytes holds, as an unsigned integer, when it is full of ``pattern``."""
    repeated = int.from_bytes(pattern.to_bytes(2, "little") * 4, "little")
    return int(repeated & ((1 << 8 * itemsize) - 1))
