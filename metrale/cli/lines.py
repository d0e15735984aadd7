# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts from standard input or from arguments, a window at a time."""

from __future__ import annotations

import io
import select
from collections.abc import Iterator, Sequence
from typing import Final

from metrale.cli.failure import USAGE, Failure

_CHUNK: Final = 1 << 16
_BOM: Final = "\ufeff"


def windows_of(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield texts from the command line, ``size`` at a time.

    Raises
    ------
    Failure
        When one of them was not UTF-8.
    """
    for number, text in enumerate(texts, 1):
        if not _is_utf8(text):
            raise Failure(USAGE, f"text {number}: not valid UTF-8")
    for start in range(0, len(texts), size):
        yield list(texts[start : start + size])


def read_windows(stream: io.BufferedIOBase, size: int) -> Iterator[list[str]]:
    """Yield lines without their ends, at most ``size`` at a time, and fewer when no more are waiting to be read.

    So a file comes in whole windows, while a line that somebody types, or that a program sends before it waits for
    the answer, comes at once. Lines end with LF or CRLF; the last one need not. A byte order mark at the very start
    is dropped.

    Raises
    ------
    Failure
        At the first line that is not UTF-8, after the lines before it were yielded.
    """
    window: list[str] = []
    number = 0
    for raw in _raw_lines(stream):
        if raw is not None:
            number += 1
            try:
                window.append(_decode(raw, number))
            except Failure:
                if window:
                    yield window
                raise
        if window and (raw is None or len(window) == size):
            yield window
            window = []
    if window:
        yield window


def _raw_lines(stream: io.BufferedIOBase) -> Iterator[bytes | None]:
    """Yield lines without their LF, and None whenever the next read would have to wait."""
    partial: list[bytes] = []  # pieces of a line whose end has not been read
    while chunk := stream.read1(_CHUNK):
        *ended, rest = chunk.split(b"\n")
        for raw in ended:
            yield b"".join([*partial, raw])
            partial.clear()
        partial.append(rest)
        if not _more_waits(stream):
            yield None
    if last := b"".join(partial):
        yield last


def _decode(raw: bytes, number: int) -> str:
    try:
        text = raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at position {error.start}"
        raise Failure(USAGE, f"standard input, line {number}: not valid UTF-8 ({byte})") from None
    return text.removeprefix(_BOM) if number == 1 else text


def _more_waits(stream: io.BufferedIOBase) -> bool:
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError):  # not a file that can be asked; reading on is right for one that never blocks
        return True


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
