# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale translate --input --output``: what is read, and what may be written where."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from pathlib import Path

import pytest

from metrale.cli import main
from tests.cli.conftest import FakeTranslator, Feed

LINES = b"one\ntwo\nthree\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_bytes(LINES)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def translate(*arguments: object) -> int:
    return main(["translate", "--to", "fra_Latn", *map(str, arguments)])


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("data", "written"),
    [
        (LINES, b"ONE\nTWO\nTHREE\n"),
        (b"", b""),
        (b"\n", b"\n"),
        (b"one", b"ONE\n"),
        (b"one\r\n\r\ntwo\r\n", b"ONE\n\nTWO\n"),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbf\n", "ONE\n\ufeff\n".encode()),
        ("żółć\n日本".encode(), "ŻÓŁĆ\n日本\n".encode()),
    ],
)
def test_a_file_becomes_a_file(
    source: Path, output: Path, fakes: list[FakeTranslator], data: bytes, written: bytes
) -> None:
    source.write_bytes(data)
    assert translate("--input", source, "--output", output) == 0
    assert output.read_bytes() == written
    assert sorted(path.name for path in output.parent.iterdir()) == ["in.txt", "out.txt"]


def test_a_dash_is_standard_input_or_output(
    source: Path, output: Path, fakes: list[FakeTranslator], feed: Feed, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(LINES)
    assert translate("--input", "-", "--output", output) == 0
    assert output.read_bytes() == b"ONE\nTWO\nTHREE\n"
    capsys.readouterr()
    assert translate("--input", source, "--output", "-") == 0
    assert capsys.readouterr().out == "ONE\nTWO\nTHREE\n"


def test_texts_may_go_to_a_file(output: Path, fakes: list[FakeTranslator]) -> None:
    assert translate("--output", output, "a", "b") == 0
    assert output.read_bytes() == b"A\nB\n"


def test_bad_utf8_in_the_middle_keeps_the_lines_before_and_can_be_gone_on_from_once_it_is_mended(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_bytes(b"one\ntwo\nb\xe9d\nfour\n")
    assert translate("--input", source, "--output", output) == 2
    assert last_error(capsys) == f"metrale: error: {source}, line 3: not valid UTF-8 (byte 0xe9 at position 1)"
    assert output.read_bytes() == b"ONE\nTWO\n"
    source.write_bytes(b"one\ntwo\nbad\nfour\n")
    assert translate("--input", source, "--output", output, "--resume") == 0
    assert output.read_bytes() == b"ONE\nTWO\nBAD\nFOUR\n"
    assert fakes[1].texts == ["bad", "four"]


def test_an_output_that_exists_is_left_alone(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_bytes(b"mine\n")
    assert translate("--input", source, "--output", output) == 2
    assert last_error(capsys).endswith(f"{output} exists; --overwrite replaces it, --resume goes on with it")
    assert output.read_bytes() == b"mine\n"
    assert fakes == [], "no model was loaded for it"
    assert translate("--input", source, "--output", output, "--overwrite") == 0
    assert output.read_bytes() == b"ONE\nTWO\nTHREE\n"


def test_overwriting_waits_until_the_model_is_loaded(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write_bytes(b"mine\n")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("metrale.cli.translate.Translator", fail)
    assert translate("--input", source, "--output", output, "--overwrite") == 3
    assert output.read_bytes() == b"mine\n"
    output.unlink()
    assert translate("--input", source, "--output", output) == 3
    assert not output.exists(), "nor is one made"


@pytest.mark.parametrize("way", ["path", "link", "hard link"])
@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_the_input_is_not_written_over(
    source: Path, output: Path, way: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if way == "link":
        output.symlink_to(source)
    elif way == "hard link":
        output.hardlink_to(source)
    assert translate("--input", source, "--output", source if way == "path" else output, option) == 2
    assert "is the input itself" in last_error(capsys)
    assert source.read_bytes() == LINES


def test_standard_output_into_the_input_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(source, "a", encoding="utf-8") as same:  # as a shell does for >>
        monkeypatch.setattr(sys, "stdout", same)
        assert translate("--input", source) == 2
    assert "standard output is the input itself" in last_error(capsys)
    assert source.read_bytes() == LINES


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--input", "no/such/file"], ["no/such/file", "No such file"]),
        (["--input", "."], ["Is a directory"]),
        (["--input", "in.txt", "text"], ["--input", "TEXT"]),
        (["--input", "in.txt", "--output", "no/such/folder/out.txt"], ["no/such/folder", "No such file"]),
        (["--input", "in.txt", "--output", "."], ["--output", "is a folder"]),
        (["--input", "in.txt", "--output", "/", "--overwrite"], ["--output", "is a folder"]),
        (["--input", "in.txt", "--output", ""], ["--output: expected a file"]),
        (["--input", ""], ["--input: expected a file"]),
        (["--input", "in.txt", "--overwrite"], ["--overwrite needs --output FILE"]),
        (["--input", "in.txt", "--resume"], ["--resume needs --output FILE"]),
        (["--input", "in.txt", "--output", "-", "--resume"], ["--resume needs --output FILE"]),
        (["--input", "in.txt", "--output", "out.txt", "--resume", "--overwrite"], ["not allowed with"]),
        (["--input", "/dev/null", "--output", "out.txt", "--resume"], ["--resume needs", "--input FILE"]),
        (["--output", "out.txt", "--resume", "text"], ["--resume needs", "--input FILE"]),
        (["--input", "in.txt", "--output", "/dev/null", "--resume"], ["/dev/null is no regular file"]),
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(
    source: Path,
    fakes: list[FakeTranslator],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(source.parent)
    assert translate(*arguments) == 2
    error = last_error(capsys)
    assert all(part in error for part in parts), error
    assert fakes == []
    assert [path.name for path in source.parent.iterdir()] == ["in.txt"]


def test_a_folder_that_cannot_be_written(
    source: Path, tmp_path: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:  # to whom nothing but the system's own folders is closed
        folder = Path("/proc/self")
    else:
        folder = tmp_path / "closed"
        folder.mkdir(mode=0o555)
    assert translate("--input", source, "--output", folder / "out.txt") == 2
    assert str(folder / "out.txt") in last_error(capsys)
    assert fakes[0].texts == []


def test_a_device_is_written_without_more_ado(source: Path, fakes: list[FakeTranslator]) -> None:
    assert translate("--input", source, "--output", "/dev/null") == 0
    assert fakes[0].texts == ["one", "two", "three"]


def test_a_device_without_room_is_said(
    source: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate("--input", source, "--output", "/dev/full") == 2
    assert last_error(capsys) == "metrale: error: /dev/full: No space left on device, after 0 lines"


def test_a_named_pipe_is_read_and_written(tmp_path: Path, output: Path, fakes: list[FakeTranslator]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    os.mkfifo(source)
    os.mkfifo(target)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=source.write_bytes, args=(LINES,)),
        threading.Thread(target=lambda: found.append(target.read_bytes())),
    ]
    for thread in threads:
        thread.start()
    assert translate("--input", source, "--output", target) == 0
    for thread in threads:
        thread.join()
    assert found == [b"ONE\nTWO\nTHREE\n"]


def test_a_pipe_s_lines_in_a_file_have_no_record(tmp_path: Path, output: Path, fakes: list[FakeTranslator]) -> None:
    source = tmp_path / "source"
    os.mkfifo(source)
    thread = threading.Thread(target=source.write_bytes, args=(b"one\nfault\n",))
    thread.start()
    assert translate("--input", source, "--output", output) == 4
    thread.join()
    assert output.read_bytes() == b"ONE\n"
    assert not Path(f"{output}.resume").exists()


def test_an_output_whose_record_cannot_be_written_is_not_begun(
    source: Path,
    output: Path,
    fakes: list[FakeTranslator],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.txt.resume")

    monkeypatch.setattr(os, "replace", full)
    assert translate("--input", source, "--output", output) == 2
    assert last_error(capsys) == "metrale: error: out.txt.resume: No space left on device"
    assert not output.exists()
    output.write_bytes(b"mine\n")
    assert translate("--input", source, "--output", output, "--overwrite") == 2
    assert output.read_bytes() == b"mine\n"


def test_one_process_writes_an_output(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_bytes(b"theirs\n")
    with open(output, "rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        assert translate("--input", source, "--output", output, "--overwrite") == 2
    assert last_error(capsys) == f"metrale: error: {output}: another process is writing it"
    assert output.read_bytes() == b"theirs\n"


def test_a_file_that_only_has_the_record_s_name_stays(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    record = Path(f"{output}.resume")
    record.write_text("my own notes\n")
    for option in ([], ["--resume"], ["--overwrite"]):
        assert translate("--input", source, "--output", output, *option) == 2
        assert f"{record}: is no record" in last_error(capsys)
    assert record.read_text() == "my own notes\n"
    assert not output.exists()
