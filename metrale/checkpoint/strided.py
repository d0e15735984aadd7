# SPDX-License-Identifier: MIT OR Apache-2.0
"""Views of a flat row of elements, as shape, strides and the place of the first element, all counted in elements.

Reading one asks for runs of elements that lie next to each other, so that nothing but what is read is in memory.
"""

from __future__ import annotations

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


def read_rows(view: Strided, start: int, stop: int, dtype: np.dtype[Any], read: ReadRun) -> NDArray[Any]:
    """Return a new contiguous array of rows ``[start, stop)``; a scalar is one row, of shape ``()``."""
    if not view.shape:
        out = np.empty((), dtype)
        read(view.offset, out.reshape(1))
        return out
    out = np.empty((stop - start, *view.shape[1:]), dtype)
    if out.size:
        _fill(out, view.offset + start * view.strides[0], view.strides, read)
    return out


def _fill(out: NDArray[Any], first: int, strides: tuple[int, ...], read: ReadRun) -> None:
    """Fill a non-empty array, in halves where its elements are spread too widely."""
    if _is_contiguous(out.shape, strides) and out.flags.c_contiguous:
        read(first, out.reshape(-1))
        return
    reach = span(out.shape, strides)
    if reach * out.itemsize <= max(out.nbytes, _GAP_BYTES):
        run = np.empty(reach, out.dtype)
        read(first, run)
        steps = [stride * out.itemsize if extent > 1 else 0 for extent, stride in zip(out.shape, strides, strict=True)]
        out[...] = as_strided(run, out.shape, steps, writeable=False)
        return
    axis = max(range(out.ndim), key=lambda axis: (out.shape[axis] - 1) * strides[axis])
    half = out.shape[axis] // 2
    before = (slice(None),) * axis
    _fill(out[(*before, slice(None, half))], first, strides, read)
    _fill(out[(*before, slice(half, None))], first + half * strides[axis], strides, read)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements lie one after another; strides of a dimension of 1 are no matter."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
