# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where lines go that no later run can go on with: standard output, and files without a record."""

from __future__ import annotations

from typing import Protocol

from metrale.cli.output import write_lines
from metrale.cli.output_file import OutputFile


class Sink(Protocol):
    """Takes lines in order; each is out when `write` returns. `metrale.cli.journal.Journal` is one."""

    @property
    def lines(self) -> int:
        """Lines in the output, those of an earlier run included."""

    @property
    def failed(self) -> int:
        """How many of them were not translated."""

    @property
    def resumable(self) -> bool:
        """Whether ``--resume`` can go on with it."""

    @property
    def dropped(self) -> int:
        """Whole lines of an earlier run that were dropped, because nothing confirms them."""

    def write(self, text: str, line: str, *, failed: bool) -> None:
        """Write the line that ``text`` came to. OSError when it cannot be written; it is not there then."""

    def complete(self) -> None:
        """Say that the output is whole."""

    def close(self) -> None:
        """Bring all lines to where they stay, and close."""


class StandardOutput:
    """Standard output, which stays open."""

    resumable = False
    dropped = 0

    def __init__(self) -> None:
        self.lines = 0
        self.failed = 0

    def write(self, text: str, line: str, *, failed: bool) -> None:
        write_lines([line])
        self.lines += 1
        self.failed += failed

    def complete(self) -> None:
        """Nothing is left to be done."""

    def close(self) -> None:
        """Nothing is left to be done."""


class PlainFile:
    """A file without a record."""

    resumable = False
    dropped = 0

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self.lines = 0
        self.failed = 0

    def write(self, text: str, line: str, *, failed: bool) -> None:
        self._file.append(f"{line}\n".encode("utf-8", "backslashreplace"))
        self.lines += 1
        self.failed += failed

    def complete(self) -> None:
        """Nothing is left to be done."""

    def close(self) -> None:
        try:
            self._file.sync()
        finally:
            self._file.close()
