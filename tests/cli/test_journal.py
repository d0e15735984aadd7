# SPDX-License-Identifier: MIT OR Apache-2.0
"""A run that is killed at any system call, or whose machine loses its power, can be gone on with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import main
from metrale.cli.destination import Destination
from metrale.cli.failure import Failure
from metrale.cli.journal import record_path
from metrale.cli.record import Record, State, empty_digest
from tests.cli.conftest import FakeTranslator

TEXTS = ["one", "", "three", "fail", "five and six", "seven"]
EXPECTED = "ONE\n\nTHREE\n\nFIVE AND SIX\nSEVEN\n"
CALLS = ("open", "write", "pwrite", "ftruncate", "fsync", "replace", "unlink")
MOST_CALLS = 200  # far more than a run makes


class Killed(BaseException):
    """What a system call raises in a process that is dead."""


class Mortal:
    """Counts system calls, and from a chosen one on makes them all do nothing, as those of a dead process.

    Parameters
    ----------
    at : int
        The call that is the process's last.
    how : {"before", "half", "after"}
        Whether that call does nothing, writes one half of what it should (other calls: nothing), or all.
    """

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how
        self.calls = 0
        self.opened: list[int] = []

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if number > self.at or (number == self.at and self.how == "before"):
                raise Killed
            if number == self.at and self.how == "half":
                if name in ("write", "pwrite"):
                    original(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                raise Killed
            result = original(*args, **options)
            if name == "open":
                self.opened.append(result)
            if number == self.at:
                raise Killed
            return result

        return call

    def bury(self) -> None:
        """Do what the system does for a dead process: close its files, and so give up its locks."""
        for fd in self.opened:
            try:
                os.close(fd)
            except OSError:
                continue


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def translate(source: Path, *options: str) -> int:
    named = ["--input", source, "--output", source.with_name("out.txt"), "--to", "fra_Latn", "-q", *options]
    return main(["translate", *map(str, named)])


def run_mortal(source: Path, mortal: Mortal, *options: str) -> bool:
    """Run until it is killed; return whether it was."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, mortal.wrap(name, getattr(os, name)))
        try:
            translate(source, *options)
        except Killed:
            return True
        finally:
            patch.undo()
            mortal.bury()
    return False


@pytest.mark.parametrize("how", ["before", "half", "after"])
@pytest.mark.parametrize("first", ["--resume", "--overwrite"])
def test_a_kill_at_any_call_loses_nothing(source: Path, fakes: list[FakeTranslator], how: str, first: str) -> None:
    """The run is killed at its n-th call, then the run that goes on at its n-th, and the third is left alone."""
    output = source.with_name("out.txt")
    before = "THESE\nWERE\nHERE\nBEFORE\nAND\nARE\nNOT\nWANTED\n"
    for at in range(MOST_CALLS):
        for path in (output, record_path(output)):
            path.unlink(missing_ok=True)
        if first == "--overwrite":
            output.write_text(before)
        killed = run_mortal(source, Mortal(at, how), first)
        untouched = output.exists() and output.read_text() == before
        again = "--overwrite" if untouched else "--resume"
        run_mortal(source, Mortal(at, how), again)
        if not (output.exists() and output.read_text() == before):
            again = "--resume"
        assert translate(source, again) in (0, 1)
        assert output.read_text() == EXPECTED, f"killed at call {at}"
        assert not record_path(output).exists()
        if not killed:
            break
    else:
        raise AssertionError("the run makes more calls than were tried")
    assert at > 3 * len(TEXTS)


def test_what_is_written_is_whole_lines_in_order_at_any_call(source: Path, fakes: list[FakeTranslator]) -> None:
    output = source.with_name("out.txt")
    counts = set()
    for at in range(MOST_CALLS):
        for path in (output, record_path(output)):
            path.unlink(missing_ok=True)
        killed = run_mortal(source, Mortal(at, "after"))
        written = output.read_text() if output.exists() else ""
        assert EXPECTED.startswith(written)
        assert written == "" or written.endswith("\n")
        counts.add(written.count("\n"))
        if not killed:
            break
    assert counts == set(range(len(TEXTS) + 1)), "each line is written by itself"


