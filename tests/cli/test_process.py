# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command as a process of its own: entry points, programs at the other ends of its pipes, bounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import metrale
from tests.cli.process import ROOT, SECONDS, errors_of, started


@pytest.mark.parametrize("module", ["metrale", "metrale.cli"])
def test_python_m(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"metrale {metrale.__version__}\n".encode(), b"")


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    with started("translate", "--max-batch", "1", "--to", "fra_Latn") as (process, source, result):
        source.write(b"Hello\n" * 24)
        source.close()
        assert result.readline() == b"Bonjour\n"
        result.close()
        assert process.wait(SECONDS) == 0
        errors = errors_of(process)
    assert len(errors) == 1
    assert "demo model" in errors[0]


def test_a_program_can_send_a_line_and_wait_for_the_answer_and_ctrl_c_is_130() -> None:
    with started("translate", "--to", "fra_Latn") as (process, source, result):
        for _ in range(2):
            source.write(b"The garage door is open.\n")
            source.flush()
            assert result.readline() == b"La porte du garage est ouverte.\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert errors_of(process)[-1] == "metrale: interrupted after 2 lines"


def test_a_program_can_send_a_pair_and_wait_for_its_score() -> None:
    with started("score", "--from", "eng_Latn", "--to", "fra_Latn", "--quiet") as (process, source, result):
        for pairs in (1, 1, 3):
            source.write(b"The garage door is open.\tLa porte du garage est ouverte.\n" * pairs)
            source.flush()
            assert len({result.readline() for _ in range(pairs)}) == 1
        source.write(b"no pair\n")
        source.flush()
        assert process.wait(SECONDS) == 2
        assert "line 6: expected a text, a tab" in errors_of(process)[-1]


def test_a_consumer_that_does_not_read_stops_the_intake() -> None:
    """Lines of 1 KiB: the pipes take 64 KiB each, the command reads as much ahead, and answers are not dropped."""
    options = ("--to", "fra_Latn", "--json", "--quiet", "--max-batch", "4", "--max-new-tokens", "2")
    lines = [b"%d" % number + b" " * 1017 + b"\n" for number in range(1000, 1800)]
    with started("translate", *options) as (process, source, result):
        written: list[int] = []

        def feed() -> None:
            for number, line in enumerate(lines):
                source.write(line)
                written[:] = [number]
            source.close()

        feeder = threading.Thread(target=feed)
        feeder.start()
        previous = None
        while previous != written:
            previous = written.copy()
            feeder.join(1.0)
        assert written[0] < 500
        texts = [json.loads(answer)["source_text"].strip() for answer in result]
        feeder.join()
        assert process.wait(SECONDS) == 0
    assert texts == [str(number) for number in range(1000, 1800)]


MEASURED = """
import sys
from metrale.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM:")), file=sys.stderr)
sys.exit(code)
"""
"""The command, and the most memory in KiB that its process had. What ``wait4`` says begins with the parent's."""


@pytest.mark.skipif(sys.platform != "linux", reason="the most memory is read from Linux's /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The longer file has 18 MiB of text more, and its output as much again."""
    peaks = []
    for lines in (100, 900):
        source, output = tmp_path / f"{lines}.txt", tmp_path / f"{lines}.json"
        source.write_text("".join(f"{number if number % 4 else ''}{' ' * 24576}\n" for number in range(lines)))
        options = ("--to", "fra_Latn", "--json", "--quiet", "--max-new-tokens", "2", "--device", "host")
        with started("translate", *options, "--input", source, "--output", output, script=MEASURED) as (process, _, _):
            (peak,) = errors_of(process)
            assert process.wait(SECONDS) == 0
        peaks.append(int(peak))
        with open(output, encoding="utf-8") as file:
            texts = [json.loads(line)["source_text"].strip() for line in file]
        assert texts == [str(number) if number % 4 else "" for number in range(lines)]
    assert peaks[1] - peaks[0] < 8 << 10, f"{peaks} KiB"
