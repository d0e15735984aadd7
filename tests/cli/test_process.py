# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command as a process of its own: entry points, pipes that close, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import metrale

ROOT = Path(__file__).parents[2]
# A test runner in the background may ignore SIGINT, and a child inherits that: restore Python's handler.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from metrale.cli import main
sys.exit(main(sys.argv[1:]))
"""
SECONDS = 60.0  # far more than it takes: only a command that hangs is stopped by it


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """Start ``metrale`` with pipes; give the process, its input and its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


def errors_of(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stderr is not None
    return process.stderr.read().decode().splitlines()


@pytest.mark.parametrize("module", ["metrale", "metrale.cli"])
def test_python_m(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"metrale {metrale.__version__}\n".encode(), b"")


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    with started("translate", "--max-batch", "1", "--to", "fra_Latn") as (process, source, result):
        source.write(b"Hello\n" * 24)  # three windows, of which one is read
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
        assert errors_of(process)[-1] == "metrale: interrupted"
