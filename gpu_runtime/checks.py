# SPDX-License-Identifier: MIT OR Apache-2.0
"""Turning what a caller passed into an exact Python number, or refusing it by name.

NumPy integers become ``int`` here, because their arithmetic wraps: ``rows * row_bytes`` of an ``int32`` may come out
as a small number that lies inside a block.
"""

from __future__ import annotations

import operator
import struct
from typing import Any, Final

import numpy as np

from gpu_runtime.errors import told

ADDRESS_LIMIT: Final = 1 << 64


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as an ``int`` from ``low`` to ``high``, either of which may be open.

    Raises
    ------
    TypeError
        When it is not an integer. A bool is not: as an address or a size it is a slip.
    ValueError
        When it is out of range.
    """
    number = value if type(value) is int else _index(name, value)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}" if low is not None else f"at most {high}"
        raise ValueError(f"{name}: expected {bounds}, got {told(number)}")
    return number


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected an integer, got {told(value)}")
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {told(value)}") from None


def address(name: str, value: Any) -> int:
    """Return ``value`` as an unsigned 64-bit address. Raises as `integer` does."""
    number = integer(name, value)
    if not 0 <= number < ADDRESS_LIMIT:
        raise ValueError(f"{name}: expected an address in [0, 2**64), got {number:#x}")
    return number


_NUMBERS: Final = (int, float, np.integer, np.floating)


def repeats(value: Any) -> bool:
    """Return whether a value that is equal to this one, and of the same type, always means the same.

    Numbers do, except that 0.0 equals -0.0. Other objects may stand for one number now and for another one later.
    """
    return isinstance(value, _NUMBERS) and not (value == 0 and isinstance(value, float | np.floating))


def float32(name: str, value: Any) -> float:
    """Return ``value`` rounded to float32, as the device will see it. Infinities and NaN stay what they are.

    Raises
    ------
    TypeError
        When it is not a real number. A bool or a string is not.
    ValueError
        When it is finite and float32 cannot hold it.
    """
    if isinstance(value, bool | np.bool_) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name}: expected a number, got {told(value)}")
    try:
        # "<f", not "f": only the standard format refuses what overflows
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except TypeError:
        raise TypeError(f"{name}: expected a number, got {told(value)}") from None
    except OverflowError:
        raise ValueError(f"{name}: expected a number that float32 can hold, got {told(value)}") from None
