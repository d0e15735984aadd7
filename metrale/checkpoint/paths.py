# SPDX-License-Identifier: MIT OR Apache-2.0
"""Folders and files that must be there, before anything opens them."""

from __future__ import annotations

import os
from pathlib import Path

from metrale.errors import CheckpointError, InvalidInput, told

_LFS_POINTER = b"version https://git-lfs"


def require_path(argument: str, value: object, expected: str = "the path of a folder") -> str:
    """Return a path that is text. The empty one would be the current folder.

    Raises
    ------
    InvalidInput
        When it is something else; it names ``argument``.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidInput(argument, expected, told(value))
    return path


def require_folder(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path when it is a folder that can be listed.

    Raises
    ------
    InvalidInput
        When it is no path.
    CheckpointError
        When it is missing, a file, empty, or unreadable.
    """
    folder = Path(require_path("path", path))
    try:
        with os.scandir(folder) as entries:
            empty = next(entries, None) is None
    except FileNotFoundError:
        raise CheckpointError(folder, "there is no such folder") from None
    except NotADirectoryError:
        raise CheckpointError(folder, "is a file, expected the folder that holds the checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(folder, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if empty:
        raise CheckpointError(folder, "is an empty folder, expected a checkpoint")
    return folder


def require_file(path: Path) -> None:
    """Refuse what is no regular file: opening a pipe would wait for a writer for ever.

    Raises
    ------
    CheckpointError
        When it is missing, or something else than a file.
    """
    try:
        if path.is_file():
            return
        there = path.exists() or (os.path.lexists(path) and not path.is_symlink())
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    raise CheckpointError(path, "is not a regular file" if there else "there is no such file")


def read_file(path: Path, max_bytes: int, what: str) -> bytes:
    """Return a file's bytes, when they are ``max_bytes`` at most; ``what`` says what they should be.

    Raises
    ------
    CheckpointError
        When the file is missing, not regular, unreadable or too large.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise CheckpointError(path, f"is larger than the {max_bytes} bytes that are read as {what}")
    return data


def is_lfs_pointer(head: bytes) -> bool:
    """Return whether a file that begins so is what Git keeps in the place of a large one."""
    return head.startswith(_LFS_POINTER)
