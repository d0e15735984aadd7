# SPDX-License-Identifier: MIT OR Apache-2.0
"""The progress bar: on a terminal alone, with what is known of the input, and out of the way of messages."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from metrale.cli import main
from tests.cli.conftest import FakeTranslator, Feed
from tests.cli.process import SECONDS, started
from tests.draws import draws

HELLO = "Hello\n" * 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal. No fixture: pytest sets standard error anew between those and the test."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\nfail\nfour\n")
    return path


def translate(*arguments: object) -> int:
    return main(["translate", "--to", "fra_Latn", *map(str, arguments)])


def read_all(fd: int, into: list[bytes]) -> None:
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:  # as Linux says that nobody has the other end any more
            return
        if not data:
            return
        into.append(data)


@pytest.mark.parametrize("columns", draws([0, 60, 200], 2))
def test_on_a_terminal_a_file_s_progress_is_shown(tmp_path: Path, columns: int) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(HELLO)
    ours, theirs = pty.openpty()  # of no width, unless it is told one
    if columns:
        termios.tcsetwinsize(theirs, (24, columns))
    shown: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, shown))
    arguments = ("translate", "--to", "fra_Latn", "--max-batch", "2", "--input", source, "--output", output)
    with started(*arguments, stderr=theirs) as (process, _, result):
        os.close(theirs)
        reader.start()
        assert result.read() == b""
        assert process.wait(SECONDS) == 0
    reader.join()
    os.close(ours)
    text = b"".join(shown).decode()
    assert output.read_text() == "Bonjour\n" * 30
    counts = [int(count) for count in re.findall(r"(\d+)/30 \[", text)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 30
    assert max(map(len, re.split(r"[\r\n]+", text.partition("[")[2]))) <= (columns or 80)
    assert re.search(r"100%\S*.* 30/30 \[\d\d:\d\d<00:00, +[\d.]+ lines/s\]", text)


def test_a_bar_has_the_total_of_a_file_and_messages_have_their_own_lines(
    source: Path, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    assert translate("--input", source, "--output", source.with_name("out.txt")) == 1
    shown = terminal.getvalue()
    assert "0/4 [" in shown
    assert "4/4 [" in shown
    warning = re.search(r"[\r\n]([^\r\n]*line 3: not translated[^\r\n]*)\n", shown)
    assert warning is not None
    assert warning[1] == "metrale: warning: line 3: not translated: logits are not finite"
    assert shown.endswith("\nmetrale: warning: 1 of 4 lines were not translated\n")


def test_a_resumed_run_begins_where_it_goes_on(
    source: Path, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    output = source.with_name("out.txt")
    source.write_text("one\ntwo\nfault\nfour\n")
    assert translate("--input", source, "--output", output) == 4
    terminal.truncate(0)
    source.write_text("one\ntwo\nthree\nfour\n")
    assert translate("--input", source, "--output", output, "--resume") == 0
    counts = re.findall(r"(\d)/4 \[", terminal.getvalue())
    assert (counts[0], counts[-1]) == ("2", "4")


def test_of_a_pipe_s_lines_the_count_is_shown_once_it_takes_long(
    tmp_path: Path, feed: Feed, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    feed(b"one\ntwo\n")
    assert translate("--output", tmp_path / "quick.txt") == 0
    assert terminal.getvalue().count("lines") == 0
    monkeypatch.setattr("metrale.cli.console._SECONDS_BEFORE_IT_SHOWS", 0.2)
    monkeypatch.setattr(FakeTranslator, "_one", slow(FakeTranslator._one))
    feed(b"one\ntwo\nthree\n")
    assert translate("--output", tmp_path / "long.txt") == 0
    assert re.search(r"3 lines \[", terminal.getvalue())


def slow(original: object) -> object:
    def one(*arguments: object, **options: object) -> object:
        time.sleep(0.15)
        return original(*arguments, **options)  # type: ignore[operator]

    return one


@pytest.mark.parametrize("options", [["--quiet"], ["--no-progress"], ["-q"]])
def test_it_can_be_switched_off(
    source: Path, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    terminal = open_terminal(monkeypatch)
    assert translate("--input", source, "--output", source.with_name("out.txt"), *options) == 1
    shown = terminal.getvalue()
    assert "\r" not in shown
    assert ("not translated" in shown) == (options == ["--no-progress"])


def test_there_is_none_without_a_terminal(
    source: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate("--input", source, "--output", source.with_name("out.txt")) == 1
    err = capsys.readouterr().err
    assert "\r" not in err
    assert all(line.startswith("metrale: ") for line in err.splitlines())


def test_there_is_none_where_the_lines_themselves_appear(
    source: Path, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)

    class Screen(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    screen = Screen(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", screen)
    assert translate("--input", source) == 1
    assert "\r" not in terminal.getvalue()
    assert translate("one", "two") == 0
    assert "\r" not in terminal.getvalue()
