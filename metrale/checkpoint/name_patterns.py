# SPDX-License-Identifier: MIT OR Apache-2.0
"""Values that a file gives to modules by patterns of their names, which are regular expressions from outside."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from metrale.checkpoint.json_fields import shown

T = TypeVar("T")

MOST_PATTERNS: Final = 4096
"""Each is held against the name of every module."""

MOST_LENGTH: Final = 512
"""Characters of a pattern."""

MOST_NAME: Final = 128
"""Characters of a name that patterns are held against."""

MOST_SECONDS: Final = 2.0
"""Processor time for all names and patterns. Those of one module each, for a thousand modules, take about one."""

MOST_REPEATS: Final = 2
MOST_GROUPS: Final = 2


class NamePatterns(Generic[T]):
    """The first pattern that matches a module's whole name, or all of it after some dot, gives the value.

    A regular expression can take for ever by trying again and again, so those that could are refused: with many repeats
    or groups, with a group that is repeated, or with anything that begins with ``(?`` or looks back.

    Parameters
    ----------
    values : mapping
        Value by pattern, in the order in which they are tried.
    source : str
        The name that starts every problem.
    problems : list of str
        Where problems go.
    """

    def __init__(self, values: Mapping[str, T], source: str, problems: list[str]) -> None:
        self._patterns: list[tuple[re.Pattern[str], T]] = []
        self._source, self._problems = source, problems
        self._left = MOST_SECONDS
        if len(values) > MOST_PATTERNS:
            problems.append(f"{source}: has {len(values)} patterns, and at most {MOST_PATTERNS} are read")
            return
        for pattern, value in values.items():
            why = _why_refused(pattern)
            if why is None:
                try:
                    self._patterns.append((re.compile(rf"(.*\.)?({pattern})$"), value))
                    continue
                except (re.error, OverflowError, RecursionError) as error:
                    why = f"is no regular expression ({error})"
            problems.append(f"{source}: the pattern {shown(pattern)} {why}")

    def value(self, name: str, default: T) -> T:
        """Return the value for a module, or ``default``; no pattern is tried on a name above `MOST_NAME`.

        When all that was tried has taken too long, it adds a problem, once, and tries no more.
        """
        if len(name) > MOST_NAME:
            return default
        end = time.thread_time() + self._left
        for pattern, value in self._patterns:
            if pattern.match(name):
                self._left = end - time.thread_time()
                return value
            if time.thread_time() > end:
                self._problems.append(f"{self._source}: its patterns take too long to be held against all modules")
                self._patterns = []
                break
        self._left = end - time.thread_time()
        return default


def _why_refused(pattern: str) -> str | None:
    """Return what is wrong with a pattern that might take too long, or None."""
    if len(pattern) > MOST_LENGTH:
        return f"has more than {MOST_LENGTH} characters"
    bare = re.sub(r"\\[^0-9]", "x", pattern, flags=re.DOTALL)
    if "\\" in bare or "(?" in bare:
        return "looks back or around, which is not read"
    if re.search(r"\)[*+?{]", bare):
        return "repeats a group, which is not read"
    if len(re.findall(r"[*+?{]", bare)) > MOST_REPEATS or bare.count("(") > MOST_GROUPS:
        return f"has more than {MOST_REPEATS} repeats or {MOST_GROUPS} groups, which are not read"
    return None
