# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of what callers pass, whose errors name the argument, what was expected and what came."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from gpu_runtime import checks
from metrale.errors import InvalidInput, told

T = TypeVar("T")


def integer(argument: str, value: object, low: int, high: int | None = None, expected: str = "") -> int:
    """Return an integer from ``low`` to ``high`` (open when None) as an int; NumPy's integers are fine.

    Raises
    ------
    InvalidInput
        When it is not an integer (a bool or a float is none), or out of range. ``expected`` says what may come, if the
        range alone does not.
    """
    try:
        return checks.integer(argument, value, low, high)
    except (TypeError, ValueError):
        span = f"at least {low:,}" if high is None else f"{low:,} to {high:,}"
        raise InvalidInput(argument, expected or f"an int of {span}", told(value)) from None


def real(argument: str, value: object, low: float, high: float, expected: str) -> float:
    """Return a finite number from ``low`` to ``high`` as a float.

    Raises
    ------
    InvalidInput
        When it is no real number (a bool is none), not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInput(argument, expected, told(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidInput(argument, expected, told(value))
    return number


def flag(argument: str, value: object) -> bool:
    """Return a bool, Python's or NumPy's, as Python's.

    Raises
    ------
    InvalidInput
        When it is something else: of "false" or an array it cannot be known what is meant.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidInput(argument, "True or False", told(value))
    return bool(value)


def listed(argument: str, values: object, expected: str) -> list[Any]:
    """Return the items of any iterable but text as a list.

    Raises
    ------
    InvalidInput
        When it is none.
    """
    if not isinstance(values, str | bytes) and isinstance(values, Iterable):
        try:
            return list(values)
        except TypeError:  # an array without an axis says that it is iterable
            pass
    raise InvalidInput(argument, expected, told(values))


def kept(values: T) -> T | tuple[Any, ...]:
    """Return the items of an iterator, which gives them once, as a tuple; everything else as it is."""
    return tuple(values) if isinstance(values, Iterator) else values
