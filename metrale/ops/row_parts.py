# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows of logits that several blocks read, and what these leave for each other in device memory.

The blocks of a row write what they found to ``parts``, and the last of them, by ``arrivals``, joins it. Launches that
may run at the same time must not share this memory.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import Arg, Dims, LaunchPlan, tensor

Array = np.ndarray[Any, np.dtype[Any]]

PARTS: Final = 32
"""Most blocks of a row. A launch adds as much to each of ``arrivals``, so that they stay multiples of it."""

ARGS: Final = (
    Arg("parts", "inout", "u32", ("rows", PARTS, 4), align=16, reads_when=False),
    tensor("arrivals", "inout", "u32", "rows"),
)

PARTS_BYTES: Final = PARTS * 4 * 4
"""Bytes of ``parts`` for a row."""
ARRIVALS_BYTES: Final = 4
"""Bytes of ``arrivals`` for a row."""

THREADS: Final = 256

_LEAST_BYTES: Final = THREADS * 64  # of a row for each block: what its threads read at once
_BLOCKS: Final = 8  # for a multiprocessor, at most: two rounds of blocks


def plans(entry: str, dims: Dims, programmatic: bool) -> dict[int, LaunchPlan]:
    """Return every way to launch such a kernel, by the number of blocks of a row. The results have the same bits."""
    counts = [1 << power for power in range(PARTS.bit_length())]
    return {
        count: LaunchPlan(entry, (dims["rows"] * count, 1, 1), (THREADS, 1, 1), programmatic=programmatic)
        for count in counts
    }


def plan(entry: str, dims: Dims, dtype: str, limits: Limits, *, programmatic: bool = False) -> LaunchPlan:
    """Give few rows many blocks each, so that they fill the device."""
    useful = -(-dims["vocab"] * dtypes.itemsize(dtype) // _LEAST_BYTES)
    most = max(min(PARTS, useful, _BLOCKS * limits.sm_count // max(dims["rows"], 1)), 1)
    return plans(entry, dims, programmatic)[1 << (most.bit_length() - 1)]


def found(values: Array, columns: Array) -> Array:
    """Return what kernels find of ``values``, ``[rows, n]``, which are those of some ``columns``: uint32 ``[rows, 4]``.

    Of the first of the largest, NaN counting as minus infinity, the complement of the column, and the value as a number
    that rises with it; both are 0 when none is above minus infinity. Then whether any value is not finite, and 0.
    """
    words = np.zeros((len(values), 4), np.uint32)
    if not columns.size:
        return words
    raw = values.astype(np.float32)
    known = np.fmax(raw, np.float32(-np.inf)) + np.float32(0)
    best = known.argmax(axis=1)
    largest = known[np.arange(len(raw)), best]
    bits = largest.view(np.uint32)
    words[:, 0] = ~columns[best].astype(np.uint32)
    words[:, 1] = bits ^ np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    words[largest == -np.inf, :2] = 0
    words[:, 2] = ~np.isfinite(raw).all(axis=1)
    return words


def arrive(op: str, arrivals: Array) -> None:
    """Do in a reference what all blocks of a launch do to ``arrivals``.

    Raises
    ------
    InvalidPointer
        When one is not a multiple of `PARTS`; on a GPU no block of its row would be the last.
    """
    wrong = arrivals[arrivals % PARTS != 0]
    if wrong.size:
        raise InvalidPointer(f"{op}: arrivals: expected multiples of {PARTS}, got {wrong[0]}")
    arrivals += np.uint32(PARTS)


def make_inputs(rng: np.random.Generator, rows: int) -> dict[str, Array]:
    """Return ``parts`` and ``arrivals`` as many launches may have left them, for tests."""
    return {
        "parts": rng.integers(0, 1 << 32, (rows, PARTS, 4), np.uint32),
        "arrivals": rng.integers(0, 1 << 20, rows).astype(np.uint32) * np.uint32(PARTS),
    }
