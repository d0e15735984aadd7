# SPDX-License-Identifier: MIT OR Apache-2.0
"""Shapes and strides of arrays in device memory, in bytes, and what they reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gpu_runtime import checks

MOST_AXES = 32
"""Axes that an array may have: what every NumPy can describe."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Shape, strides and element size of an array.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        Bytes from an element to the next one along each axis; may be 0 or negative.
    itemsize : int
        Of an element, in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, shape: Any, strides: Any, itemsize: int) -> Extents:
        """Check what a caller gave; no strides stand for those of a C-contiguous array.

        Raises
        ------
        TypeError
            When an extent or a stride is no integer.
        ValueError
            When an extent is negative, there are too many axes, or the strides are not one an axis.
        """
        extents = tuple(checks.integer("shape", extent, low=0) for extent in _sequence("shape", shape))
        if len(extents) > MOST_AXES:
            raise ValueError(f"shape: expected at most {MOST_AXES} axes, got {len(extents)}")
        if strides is None:
            return cls(extents, contiguous(extents, itemsize), itemsize)
        steps = tuple(checks.integer("strides", stride) for stride in _sequence("strides", strides))
        if len(steps) != len(extents):
            raise ValueError(f"strides: expected {len(extents)} of them, as the shape is {extents}, got {steps}")
        return cls(extents, steps, itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another in C order."""
        usual = contiguous(self.shape, self.itemsize)
        axes = zip(self.shape, self.strides, usual, strict=True)
        return not self.nbytes or all(extent == 1 or stride == step for extent, stride, step in axes)

    def span(self, address: int) -> tuple[int, int]:
        """Return the address and the number of the bytes that an array whose first element is there reaches."""
        if not self.nbytes:
            return address, 0
        reaches = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
        return address + low, high - low + self.itemsize

    def runs(self) -> tuple[list[tuple[int, int]], int, int, int]:
        """Return how a packed copy is made: outer axes, and for each element of them, height, pitch and width in bytes.

        The outer axes are pairs of extent and stride.
        """
        axes, width = list(zip(self.shape, self.strides, strict=True)), self.itemsize
        while axes and (axes[-1][0] == 1 or axes[-1][1] == width):
            width *= axes.pop()[0]
        height, pitch = axes.pop() if axes and axes[-1][1] >= width else (1, width)
        return axes, height, pitch, width


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array in bytes."""
    steps, step = [], itemsize
    for extent in reversed(shape):
        steps.append(step)
        step *= max(extent, 1)
    return tuple(reversed(steps))


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if hasattr(value, "__index__"):
        return (value,)
    try:
        if isinstance(value, str | bytes | bytearray | Set | Mapping):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of integers, got {value!r}") from None
