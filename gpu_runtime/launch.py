# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checking a launch before it is enqueued: arguments against the op's spec, geometry against the device's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpu_runtime import checks, dtypes
from gpu_runtime.limits import Limits
from gpu_runtime.op import ELEMENT, Arg, Dims, OpSpec

Dim3 = int | tuple[int, ...]


def dim3(name: str, value: Dim3, maximum: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a grid or block as three positive ints.

    Raises
    ------
    TypeError
        When it is neither an integer nor a tuple or list of integers.
    ValueError
        When it has more than three axes, or an axis is not in [1, maximum].
    """
    axes = value if isinstance(value, tuple | list) else (value,)
    given = [checks.integer(name, axis) for axis in axes]
    x, y, z = (*given, 1, 1, 1)[:3]
    if not 1 <= len(given) <= 3 or not all(1 <= axis <= most for axis, most in zip((x, y, z), maximum, strict=True)):
        raise ValueError(f"{name}: expected one to three axes from 1 to {maximum}, got {value!r}")
    return x, y, z


def check_geometry(
    grid: Dim3, block: Dim3, shared_bytes: int, limits: Limits, cluster: int = 1
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return grid and block as triples when the device allows them.

    Raises
    ------
    ValueError
        When an axis, the number of threads, the shared memory or the cluster is past a limit, when the cluster is no
        power of two, or the grid is not whole clusters.
    """
    blocks = dim3("grid", grid, limits.max_grid)
    most = limits.max_threads_per_block
    threads = dim3("block", block, (most, most, 64))
    if math.prod(threads) > most:
        raise ValueError(f"block: expected at most {most} threads, got {threads}")
    checks.integer("shared_mem", shared_bytes, 0, limits.max_shared_bytes)
    if checks.integer("cluster", cluster, 1, limits.max_cluster).bit_count() != 1:
        raise ValueError(f"cluster: expected a power of two, got {cluster}")
    if blocks[0] % cluster:
        raise ValueError(f"grid: expected whole clusters of {cluster} blocks along x, got {blocks}")
    return blocks, threads


def check_arguments(spec: OpSpec, dtype: str, values: Sequence[Any]) -> list[Any]:
    """Return the arguments as exact Python numbers of the parameters' C types.

    An address may be any integer type; a float is refused where the kernel takes an integer, because truncating it
    silently would hide a fault in the caller.

    Raises
    ------
    TypeError
        When the count is wrong or a value has the wrong kind; a bool is neither an address nor a number.
    ValueError
        When a value does not fit its C type, NULL stands where it may not, an address is misaligned, an extent is
        negative, or rows that are written overlap.
    """
    dims = spec.dims(values)
    checked = [
        _check_pointer(spec, arg, dtype, value) if arg.is_pointer else _check_scalar(spec, arg, value)
        for arg, value in zip(spec.args, values, strict=True)
    ]
    for arg, value in zip(spec.args, checked, strict=True):
        if arg.is_pointer and value:
            _check_extents(spec, arg, dims)
    return checked


def _check_extents(spec: OpSpec, arg: Arg, dims: Dims) -> None:
    sizes = arg.sizes(dims)
    if min(sizes, default=0) < 0:
        raise ValueError(f"{spec.name}: {arg.name}: expected extents of at least 0, got {sizes}")
    if arg.row_stride is not None:
        least = 0 if arg.role == "in" else math.prod(sizes[1:])  # an input row may be read again and again
        checks.integer(f"{spec.name}: {arg.row_stride}", dims[arg.row_stride], low=least)


def _check_pointer(spec: OpSpec, arg: Arg, dtype: str, value: Any) -> int:
    address = checks.address(f"{spec.name}: {arg.name}", value)
    if address == 0:
        if not arg.optional:
            raise ValueError(f"{spec.name}: {arg.name}: expected a device address, got NULL")
        return 0
    align = arg.align or dtypes.itemsize(dtype if arg.dtype == ELEMENT else arg.dtype)
    if address % align:
        raise ValueError(f"{spec.name}: {arg.name}: expected an address aligned to {align} bytes, got {address:#x}")
    return address


def _check_scalar(spec: OpSpec, arg: Arg, value: Any) -> int | float:
    if arg.dtype == "f32":
        return checks.float32(f"{spec.name}: {arg.name}", value)
    return checks.integer(f"{spec.name}: {arg.name}", value, *dtypes.INTEGER_RANGE[arg.dtype])
