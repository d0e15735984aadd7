# SPDX-License-Identifier: MIT OR Apache-2.0
"""The runner and the judgement: every kind of bad end is noticed, in a process of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from metrale.errors import CheckpointError, InvalidInput
from tests.hostile import case as limits
from tests.hostile.case import Answer, Case, Outcome, Refusal, complaint
from tests.hostile.zygote import run_one

REFUSAL = Refusal("InvalidInput", "expected a number", argument="count")


def raise_it(error: BaseException) -> object:
    raise error


def crash() -> object:
    return ctypes.string_at(0)


def busy() -> object:
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    return 1


def leave(path: str) -> object:
    Path(path).write_text("left")
    return 1


def child() -> object:
    return subprocess.run([sys.executable, "-c", ""], check=False).returncode


ENDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a crash": (lambda _: crash(), "expected a value or an exception"),
    "an exit": (lambda _: os._exit(0), "expected a value or an exception"),
    "an abort": (lambda _: os.abort(), "expected a value or an exception"),
    "another value": (lambda _: 2, "expected the value 1"),
    "no error": (lambda _: raise_it(ValueError("expected a number")), "expected the value 1"),
    "memory": (lambda _: len(bytearray(limits.MOST_MEMORY + (64 << 20))), "expected the value 1"),
    "time": (lambda _: busy(), "s of processor time"),
    "a file in its folder": (lambda folder: leave(f"{folder}/new"), "changed input/new"),
    "a changed file": (lambda folder: leave(f"{folder}/there"), "changed input/there"),
    "a removed file": (lambda folder: os.remove(folder / "there"), "os.remove"),
    "a file where it stands": (lambda _: leave("new"), "changed home/new"),
    "a file elsewhere": (lambda _: leave("/tmp/metrale-hostile-test"), "opened /tmp/metrale-hostile-test to write"),
    "a process": (lambda _: child(), "subprocess.Popen"),
    "a shell": (lambda _: os.system("true"), "os.system"),
    "an environment": (lambda _: os.environ.update(METRALE_X="1") or 1, "os.putenv"),
    "a long message": (lambda _: raise_it(KeyError("x" * 30_000)), "a message of 300"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_bad_end_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CPU_S", 0.1)
    run, expected = ENDS[name]
    one = Case(name, run, Answer(1), lambda folder: (folder / "there").write_text("there"))
    try:
        wrong = complaint(one, run_one(one, tmp_path))
    finally:
        Path("/tmp/metrale-hostile-test").unlink(missing_ok=True)
    assert wrong is not None
    assert expected in wrong


def test_a_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hostile.child.MOST_WALL_S", 1)
    one = Case("hangs", lambda _: time.sleep(100), Answer(None))
    outcome = run_one(one, tmp_path)
    assert (outcome.kind, outcome.exit_code) == ("signal", -14)
    assert complaint(one, outcome) == "expected a value or an exception"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    one = Case("broken", lambda _: 1, Answer(1), lambda folder: raise_it(OSError("no")))
    outcome = run_one(one, tmp_path)
    assert (outcome.kind, outcome.error) == ("broken", "OSError")
    assert complaint(one, outcome) is not None


def test_a_good_end_is_good(tmp_path: Path) -> None:
    one = Case("good", lambda _: {"a": [1, None]}, Answer({"a": [1, None]}))
    assert complaint(one, run_one(one, tmp_path)) is None


WRONG_REFUSALS: dict[str, BaseException] = {
    "another class": TypeError("count: expected a number, got 3"),
    "another argument": InvalidInput("counts", "a number", 3),
    "another expectation": InvalidInput("count", "a name", 3),
}


@pytest.mark.parametrize("name", WRONG_REFUSALS)
def test_a_refusal_must_say_what_it_should(name: str, tmp_path: Path) -> None:
    one = Case(name, lambda _: raise_it(WRONG_REFUSALS[name]), REFUSAL)
    assert complaint(one, run_one(one, tmp_path)) is not None


def test_a_refusal_that_says_it(tmp_path: Path) -> None:
    one = Case("right", lambda _: raise_it(InvalidInput("count", "a number", "x")), REFUSAL)
    assert complaint(one, run_one(one, tmp_path)) is None
    many = CheckpointError(tmp_path, ["a: is gone", "b: is gone"])
    for problems, path, right in ((2, tmp_path.name, True), (1, tmp_path.name, False), (2, "other", False)):
        refusal = Refusal("CheckpointError", "b: is", path=path, problems=problems)
        two = Case("two", lambda _: raise_it(many), refusal)
        assert (complaint(two, run_one(two, tmp_path)) is None) is right


def test_what_is_told_of_an_outcome() -> None:
    assert "-11" in Outcome("signal", exit_code=-11).told()
    assert "returned 3" in Outcome("value", 3).told()
    assert "KeyError: 'x'" in Outcome("error", error="KeyError", message="'x'").told()
