# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading lines: ends, byte order mark, bad bytes, and that a line comes at once."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from metrale.cli.failure import USAGE, Failure
from metrale.cli.lines import Arguments, Lines, count_lines, open_input, regular_file


def lines_of(data: bytes) -> list[str]:
    lines = Lines(io.BytesIO(data), "standard input")
    assert not lines.ended
    found = list(lines)
    assert (lines.count, lines.ended) == (len(found), True)
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n\nb", ["a", "", "", "b"]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        (b"a\r\nb\r", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"\xef\xbb\xbf", [""]),
        ("é\u2028ü\x85\n日本\n".encode(), ["é\u2028ü\x85", "日本"]),
    ],
)
def test_lines_are_split_at_lf_and_crlf_alone(data: bytes, expected: list[str]) -> None:
    assert lines_of(data) == expected


def test_lines_longer_than_a_read_stay_whole() -> None:
    long = "é" * 200_000  # a read of 64 KiB ends within a character
    assert lines_of(f"{long}\nb\n{long}".encode()) == [long, "b", long]


@pytest.mark.parametrize(
    ("data", "before", "where"),
    [
        (b"a\nb\xff\n", ["a"], "line 2: not valid UTF-8 (byte 0xff at position 1)"),
        (b"a\nb\n\xc3", ["a", "b"], "line 3"),
        (b"\xff\xfea\x00", [], "line 1"),
        (b"\xed\xa0\x80\n", [], "line 1"),  # a surrogate
    ],
)
def test_bad_bytes_are_an_error_after_the_lines_before(data: bytes, before: list[str], where: str) -> None:
    lines = Lines(io.BytesIO(data), "a.txt")
    assert [next(lines) for _ in before] == before
    with pytest.raises(Failure) as caught:
        next(lines)
    assert caught.value.code == USAGE
    assert f"a.txt, {where}" in str(caught.value)
    assert (lines.count, lines.ended) == (len(before), False)


def test_text_arguments_that_were_not_utf8_are_refused() -> None:
    with pytest.raises(Failure, match="text 2: not valid UTF-8"):
        Arguments(["good", "bad\udcff"])
    texts = Arguments(["a", "b"])
    assert list(texts) == ["a", "b"]
    assert (texts.count, texts.ended) == (2, True)


def test_a_line_comes_at_once_when_no_more_is_waiting() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as stream:
        lines = Lines(stream, "a pipe")
        os.write(write_end, b"first\nsec")
        assert next(lines) == "first"
        os.write(write_end, b"ond\nthird\n")
        assert [next(lines), next(lines)] == ["second", "third"]
        os.close(write_end)
        assert list(lines) == []


def test_whether_the_next_line_is_there() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as stream, open(writer, "wb", buffering=0) as source:
        lines = Lines(stream, "pipe")
        assert lines.waits
        source.write(b"one\ntwo\nthr")
        for left in (True, False):
            assert not lines.waits
            next(lines)
            assert lines.waits != left
        source.write(b"ee\n")
        assert (lines.waits, next(lines), lines.waits) == (False, "three", True)
        source.close()
        assert not lines.waits  # the end is there
    assert not Lines(io.BytesIO(b""), "memory").waits


def test_an_input_that_does_not_wait_is_waited_for() -> None:
    """Whoever started the process may have made its standard input non-blocking."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with open(read_end, "rb") as stream:
        writer = threading.Timer(0.1, os.write, (write_end, b"late\n"))
        writer.start()
        assert next(Lines(stream, "a pipe")) == "late"
        writer.join()
        os.close(write_end)


@pytest.mark.parametrize(
    ("data", "count"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\r\n\nb", 3), (b"x\n" * 100_000, 100_000)]
)
def test_lines_are_counted_without_being_read(tmp_path: Path, data: bytes, count: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with open_input(str(path), "--input") as stream:
        assert count_lines(stream) == count
        assert len(list(Lines(stream, "a.txt"))) == count
        assert count_lines(stream) == 0, "nothing is left from where it stands"


def test_what_is_a_regular_file(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file, open(os.devnull, "rb") as device:
        assert regular_file(file) is not None
        assert regular_file(device) is None
        assert regular_file(io.BytesIO()) is None