@pytest.mark.parametrize("kept", range(len(TEXTS)))
@pytest.mark.parametrize(
    "tail",
    [b"", b"\0" * 3, b"\0" * 40, b"junk\njunk\n", None],
    ids=["nothing", "few zeros", "zeros", "lines", "what was written"],
)
@pytest.mark.parametrize("newer", ["record", "output"])
def test_power_that_fails_loses_no_more_than_what_was_not_on_the_disk(
    source: Path, fakes: list[FakeTranslator], kept: int, tail: bytes | None, newer: str
) -> None:
    """One of the two files is back at its last sync, the output perhaps with anything behind; the other is newer."""
    output, record = source.with_name("out.txt"), record_path(source.with_name("out.txt"))
    source.write_text("".join(f"{text}\n" for text in [*TEXTS[:kept], "fault"]))
    assert translate(source) == 4  # which syncs
    synced = {path: path.read_bytes() for path in (output, record)}
    source.write_text("".join(f"{text}\n" for text in TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", Mortal(-1, "before").wrap("fsync", os.fsync))  # it is killed at its next sync
        with pytest.raises(Killed):
            translate(source, "--resume")
    assert output.read_text() == EXPECTED
    if newer == "record":
        output.write_bytes(synced[output] + (output.read_bytes()[len(synced[output]) :][:9] if tail is None else tail))
    else:
        record.write_bytes(synced[record])
    left = output.read_bytes()
    if not kept and b"\n" in left:  # no line was on the disk, and whose these are, nothing says
        assert translate(source, "--resume") == 2
        assert output.read_bytes() == left
        return
    assert translate(source, "--resume") == 1
    assert output.read_text() == EXPECTED
    assert not record.exists()


# the record


STATE = State(3, 17, 1, "ab" * 16, "cd" * 16)


def test_a_record_says_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "out.txt.resume"
    record = Record.create(path, {"--to": "fra_Latn"})
    assert record.states == [State(0, 0, 0, empty_digest(), empty_digest())]
    size = path.stat().st_size
    later = State(4, 30, 1, "ef" * 16, "01" * 16)
    record.note(STATE)
    record.note(later)
    record.settle(STATE)
    record.close()
    record.close()
    again = Record(path)
    assert again.fingerprint == {"--to": "fra_Latn"}
    assert again.states == [later, STATE]
    assert path.stat().st_size == size, "it does not grow"
    again.remove()
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_is_not_whole_is_none(tmp_path: Path) -> None:
    path = tmp_path / "out.txt.resume"
    record = Record.create(path, {})
    for state in (STATE, State(4, 30, 1, "ef" * 16, "01" * 16)):
        record.note(state)
    record.close()
    data = path.read_bytes()
    slots = [match.start() for match in re.finditer(rb" +3 +17 ", data)]
    assert len(slots) == 1
    for position in range(slots[0], slots[0] + 120, 7):
        path.write_bytes(data[:position] + b"#" + data[position + 1 :])
        again = Record(path)
        again.close()
        assert [state.lines for state in again.states] == [4, 0]


@pytest.mark.parametrize("name", ["out.resume.new", "out.resume.tmp"])
def test_no_file_of_another_name_is_touched(tmp_path: Path, name: str) -> None:
    """A record is written whole or not at all, by way of a file that nobody else has."""
    victim, source, output = tmp_path / name, tmp_path / "in.txt", tmp_path / "out"
    victim.write_text("precious")
    source.write_text("one\n")
    Record.create(record_path(output), {"a": 1}).close()
    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {name, "in.txt", "out.resume"}


def test_an_empty_output_that_is_written_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.touch()
    destination = Destination(output, "begin", resumable=True)
    output.write_text("finished by somebody else\n")
    with pytest.raises(Failure, match="another process has written it meanwhile"):
        destination.open(None, dict)
    assert output.read_text() == "finished by somebody else\n"
