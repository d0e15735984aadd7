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
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.files import read_exactly

_NO_SIGNAL: Final = 1  # SIGEV_NONE
_NONE: Final = -1
"""Stands for the descriptor of a read that was not begun, for want of descriptors, of threads or of a C library that
has such reads: it is done by the caller's thread when it is finished."""


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
                call.argtypes = [ctypes.POINTER(_Request)]
            library.aio_return.restype = ctypes.c_ssize_t
            library.aio_suspend.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_void_p]
        except (OSError, AttributeError):
            continue
        return library
    return None


_C: Final = _library()


@dataclass(slots=True)
class _Read:
    """One read that was begun. The request, its buffer and its descriptor must live until it has ended."""

    file: int
    offset: int
    out: NDArray[np.uint8]
    descriptor: int
    request: Any

    def wait(self) -> None:
        address = ctypes.c_void_p(ctypes.addressof(self.request))
        while _C.aio_error(self.request) == errno.EINPROGRESS:
            _C.aio_suspend(ctypes.byref(address), 1, None)  # also ends for a signal, whose handler then runs


class AsyncReads:
    """Reads that go on side by side and are finished in the order in which they were begun.

    A context manager; leaving it waits until nothing is written to any buffer any more. For one thread.
    """

    def __init__(self) -> None:
        self._reads: deque[_Read] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drain()

    def __len__(self) -> int:
        """Return the number of reads that were begun and not finished."""
        return len(self._reads)

    def start(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Begin to fill ``out``, contiguous bytes, from ``offset`` on of the file that has this descriptor.

        The library does one read at a time for a descriptor, so each read has its own.
        """
        try:
            descriptor = _NONE if _C is None else os.dup(file)
        except OSError:
            descriptor = _NONE
        request = _Request(file=descriptor, buffer=out.ctypes.data, nbytes=out.nbytes, offset=offset)
        request.notice.notify = _NO_SIGNAL
        if descriptor != _NONE and _C.aio_read(request):
            os.close(descriptor)
            descriptor = _NONE
        self._reads.append(_Read(file, offset, out, descriptor, request))

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
        if read.descriptor == _NONE:
            self._reads.popleft()
            return 0
        read.wait()
        self._reads.popleft()
        os.close(read.descriptor)
        return max(int(_C.aio_return(read.request)), 0)

    def _drain(self) -> None:
        interruption: BaseException | None = None
        while self._reads:
            try:
                self._end(self._reads[0])
            except BaseException as error:  # KeyboardInterrupt, which must not let go of memory that is written to
                interruption = error
        if interruption is not None:
            raise interruption
