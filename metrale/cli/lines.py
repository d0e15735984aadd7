# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts from a file, from standard input or from arguments, one at a time as they come."""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

from metrale.cli.failure import USAGE, Failure

_CHUNK: Final = 1 << 16
_BOM: Final = "\ufeff"
STANDARD_INPUT: Final = "standard input"


class Lines(Iterator[str]):
    """The lines of a stream without their ends; nothing is read before it is asked for.

    Lines end with LF or CRLF; the last one need not. A byte order mark at the very start is dropped. Reading waits for
    no more than one read gives, so a line that somebody types, or that a program sends before it waits for the answer,
    comes at once.

    Parameters
    ----------
    stream : binary stream
        Its file descriptor is read, where it has one: a thread that waits in a read then holds no lock of the stream.
    name : str
        What messages call it.

    Attributes
    ----------
    count : int
        Lines given out so far.
    ended : bool
        Whether all there was has been given out.

    Raises
    ------
    Failure
        From ``next``, at the first line that is not UTF-8.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self.count = 0
        self.ended = False
        self._stream = stream
        self._read: deque[bytes] = deque()  # lines, and not given out
        self._raw = _raw_lines(_reader(stream), self._read)

    def __next__(self) -> str:
        raw = next(self._raw, None)
        if raw is None:
            self.ended = True
            raise StopIteration
        text = self._decode(raw)
        self.count += 1
        return text

    @property
    def waits(self) -> bool:
        """Whether whoever writes the stream would be waited for: there is nothing to read, and no line left of that."""
        if self._read:
            return False
        try:
            return not select.select([self._stream.fileno()], [], [], 0)[0]
        except (OSError, ValueError):  # bytes in memory
            return False

    def _decode(self, raw: bytes) -> str:
        number = self.count + 1
        try:
            text = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x} at position {error.start}"
            raise Failure(USAGE, f"{self.name}, line {number}: not valid UTF-8 ({byte})") from None
        return text.removeprefix(_BOM) if number == 1 else text


class Arguments(Iterator[str]):
    """Texts from the command line, with the attributes of `Lines`.

    Raises
    ------
    Failure
        When one of them was not UTF-8; nothing is given out then.
    """

    name = "the command line"

    def __init__(self, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts, 1):
            if not _is_utf8(text):
                raise Failure(USAGE, f"text {number}: not valid UTF-8")
        self.count = 0
        self.ended = False
        self._texts = iter(texts)

    def __next__(self) -> str:
        text = next(self._texts, None)
        if text is None:
            self.ended = True
            raise StopIteration
        self.count += 1
        return text


def regular_file(stream: BinaryIO) -> os.stat_result | None:
    """Return the status of the regular file behind a stream, or None when there is another kind of thing behind it."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            return status
    return None


def count_lines(stream: BinaryIO) -> int:
    """Return how many lines there are from where a regular file stands to its end. Its position stays."""
    fd = stream.fileno()
    position = os.lseek(fd, 0, os.SEEK_CUR)
    lines, last = 0, b"\n"
    while chunk := os.pread(fd, _CHUNK, position):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
        position += len(chunk)
    return lines + (last != b"\n")


def open_input(name: str, option: str) -> BinaryIO:
    """Open the file that an option names for reading; errors name it. `Failure` when the name is empty."""
    if not name:  # as a path it would be the current folder
        raise Failure(USAGE, f"{option}: expected a file, got ''")
    return open(name, "rb", buffering=0)


def _reader(stream: BinaryIO) -> Callable[[], bytes]:
    """Return a function that gives the next bytes as soon as there are any, and none at the end."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):  # bytes in memory, in the place of a file
        return lambda: stream.read(_CHUNK)

    def read() -> bytes:
        while True:
            try:
                return os.read(fd, _CHUNK)
            except BlockingIOError:  # whoever started this process made its standard input one that does not wait
                select.select([fd], [], [])

    return read


def _raw_lines(read: Callable[[], bytes], ahead: deque[bytes]) -> Iterator[bytes]:
    """Yield lines without their LF; ``ahead`` has those that are read and still to come."""
    partial: list[bytes] = []  # pieces of a line whose end has not been read
    while chunk := read():
        *ended, rest = chunk.split(b"\n")
        if ended:
            ended[0] = b"".join([*partial, ended[0]])
            partial.clear()
            ahead.extend(ended)
        partial.append(rest)
        while ahead:
            yield ahead.popleft()
    if last := b"".join(partial):
        yield last


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
