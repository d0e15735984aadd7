# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether the parameters of a launch or a product share memory that they must not share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.op import ELEMENT, Arg, Dims, OpSpec

Array = np.ndarray[Any, np.dtype[Any]]


class _Extent:
    """Stands for an array at an address; its memory is never touched."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> None:
        kind = np.dtype(f"V{dtypes.itemsize(dtype)}")
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": kind.str,
            "data": (address, True),
            "strides": tuple(
                stride * kind.itemsize if length > 1 else 0 for length, stride in zip(shape, strides, strict=True)
            ),
        }


def extent(address: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> Array:
    """Return an array that says which bytes are meant, of memory that this process may not be able to read.

    ``strides`` are elements, at least 0. Nothing but `share_memory` may be done with it.

    Raises
    ------
    ValueError
        When it does not end within 63 bits of address, as every allocation does.
    """
    reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True) if length > 1)
    if address + (reach + 1) * dtypes.itemsize(dtype) >= 1 << 63:
        raise ValueError(
            f"expected an array that ends within the address space, got {shape} at {address:#x}, {strides}"
        )
    return np.asarray(_Extent(address, shape, dtype, strides))


def argument_extent(arg: Arg, dtype: str, address: int, dims: Dims) -> Array:
    """Return the `extent` of one pointer parameter of a launch."""
    shape = arg.sizes(dims)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if arg.row_stride is not None:
        strides[0] = dims[arg.row_stride]
    return extent(address, shape, dtype if arg.dtype == ELEMENT else arg.dtype, tuple(strides))


def share_memory(first: Array, second: Array) -> bool:
    """Return whether two arrays have a byte in common; True as well when that is too hard to tell."""
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]  # any count will do
    except np.exceptions.TooHardError:
        return True


def refuse_overlap(spec: OpSpec, values: Sequence[Any], arrays: Mapping[str, Any]) -> None:
    """Refuse an output over the memory of another parameter, unless the spec names the two as aliases.

    Parameters
    ----------
    spec : OpSpec
    values : sequence
        The launch's checked arguments.
    arrays : mapping of str to array
        For each pointer that is not NULL, an array over its memory, or its `extent`.

    Raises
    ------
    ValueError
        Naming the two parameters and their addresses.
    """
    pointers = [(arg, at) for arg, at in zip(spec.args, values, strict=True) if arg.is_pointer and at]
    for arg, address in pointers:
        if arg.role == "in":
            continue
        for other, at in pointers:
            if other is arg or not share_memory(arrays[arg.name], arrays[other.name]):
                continue
            pairs = (arg.name, other.name), (other.name, arg.name)
            if address != at or not any(pair in spec.aliases for pair in pairs):
                raise ValueError(
                    f"{spec.name}: {arg.name}: expected memory apart from {other.name}, got {address:#x} and {at:#x}"
                )
