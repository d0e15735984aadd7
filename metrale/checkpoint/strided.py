# SPDX-License-Identifier: MIT OR Apache-2.0
"""Views of a flat row of elements, as shape, strides and the place of the first element, all counted in elements.

Reading one asks for runs of elements that lie next to each other, so that nothing but what is read is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

MAX_DIMENSIONS: Final = 32
_GAP_BYTES: Final = 1 << 20
"""Elements that are spread over no more than this are read in one go, with what lies between them."""

ReadRun = Callable[[int, NDArray[Any]], None]
"""``read(first, out)`` fills a contiguous array of one axis with the elements from ``first`` on."""


@dataclass(frozen=True, slots=True)
class Strided:
    """One view. Numbers come from outside: `problem` must be None before anything is read.

    Attributes
    ----------
    offset : int
    shape, strides : tuple of int
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Elements, where a dimension of 0 counts as 1: no array of this shape has larger strides."""
        count = 1
        for extent in self.shape:
            count *= max(extent, 1)
        return count

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in C order."""
        return 0 in self.shape or _is_contiguous(self.shape, self.strides)

    def problem(self, elements: int) -> str | None:
        """Return what is wrong with this as a view of so many elements, or None."""
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMENSIONS:
            counts = f"{len(self.shape)} dimensions and {len(self.strides)} strides"
            return f"{counts}, expected equal numbers of {MAX_DIMENSIONS} at most"
        if min((self.offset, *self.shape, *self.strides)) < 0:
            return "a negative offset, dimension or stride"
        if 0 in self.shape:
            return None
        end = self.offset + span(self.shape, self.strides)
        return f"elements up to {end} of a storage of {elements}" if end > elements else None


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how far the elements reach from the first one on, with it; no dimension is 0."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def read(view: Strided, start: int, out: NDArray[Any], run: ReadRun) -> None:
    """Fill ``out``, one contiguous axis, with elements from ``start`` on in C order, by reading runs of the storage."""
    if out.size:
        _read(view.offset, view.shape, view.strides, start, out, run)


def _read(
    first: int, shape: tuple[int, ...], strides: tuple[int, ...], start: int, out: NDArray[Any], run: ReadRun
) -> None:
    """Read part of a row, whole rows, and part of a row; what lies in one row is read as the row's own part."""
    if _is_contiguous(shape, strides):
        run(first + start, out)
        return
    row = math.prod(shape[1:])
    index, skipped = divmod(start, row)
    head = min(row - skipped, len(out)) if skipped else 0
    rows, tail = divmod(len(out) - head, row)
    if head:
        _read(first + index * strides[0], shape[1:], strides[1:], skipped, out[:head], run)
        index += 1
    if rows:
        whole = out[head : head + rows * row].reshape(rows, *shape[1:])
        _fill(whole, first + index * strides[0], strides, run)
        index += rows
    if tail:
        _read(first + index * strides[0], shape[1:], strides[1:], 0, out[len(out) - tail :], run)


def _fill(out: NDArray[Any], first: int, strides: tuple[int, ...], run: ReadRun) -> None:
    """Fill a non-empty array, in halves where its elements are spread too widely."""
    if _is_contiguous(out.shape, strides) and out.flags.c_contiguous:
        run(first, out.reshape(-1))
        return
    reach = span(out.shape, strides)
    if reach * out.itemsize <= max(out.nbytes, _GAP_BYTES):
        between = np.empty(reach, out.dtype)
        run(first, between)
        steps = [stride * out.itemsize if extent > 1 else 0 for extent, stride in zip(out.shape, strides, strict=True)]
        out[...] = as_strided(between, out.shape, steps, writeable=False)
        return
    axis = max(range(out.ndim), key=lambda axis: (out.shape[axis] - 1) * strides[axis])
    half = out.shape[axis] // 2
    before = (slice(None),) * axis
    _fill(out[(*before, slice(None, half))], first, strides, run)
    _fill(out[(*before, slice(half, None))], first + half * strides[axis], strides, run)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements lie one after another; strides of a dimension of 1 are no matter."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
