# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of what callers pass, made on the host before any device work."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from metrale.errors import InvalidInput


def token_id(argument: str, value: object, vocab: int) -> int:
    """Return an id as an int.

    Raises
    ------
    InvalidInput
        When it is not an integer (a bool or a float is none), or not in the vocabulary.
    """
    expected = f"an id in [0, {vocab})"
    if isinstance(value, bool):
        raise InvalidInput(argument, expected, value)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no integer is refused right here
    except TypeError:
        raise InvalidInput(argument, expected, value) from None
    if not 0 <= number < vocab:
        raise InvalidInput(argument, expected, number)
    return number


def token_ids(argument: str, values: Sequence[int], vocab: int) -> list[int]:
    """Return ids as a list of ints; an error names the first wrong one as ``argument[i]``."""
    if isinstance(values, (str, bytes)):
        raise InvalidInput(argument, "a sequence of ids", values)
    try:
        items = list(values)
    except TypeError:
        raise InvalidInput(argument, "a sequence of ids", values) from None
    return [token_id(f"{argument}[{index}]", value, vocab) for index, value in enumerate(items)]
