# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signals, kills and full disks in the middle of a file, with the demo model: nothing that was finished is lost."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from metrale.cli.journal import record_path
from metrale.demo import demo_model_path
from tests.cli.process import SECONDS, errors_of, run_to_end, started, wait_until

GOLDEN: list[dict[str, Any]] = json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))["cases"]
CASES = sorted(
    (case for case in GOLDEN if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn")),
    key=lambda case: len(case["greedy"]["ids"]),
)[:8]
LINES = 24
TEXTS = [CASES[index % len(CASES)]["text"] for index in range(LINES)]
EXPECTED = "".join(f"{CASES[index % len(CASES)]['greedy']['text']}\n" for index in range(LINES)).encode()
OPTIONS = ("--device", "host", "--dtype", "float32", "--to", "fra_Latn", "--max-batch", "4")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return source, tmp_path / "out.txt"


def arguments(files: tuple[Path, Path], *options: str) -> list[object]:
    return ["translate", *OPTIONS, "--input", files[0], "--output", files[1], *options]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_killed_at_random_moments_and_resumed_it_is_the_same_file(files: tuple[Path, Path]) -> None:
    _, output = files
    moments = random.Random(7)
    kills = 0
    for share in (0.0, 0.3, 0.7):
        with started(*arguments(files, "--resume")) as (process, _, _):
            aim = share * len(EXPECTED) + moments.randrange(100)
            if wait_until(lambda aim=aim: size(output) > aim, process):  # type: ignore[misc]
                process.kill()
                kills += 1
            process.wait(SECONDS)
        assert EXPECTED.startswith(output.read_bytes())
        assert record_path(output).exists()
    assert kills == 3
    code, errors = run_to_end(*arguments(files, "--resume"))
    assert (code, output.read_bytes()) == (0, EXPECTED)
    assert any(line.startswith("metrale: note: going on after ") for line in errors)
    assert not record_path(output).exists()


@pytest.mark.more
def test_draws_go_on_as_they_would_have(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A text's draws depend on its number in the file, so a resumed run draws what an uninterrupted one would."""
    source, output = files
    source.write_text("".join(f"{text}\n" for text in TEXTS[:24]), encoding="utf-8")
    drawn = ("--temperature", "1.5", "--seed", "3", "--max-new-tokens", "12", "--quiet")
    whole = tmp_path / "whole.txt"
    assert run_to_end(*arguments((source, whole), *drawn)) == (0, [])
    with started(*arguments(files, *drawn)) as (process, _, _):
        assert wait_until(lambda: size(output) > 0.3 * size(whole), process)
        process.kill()
        process.wait(SECONDS)
    assert run_to_end(*arguments(files, "--resume", *drawn)) == (0, [])
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_whole_lines_and_says_how_many(
    files: tuple[Path, Path], number: signal.Signals, code: int
) -> None:
    _, output = files
    with started(*arguments(files)) as (process, _, _):
        assert wait_until(lambda: size(output) > 0.2 * len(EXPECTED), process)
        process.send_signal(number)
        errors = errors_of(process)
        assert process.wait(SECONDS) == code
    written = output.read_bytes()
    assert 0 < len(written) < len(EXPECTED)
    assert written.endswith(b"\n")
    assert EXPECTED.startswith(written)
    lines = written.count(b"\n")
    assert errors == [errors[0], f"metrale: interrupted after {lines} lines; --resume goes on"]
    if number == signal.SIGINT:
        assert run_to_end(*arguments(files, "--resume"))[0] == 0
        assert output.read_bytes() == EXPECTED


def test_a_second_signal_ends_it_at_once(files: tuple[Path, Path]) -> None:
    """Standard output is full and nobody reads it, so that the first signal cannot be followed."""
    source, _ = files
    source.write_text("Hello\n" * 1000)
    with started("translate", *OPTIONS, "--json", "--input", source, "--max-new-tokens", "2", "-q") as (
        process,
        _,
        result,
    ):
        assert result.read(1) == b"{"
        previous = -1
        while previous != (position := cpu_ticks(process.pid)):  # it has come to rest
            previous = position
            assert not wait_for(process, 0.5)
        process.send_signal(signal.SIGINT)
        assert not wait_for(process, 0.5), "the line that it is writing is not broken off"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == -signal.SIGINT


def test_a_signal_before_the_first_line(files: tuple[Path, Path]) -> None:
    with started("translate", *OPTIONS) as (process, source, _):
        source.write(b"Hello\n")
        source.flush()
        process.stdout.readline()  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 143
        assert errors_of(process)[-1] == "metrale: interrupted after 1 line"


def test_a_full_disk_keeps_what_is_written(files: tuple[Path, Path]) -> None:
    """A limit of the process stands for the disk: a write is cut short, and the next one fails."""
    source, output = files
    source.write_text("The garage door is open.\n" * 70)
    line = b"La porte du garage est ouverte.\n"
    room = 66 * len(line) + 5  # more than the record needs

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    with started(*arguments(files), preexec_fn=limit) as (process, _, _):
        errors = errors_of(process)
        assert process.wait(SECONDS) == 2
    assert errors[-1] == f"metrale: error: {output}: File too large, after 66 lines"
    assert errors[-2] == "metrale: note: 66 lines written; --resume goes on"
    assert output.read_bytes() == line * 66
    assert run_to_end(*arguments(files, "--resume"))[0] == 0
    assert output.read_bytes() == line * 70


def cpu_ticks(pid: int) -> int:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether the process ends in this time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
