# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads of files by threads of the C library (POSIX asynchronous input), for one thread of Python that has other work.

Python's own threads could read side by side too. But each must get the interpreter's lock back after every read, and
with ten of them that takes longer than the reading of a megabyte. The C library's threads never hold it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections import deque
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.files import read_exactly

_NO_SIGNAL: Final = 1  # SIGEV_NONE


class _Notice(ctypes.Structure):
    """glibc's ``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Request(ctypes.Structure):
    """glibc's ``struct aiocb`` where addresses have 64 bits."""

    _fields_ = (
        ("file", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("notice", _Notice),
        ("glibc_own", ctypes.c_char * 32),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )


def _library() -> Any:
    """Return what has the calls, or None where ``struct aiocb`` may be another one than `_Request`."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
    except ValueError:
        return None
    for name in (None, "librt.so.1"):  # before glibc 2.34 they were in a library of their own
        try:
            library = ctypes.CDLL(name, use_errno=True)
            for call in (library.aio_read, library.aio_error, library.aio_return):
                call.argtypes = [ctypes.c_void_p]
            library.aio_return.restype = ctypes.c_ssize_t
            library.aio_suspend.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_void_p]
        except (OSError, AttributeError):
            continue
        return library
    return None


_C: Final = _library()


class _Lane:
    """A descriptor of a file and a request: what one read at a time is done with.

    The library does one read at a time for a descriptor. The request, the buffer and the descriptor must live until the
    read has ended.

    Raises
    ------
    OSError
        When there is no descriptor left, or the file is closed.
    """

    def __init__(self, file: int) -> None:
        self.descriptor = os.dup(file)
        self._request = _Request(file=self.descriptor)
        self._request.notice.notify = _NO_SIGNAL
        self._address = ctypes.c_void_p(ctypes.addressof(self._request))

    def begin(self, offset: int, out: NDArray[np.uint8]) -> bool:
        """Begin to read; return whether a thread could be had."""
        self._request.buffer, self._request.nbytes, self._request.offset = out.ctypes.data, out.nbytes, offset
        return not _C.aio_read(self._address)

    def wait(self) -> None:
        while _C.aio_error(self._address) == errno.EINPROGRESS:
            _C.aio_suspend(ctypes.byref(self._address), 1, None)  # also ends for a signal, whose handler then runs

    def count(self) -> int:
        """Return how many bytes were read by a read that has ended."""
        return max(int(_C.aio_return(self._address)), 0)


class _Read(NamedTuple):
    """One read that was begun, or (no lane) is to be done by the caller's thread when it is finished."""

    file: int
    offset: int
    out: NDArray[np.uint8]
    lane: _Lane | None


class AsyncReads:
    """Reads that go on side by side and are finished in the order in which they were begun.

    A context manager; leaving it waits until nothing is written to any buffer any more. Files must stay open until
    then. For one thread.
    """

    def __init__(self) -> None:
        self._reads: deque[_Read] = deque()
        self._idle: dict[int, list[_Lane]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._drain()
        finally:
            for lanes in self._idle.values():
                for lane in lanes:
                    os.close(lane.descriptor)
            self._idle.clear()

    def __len__(self) -> int:
        """Return the number of reads that were begun and not finished."""
        return len(self._reads)

    def start(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Begin to fill ``out``, contiguous bytes, from ``offset`` on of the file that has this descriptor."""
        lane = self._lane(file)
        if lane is not None and not lane.begin(offset, out):
            self._idle[file].append(lane)
            lane = None
        self._reads.append(_Read(file, offset, out, lane))

    def _lane(self, file: int) -> _Lane | None:
        """Return a lane of a file; None for want of descriptors, or of a C library that has such reads."""
        idle = self._idle.setdefault(file, [])
        if idle:
            return idle.pop()
        try:
            return None if _C is None else _Lane(file)
        except OSError:
            return None

    def finish(self) -> None:
        """Wait for the read that was begun first. Its buffer is filled on return.

        Raises
        ------
        EOFError, OSError
            When the file ends before, cannot be read, or is closed.
        """
        read = self._reads[0]
        done = self._end(read)
        if done < read.out.size:  # a part only, or an error, of which the other call knows more
            read_exactly(read.file, read.offset + done, read.out[done:])

    def _end(self, read: _Read) -> int:
        """Wait for a read, the first one, and return how many bytes it has read."""
        if read.lane is not None:
            read.lane.wait()
        self._reads.popleft()
        if read.lane is None:
            return 0
        self._idle[read.file].append(read.lane)
        return read.lane.count()

    def _drain(self) -> None:
        interruption: BaseException | None = None
        while self._reads:
            try:
                self._end(self._reads[0])
            except BaseException as error:  # KeyboardInterrupt, which must not let go of memory that is written to
                interruption = error
        if interruption is not None:
            raise interruption
