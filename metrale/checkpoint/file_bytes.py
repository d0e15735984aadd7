# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes of a file at any place, read into memory that is there already, from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.files import read_exactly
from metrale.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where something begins: byte ``offset`` of ``file``."""

    file: FileBytes
    offset: int


class FileBytes:
    """An open file that is read by position: nothing is mapped, so a file that shrinks meanwhile is an error.

    Parameters
    ----------
    path : Path

    Raises
    ------
    CheckpointError
        When it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, contiguous bytes, from ``offset`` on. The GIL is released meanwhile.

        Raises
        ------
        CheckpointError
            When the file ends before, cannot be read, or is closed.
        """
        try:
            read_exactly(self._file.fileno(), offset, out)
        except EOFError as error:
            raise CheckpointError(self.path, str(error)) from None
        except (OSError, ValueError) as error:  # ValueError: closed
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(self.path, f"cannot be read: {reason}") from None

    def fileno(self) -> int:
        """Return the descriptor.

        Raises
        ------
        CheckpointError
            When the file is closed.
        """
        try:
            return self._file.fileno()
        except ValueError as error:
            raise CheckpointError(self.path, f"cannot be read: {error}") from None

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._file.close()
