# SPDX-License-Identifier: MIT OR Apache-2.0
"""Spans of open files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpu_runtime import checks
from gpu_runtime.buffers import Bytes


class FileSpan(NamedTuple):
    """``nbytes`` bytes from ``offset`` on of the file open as ``descriptor``, that go to ``dst``."""

    descriptor: int
    offset: int
    nbytes: int
    dst: int


def checked_spans(spans: Iterable[tuple[int, int, int, int]]) -> Iterator[FileSpan]:
    """Yield spans as integers that may be right; those of no bytes are left out. The usual ones take little time.

    Raises
    ------
    ValueError, TypeError
        When a number is none, or negative, or a span is not four numbers.
    EOFError
        When a span ends past the end of its file.
    OSError
        When a descriptor is not open.
    """
    sizes: dict[int, int] = {}
    for index, span in enumerate(spans):
        descriptor, offset, nbytes, dst = span
        if not type(descriptor) is type(offset) is type(nbytes) is int or descriptor < 0 or offset < 0 or nbytes < 0:
            descriptor, offset, nbytes = (
                checks.integer(f"{_what(index)}: {name}", value, low=0)
                for name, value in zip(FileSpan._fields[:3], span, strict=False)
            )
        if descriptor not in sizes:
            sizes[descriptor] = os.fstat(descriptor).st_size
        end = sizes[descriptor]
        if nbytes and offset + nbytes > end:
            expected = f"a span that ends by byte {end} of its file"
            raise EOFError(f"{_what(index)}: expected {expected}, got {offset} + {nbytes}")
        if nbytes:
            yield FileSpan(descriptor, offset, nbytes, checks.address("copy_files_h2d: dst", dst))


def _what(index: int) -> str:
    return f"copy_files_h2d: spans[{index}]"


def read_exactly(descriptor: int, offset: int, out: Bytes) -> None:
    """Fill contiguous bytes from a place of a file on; the GIL is released meanwhile.

    Raises
    ------
    EOFError
        When the file ends before.
    OSError
        When it cannot be read.
    """
    done = 0
    while done < out.size:
        count = os.preadv(descriptor, (out[done:].data,), offset + done)
        if not count:
            raise EOFError(f"ends at byte {offset + done}, where {out.size - done} more should be")
        done += count
