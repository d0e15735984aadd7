# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of ids, made on the host before any device work."""

from __future__ import annotations

from collections.abc import Sequence

from metrale.checks import integer
from metrale.errors import InvalidInput


def token_id(argument: str, value: object, vocab: int) -> int:
    """Return an id as an int. `InvalidInput` when it is not an integer or not in the vocabulary."""
    return integer(argument, value, 0, vocab - 1, f"an id in [0, {vocab})")


def token_ids(argument: str, values: Sequence[int], vocab: int) -> list[int]:
    """Return ids as a list of ints; an error names the first wrong one as ``argument[i]``."""
    if isinstance(values, (str, bytes)):
        raise InvalidInput(argument, "a sequence of ids", values)
    try:
        items = list(values)
    except TypeError:
        raise InvalidInput(argument, "a sequence of ids", values) from None
    return [
        value if type(value) is int and 0 <= value < vocab else token_id(f"{argument}[{index}]", value, vocab)
        for index, value in enumerate(items)
    ]
