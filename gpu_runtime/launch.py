# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checking a launch before it is enqueued: arguments against the op's spec, geometry against the device's limits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from gpu_runtime import dtypes
from gpu_runtime.limits import Limits
from gpu_runtime.op import ELEMENT, Arg, OpSpec

Dim3 = int | tuple[int, ...]


def dim3(name: str, value: Dim3, maximum: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a grid or block as three positive ints.

    Raises
    ------
    ValueError
        When it has more than three axes, or an axis is not in [1, maximum].
    """
    given = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*given, 1, 1, 1)[:3]
    if not 1 <= len(given) <= 3 or not all(1 <= axis <= most for axis, most in zip((x, y, z), maximum, strict=True)):
        raise ValueError(f"{name}: expected one to three axes from 1 to {maximum}, got {value!r}")
    return x, y, z


def check_geometry(
    grid: Dim3, block: Dim3, shared_bytes: int, limits: Limits
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return grid and block as triples when the device allows them.

    Raises
    ------
    ValueError
        When an axis, the number of threads or the shared memory is past a limit.
    """
    blocks = dim3("grid", grid, limits.max_grid)
    most = limits.max_threads_per_block
    threads = dim3("block", block, (most, most, 64))
    if math.prod(threads) > most:
        raise ValueError(f"block: expected at most {most} threads, got {threads}")
    if not 0 <= shared_bytes <= limits.max_shared_bytes:
        raise ValueError(f"shared_mem: expected 0 to {limits.max_shared_bytes} bytes, got {shared_bytes}")
    return blocks, threads


def check_arguments(spec: OpSpec, dtype: str, values: Sequence[Any]) -> list[Any]:
    """Return the arguments as exact Python numbers of the parameters' C types.

    An address may be any integer type; a float is refused where the kernel takes an integer, because truncating it
    silently would hide a fault in the caller.

    Raises
    ------
    TypeError
        When the count is wrong or a value has the wrong kind.
    ValueError
        When a value does not fit its C type, NULL stands where it may not, or an address is misaligned.
    """
    if len(values) != len(spec.args):
        names = ", ".join(arg.name for arg in spec.args)
        raise TypeError(f"{spec.name}: expected {len(spec.args)} arguments ({names}), got {len(values)}")
    return [
        _check_pointer(spec, arg, dtype, value) if arg.is_pointer else _check_scalar(spec, arg, value)
        for arg, value in zip(spec.args, values, strict=True)
    ]


def _integer(spec: OpSpec, arg: Arg, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{spec.name}: {arg.name}: expected an integer, got {value!r}") from None


def _check_pointer(spec: OpSpec, arg: Arg, dtype: str, value: Any) -> int:
    address = _integer(spec, arg, value)
    low, high = dtypes.INTEGER_RANGE["u64"]
    if not low <= address <= high:
        raise ValueError(f"{spec.name}: {arg.name}: expected an address in [0, 2**64), got {address:#x}")
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
        try:
            return float(value)
        except TypeError:
            raise TypeError(f"{spec.name}: {arg.name}: expected a number, got {value!r}") from None
    number = _integer(spec, arg, value)
    low, high = dtypes.INTEGER_RANGE[arg.dtype]
    if not low <= number <= high:
        raise ValueError(f"{spec.name}: {arg.name}: expected a value in [{low}, {high}], got {number}")
    return number
