# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes of a file at any place, read into memory that is there already, from any thread."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metrale.errors import CheckpointError


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
        done = 0
        while done < out.size:
            try:
                count = os.preadv(self._file.fileno(), (out[done:].data,), offset + done)
            except (OSError, ValueError) as error:  # ValueError: closed
                reason = getattr(error, "strerror", None) or error
                raise CheckpointError(self.path, f"cannot be read: {reason}") from None
            if not count:
                missing = out.size - done
                raise CheckpointError(self.path, f"ends at byte {offset + done}, where {missing} more should be")
            done += count

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._file.close()
