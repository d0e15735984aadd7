# SPDX-License-Identifier: MIT OR Apache-2.0
"""A file that is written by appending: what is in it is whole pieces, and one process writes it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from metrale.cli.failure import USAGE, Failure


class OutputFile:
    """A regular file, or a device or a pipe with a name, opened for appending.

    Parameters
    ----------
    path : path
    new : bool
        Whether the file must not exist yet.

    Attributes
    ----------
    size : int
        Bytes in it; of a device, bytes written to it.
    is_regular : bool

    Raises
    ------
    OSError
        When it cannot be opened; ``filename`` is set.
    Failure
        When another process is writing it.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path = path
        # no O_TRUNC: what is in a file may go only when nobody else writes it
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL if new else _flags(path)
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            status = os.fstat(self._fd)
            self.is_regular = stat.S_ISREG(status.st_mode)
            self.size = status.st_size if self.is_regular else 0
            if self.is_regular:
                self._lock()
        except BaseException:
            self.close()
            raise

    def append(self, data: bytes) -> None:
        """Write all of ``data`` behind what is there.

        Raises
        ------
        OSError
            When it does not all fit. Of a regular file, the part that did is taken back; ``filename`` is set.
        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            if self.is_regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.size)
            error.filename = os.fspath(self.path)
            raise
        self.size += len(data)

    def read(self, size: int, position: int) -> bytes:
        """Return up to ``size`` bytes from ``position``; none at the end."""
        return os.pread(self._fd, size, position)

    def truncate(self, size: int) -> None:
        """Drop all behind the first ``size`` bytes of a regular file."""
        os.ftruncate(self._fd, size)
        self.size = size

    def sync(self) -> None:
        """Return when all of a regular file is on the disk itself."""
        if self.is_regular:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> None:
        """Keep other processes that lock it from writing; the lock ends with this process, however that ends."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Failure(USAGE, f"{self.path}: another process is writing it") from None
            # a file system without locks: the files are as good, only two runs at once are not noticed


def _flags(path: Path) -> int:
    """Return the flags to open what exists by: a device or a pipe may be one that can only be written."""
    return (os.O_RDWR | os.O_APPEND) if stat.S_ISREG(os.stat(path).st_mode) else os.O_WRONLY


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk itself, where the system can say so."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
