# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading lines: ends, byte order mark, bad bytes, and when a window is handed out."""

from __future__ import annotations

import io
import os

import pytest

from metrale.cli.failure import USAGE, Failure
from metrale.cli.lines import read_windows, windows_of


def lines_of(data: bytes, size: int = 100) -> list[str]:
    return [line for window in read_windows(io.BytesIO(data), size) for line in window]


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


def test_windows_are_full_but_the_last() -> None:
    data = b"".join(b"%d\n" % number for number in range(7))
    assert list(map(len, read_windows(io.BytesIO(data), 3))) == [3, 3, 1]
    assert list(map(len, windows_of([str(number) for number in range(7)], 3))) == [3, 3, 1]


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
    windows = read_windows(io.BytesIO(data), 100)
    if before:
        assert next(windows) == before
    with pytest.raises(Failure) as caught:
        next(windows)
    assert caught.value.code == USAGE
    assert where in str(caught.value)


def test_text_arguments_that_were_not_utf8_are_refused() -> None:
    with pytest.raises(Failure, match="text 2: not valid UTF-8"):
        list(windows_of(["good", "bad\udcff"], 2))


def test_a_line_comes_at_once_when_no_more_is_waiting() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as stream:
        windows = read_windows(stream, 100)
        os.write(write_end, b"first\nsec")
        assert next(windows) == ["first"]
        os.write(write_end, b"ond\nthird\n")
        assert next(windows) == ["second", "third"]
        os.close(write_end)
        assert list(windows) == []
