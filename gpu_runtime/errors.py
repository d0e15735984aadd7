# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions of the device layer. Every message names what was asked, what was expected and what came."""

from __future__ import annotations

from typing import Any, Final

MOST_VALUE: Final = 300
"""Characters of a value that a message shows."""


def restore(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild an exception that was pickled, without calling a constructor whose arguments are not ``args``."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def told(value: object) -> str:
    """Return a value as text for a message, cut when it is long. Never raises, whatever the value's ``repr`` does."""
    if type(value) is int and value.bit_length() > MOST_VALUE:  # repr refuses thousands of digits
        return f"an int of {value.bit_length()} bits"
    try:
        return cut(repr(value), MOST_VALUE)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def cut(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters, with a sign where there were more: near the end, which is kept."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} [...] {text[-(most // 4) :]}"


class GpuRuntimeError(RuntimeError):
    """Base of every error that the device layer raises. Errors survive pickling, as process pools need."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (type(self), self.args, self.__dict__)


class BackendUnavailable(GpuRuntimeError):
    """A backend that this installation or this machine cannot open."""


class DeviceError(GpuRuntimeError):
    """A device call that failed, or that was made out of order (for example, synchronising a capturing stream)."""


class InvalidPointer(DeviceError):
    """An address, or a span of bytes, that no live allocation contains."""


class UninitializedRead(DeviceError):
    """A read of bytes that nothing has written since they were allocated. A checking backend raises it."""


class UnwrittenOutput(DeviceError):
    """A kernel that left an element unwritten which its spec says it writes. A checking backend raises it."""


class GuardViolation(DeviceError):
    """Bytes that were written though nobody may write them: beside a block, in a freed block, or beside an output."""


class OutOfMemory(DeviceError, MemoryError):
    """An allocation that did not fit. The backend stays usable.

    Attributes
    ----------
    requested : int
        Bytes asked for.
    live : int
        Bytes that were allocated when the call was made.
    limit : int
        Bytes that the backend may hold in all.
    """

    def __init__(self, message: str, *, requested: int, live: int, limit: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.live = live
        self.limit = limit


class UnknownKernel(GpuRuntimeError, LookupError):
    """A kernel module or entry point that is not registered."""
