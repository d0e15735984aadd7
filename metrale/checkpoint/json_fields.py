# SPDX-License-Identifier: MIT OR Apache-2.0
"""Typed fields out of a JSON object, with every fault collected before one error is raised."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeGuard

_ABSENT = object()


class FieldReader:
    """Reads fields from a JSON object and notes every one that is not what it should be.

    A field that is absent takes its default. A faulty one adds a sentence to ``problems`` and takes its default too,
    so that reading goes on and the caller can report all faults at once. ``true`` is not an integer, and ``null`` is
    a fault unless the method says otherwise.

    Parameters
    ----------
    fields : mapping
        The object.
    source : str
        The name that starts every problem, usually the file's.
    problems : list of str
        Where problems go.
    """

    def __init__(self, fields: Mapping[str, object], source: str, problems: list[str]) -> None:
        self._fields = fields
        self._source = source
        self.problems = problems

    def problem(self, key: str, expected: str, got: object) -> None:
        """Note that ``key`` should have been ``expected``, and what came."""
        self.problems.append(f"{self._source}: {key}: expected {expected}, got {shown(got)}")

    def integer(self, key: str, default: int, low: int, high: int, *, alias: str | None = None) -> int:
        """Read an integer in ``[low, high]``. ``alias`` is another key for the same value; of both, it wins."""
        if alias is not None and alias in self._fields:
            key = alias
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        if _is_int(value) and low <= value <= high:
            return value
        self.problem(key, f"an integer from {low} to {high}", value)
        return default

    def optional_integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        """Read an integer in ``[low, high]``, or ``null``, which gives None."""
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        if value is None or (_is_int(value) and low <= value <= high):
            return value
        self.problem(key, f"an integer from {low} to {high}, or null", value)
        return default

    def integers(self, key: str, default: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
        """Read one integer, or an array of at least one, all in ``[low, high]``."""
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        found = value if isinstance(value, list) else [value]
        if found and all(_is_int(item) and low <= item <= high for item in found):
            return tuple(found)
        self.problem(key, f"an integer from {low} to {high}, or an array of them", value)
        return default

    def integer_lists(self, key: str, low: int, high: int) -> tuple[tuple[int, ...], ...]:
        """Read an array of non-empty arrays of integers in ``[low, high]``; absent gives none."""
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return ()
        if isinstance(value, list) and all(
            isinstance(row, list) and row and all(_is_int(item) and low <= item <= high for item in row)
            for row in value
        ):
            return tuple(tuple(row) for row in value)
        self.problem(key, f"an array of non-empty arrays of integers from {low} to {high}", value)
        return ()

    def boolean(self, key: str, default: bool, *, also: str = "") -> bool:
        """Read ``true`` or ``false``. ``also`` is what else the caller takes, for the message."""
        value = self._fields.get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, "true or false" + (f" or {also}" if also else ""), value)
        return default

    def number(self, key: str, default: float, *, above: float = -math.inf) -> float:
        """Read a finite number greater than ``above``."""
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and number > above:
                return number
        self.problem(key, "a finite number" + (f" above {above:g}" if math.isfinite(above) else ""), value)
        return default

    def choice(self, key: str, default: str, choices: Mapping[str, str]) -> str:
        """Read one of the names that ``choices`` has, and return what it maps to."""
        value = self._fields.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        if isinstance(value, str) and value in choices:
            return choices[value]
        self.problem(key, f"one of {', '.join(choices)}", value)
        return default


def shown(value: object) -> str:
    """Return a JSON value as text for a message: escaped, and cut when long."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:  # read with just as many levels left as it has
        text = f"a deeply nested {'object' if isinstance(value, dict) else 'array'}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
