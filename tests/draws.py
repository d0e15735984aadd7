# SPDX-License-Identifier: MIT OR Apache-2.0
"""Draws of one kind: the first of them belong to every run, the others to one with `--more`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def draws(values: Sequence[Any], always: int) -> list[Any]:
    """Return parameters of a test, of which all from number ``always`` on are marked ``more``.

    For values that are more of the same, as seeds are: what only one of them would find belongs to a test of its own,
    or among the first. A tuple is the values of several parameters.
    """
    if not 0 < always <= len(values):
        raise ValueError(f"draws: always: expected 1 to {len(values)}, got {always}")
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=pytest.mark.more if i >= always else ()) for i, one in enumerate(sets)]


def made(config: pytest.Config, values: Sequence[T], always: int) -> Sequence[T]:
    """Return those of ``values`` that this run makes, as `draws` marks them."""
    return values if config.getoption("more") else values[:always]
