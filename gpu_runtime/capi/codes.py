# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which code of the header stands for which exception, both ways. The header calls `described` and `exception_of`."""

from __future__ import annotations

import sys
from typing import Final

from gpu_runtime import errors

OK: Final = 0
RUNTIME: Final = 1
STATUS_BYTES: Final = 1024
"""Of the header's ``gpurt_status``: four of the code, then a message that ends with a zero."""


class UnknownHandle(ValueError):
    """A handle that stands for no backend: released, or never given."""


CODES: Final[dict[str, tuple[int, type[BaseException]]]] = {
    "RUNTIME": (RUNTIME, RuntimeError),
    "VALUE": (2, ValueError),
    "TYPE": (3, TypeError),
    "BUFFER": (4, BufferError),
    "MEMORY": (5, MemoryError),
    "LOOKUP": (6, LookupError),
    "IMPORT": (7, ImportError),
    "INTERRUPTED": (8, KeyboardInterrupt),
    "GPU_RUNTIME": (20, errors.GpuRuntimeError),
    "BACKEND_UNAVAILABLE": (21, errors.BackendUnavailable),
    "DEVICE": (22, errors.DeviceError),
    "INVALID_POINTER": (23, errors.InvalidPointer),
    "OUT_OF_MEMORY": (24, errors.OutOfMemory),
    "UNINITIALIZED_READ": (25, errors.UninitializedRead),
    "UNWRITTEN_OUTPUT": (26, errors.UnwrittenOutput),
    "GUARD_VIOLATION": (27, errors.GuardViolation),
    "UNKNOWN_KERNEL": (28, errors.UnknownKernel),
    "HANDLE": (-4, UnknownHandle),
}
"""By the name that follows ``GPURT_ERROR_`` in the header."""

ONE_WAY: Final[dict[str, tuple[int, type[BaseException]]]] = {
    "SHUTDOWN": (-1, errors.GpuRuntimeError),
    "NOT_IMPORTED": (-2, errors.GpuRuntimeError),
    "ABI": (-3, ImportError),
}
"""Codes that the header itself returns; their exceptions have codes of their own."""

_CODE_OF: Final = {kind: code for code, kind in CODES.values()}
_KIND_OF: Final = dict([*CODES.values(), *ONE_WAY.values()])


def code_of(error: BaseException) -> int:
    """Return the code of the nearest class that has one."""
    return next((_CODE_OF[kind] for kind in type(error).__mro__ if kind in _CODE_OF), RUNTIME)


def described(error: BaseException) -> tuple[int, str]:
    """Return an exception's code and text. The text begins with the class's name where no code is for it alone."""
    code = code_of(error)
    try:
        text = str(error)
    except Exception:
        text = "an exception that cannot be shown"
    if type(error) not in _CODE_OF or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return code, text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def exception_of(code: int, text: str) -> BaseException:
    """Return the exception that a code stands for.

    Raises
    ------
    ValueError
        When no error has this code.
    """
    kind = _KIND_OF.get(code)
    if kind is None:
        raise ValueError(f"code: expected that of an error, got {code}: {text}")
    if kind is errors.OutOfMemory:
        return errors.OutOfMemory(text, requested=0, live=0, limit=0)
    return kind(text)


def status_bytes(error: BaseException) -> bytes:
    """Return a ``gpurt_status`` for an exception: its code and as much of its text as fits, zero at the end."""
    code, text = described(error)
    fitting = text.encode()[: STATUS_BYTES - 5].decode(errors="ignore").encode()  # no character is cut in two
    return code.to_bytes(4, sys.byteorder, signed=True) + fitting + b"\0"
