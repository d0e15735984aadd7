# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranges that are kept, for tests: which were opened, and inside of which others."""

from __future__ import annotations


class RecordedRanges:
    """`gpu_runtime.ranges.Ranges` of one thread.

    Attributes
    ----------
    paths : list of tuple of str
        Each range that was opened, in order: the labels of those around it, outermost first, and its own.
    opened : list of str
        The labels of those that are open.
    """

    def __init__(self) -> None:
        self.paths: list[tuple[str, ...]] = []
        self.opened: list[str] = []

    def push(self, label: str) -> None:
        self.opened.append(label)
        self.paths.append(tuple(self.opened))

    def pop(self) -> None:
        self.opened.pop()
