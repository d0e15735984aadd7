# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies from files to the device, through page-locked slots that the C library's threads read into.

One thread of Python tells them, and the device, what to do next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from gpu_runtime.cuda.async_reads import AsyncReads
from gpu_runtime.cuda.driver import Context, attempt
from gpu_runtime.cuda.events import DISABLE_TIMING
from gpu_runtime.files import FileSpan

SLOT_BYTES: Final = 2 << 20
"""Size of a slot. Smaller ones take more of Python's time, and of larger ones it takes long to lock the pages."""

READS: Final = 10
"""Most reads that go on side by side. One reads from the page cache at a tenth of the rate of page-locked copies."""

AHEAD: Final = 4
"""Slots beside those that are read into: the device copies from them."""

_MOST_GAP: Final = 4096
"""Bytes between two spans that are read with them, for one read less."""


@dataclass(slots=True)
class Piece:
    """One read, and the copies of what was read: address, first byte, bytes."""

    descriptor: int
    offset: int
    nbytes: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)


def pieces(spans: Iterable[FileSpan], slot_bytes: int) -> Iterator[Piece]:
    """Cut spans to reads of at most ``slot_bytes``, in the order of each file; what lies together is read at once."""
    piece: Piece | None = None
    for descriptor, offset, nbytes, dst in sorted(spans):
        while nbytes:
            if piece is not None and not _reaches(piece, descriptor, offset, slot_bytes):
                yield piece
                piece = None
            if piece is None:
                piece = Piece(descriptor, offset)
            start = offset - piece.offset
            count = min(nbytes, slot_bytes - start)
            piece.copies.append((dst, start, count))
            piece.nbytes = max(piece.nbytes, start + count)
            offset, nbytes, dst = offset + count, nbytes - count, dst + count
    if piece is not None:
        yield piece


def _reaches(piece: Piece, descriptor: int, offset: int, slot_bytes: int) -> bool:
    """Return whether a read has a byte of a file, or may go on to it."""
    start = offset - piece.offset
    return piece.descriptor == descriptor and 0 <= start < slot_bytes and start - piece.nbytes <= _MOST_GAP


def copy_files(context: Context, lock: Callable[[int], Any], spans: Iterable[FileSpan], stream: int) -> None:
    """Copy spans of files after the work on a stream, and wait until that is done.

    ``lock(nbytes)`` returns the owner of page-locked memory, an array with its address as ``ptr``.

    Raises
    ------
    OSError, EOFError
        When a file cannot be read, or ends too early.
    OutOfMemory, DeviceError
    """
    todo = list(pieces(spans, SLOT_BYTES))
    if not todo:
        return
    most = min(READS, os.cpu_count() or 1, len(todo))
    with context.current(), context.relaxed(), AsyncReads() as reads, Slots(lock, todo, most + AHEAD, stream) as slots:
        for number, piece in enumerate(todo):
            if number >= most:
                reads.finish()
                slots.copy(number - most)
            reads.start(piece.descriptor, piece.offset, slots.room(number))
        for number in range(len(todo) - most, len(todo)):
            reads.finish()
            slots.copy(number)


class Slots:
    """Slots that pieces take in turn. Leaving it waits for the stream."""

    def __init__(self, lock: Callable[[int], Any], todo: list[Piece], count: int, stream: int) -> None:
        self._todo = todo
        self._count = count
        self._stream = stream
        self._size = max(piece.nbytes for piece in todo)
        self._owner = lock(self._size * count)
        self._base = int(self._owner.ptr)
        self._slots: NDArray[np.uint8] = np.asarray(self._owner).reshape(count, self._size)
        self._events: list[int] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._events.append(attempt(runtime.eventCreateWithFlags, DISABLE_TIMING))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt(runtime.streamSynchronize, self._stream)
        for event in self._events:
            attempt(runtime.eventDestroy, event)

    def room(self, number: int) -> NDArray[np.uint8]:
        """Return where a piece is to be read to, when the copies from there are done."""
        slot = number % self._count
        if number >= self._count:
            attempt(runtime.eventSynchronize, self._events[slot])
        return self._slots[slot, : self._todo[number].nbytes]

    def copy(self, number: int) -> None:
        """Enqueue the copies of a piece that was read."""
        slot = number % self._count
        base = self._base + slot * self._size
        for dst, start, nbytes in self._todo[number].copies:
            attempt(runtime.memcpyAsync, dst, base + start, nbytes, runtime.memcpyHostToDevice, self._stream)
        attempt(runtime.eventRecord, self._events[slot], self._stream)
