# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a run says on standard error: notes, warnings, and a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from tqdm import tqdm

from metrale.cli.failure import say

BYTES: Final = "B"

_UNKNOWN_SIZE: Final = {"ncols": 79, "nrows": 24}
"""tqdm's options for a terminal that does not say how large it is: a serial line, or a program that reads one."""
_SECONDS_BEFORE_IT_SHOWS: Final = 1.0
"""A run of which nobody knows how long it is shows a bar when it has taken so long."""


class Console:
    """Messages of one run. With a bar, they appear above it.

    Parameters
    ----------
    quiet : bool
        Whether notes and warnings are left out, and the bar.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def close(self) -> None:
        """Leave the bar as it is. Calling it again does nothing."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    @property
    def can_draw(self) -> bool:
        """Whether a bar has a place: standard error is a terminal, and not to be quiet."""
        return not self._quiet and sys.stderr is not None and sys.stderr.isatty()

    def draw(self, total: int | None, done: int, unit: str = " lines") -> None:
        """Show a bar: lines done, of how many if that is known, their rate and the time that is left.

        Parameters
        ----------
        total : int or None
        done : int
            Lines that were done before; they do not count for the rate.
        unit : str
            What is counted, if not lines. Bytes, ``"B"``, are shown in thousands, millions and so on.
        """
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            unit_scale=unit == BYTES,
            file=sys.stderr,
            **_size(),
            miniters=1,  # look at the clock at every line: their times differ too much to skip any
            delay=_SECONDS_BEFORE_IT_SHOWS if total is None else 0,
        )

    def advance(self, count: int = 1) -> None:
        """Count one line, or as many."""
        if self._bar is not None:
            self._bar.update(count)

    def note(self, message: str) -> None:
        """Say something worth knowing."""
        self._say(f"note: {message}")

    def warn(self, message: str) -> None:
        """Say that something is not as it should be."""
        self._say(f"warning: {message}")

    def _say(self, message: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.clear()  # the next line that is counted draws it again
        say(message)


def _size() -> Mapping[str, int | bool]:
    """Return tqdm's options for the size: the terminal's, as it changes, if the terminal has one."""
    with contextlib.suppress(OSError, ValueError):
        if os.get_terminal_size(sys.stderr.fileno()).columns > 0:
            return {"dynamic_ncols": True}
    return _UNKNOWN_SIZE
