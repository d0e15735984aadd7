# SPDX-License-Identifier: MIT OR Apache-2.0
"""Closing at the end of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable


def close_at_exit(close: Callable[[], None], error: BaseException | None) -> None:
    """Close, and let nothing that hinders it take the place of the exception that ends the block, if one does.

    That exception's traceback holds the frames, whose arrays may be what hinders; it gets a note then, and what was to
    be closed stays open.

    Raises
    ------
    BufferError
        When an export hinders, and the block ended without an exception.
    """
    try:
        close()
    except BufferError as hindrance:
        if error is None:
            raise
        error.add_note(f"and what the with statement opened was not closed: {hindrance}")
