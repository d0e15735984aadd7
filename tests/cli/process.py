# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[2]
# A test runner in the background may ignore SIGINT, and a child inherits that: restore Python's handler.
MAIN: Final = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from metrale.cli import main
sys.exit(main(sys.argv[1:]))
"""
SECONDS: Final = 60.0
"""Far more than anything takes: only a command that hangs is stopped by it."""


@contextmanager
def started(
    *arguments: object, script: str = MAIN, **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """Start ``metrale`` with pipes; give the process, its input and its output. It is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **{"stderr": subprocess.PIPE, **options},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


def errors_of(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the lines that it wrote to standard error, to its end."""
    assert process.stderr is not None
    return process.stderr.read().decode().splitlines()


def run_to_end(*arguments: object) -> tuple[int, list[str]]:
    """Run ``metrale`` without input; return its exit code and its errors."""
    with started(*arguments) as (process, source, _):
        source.close()
        errors = errors_of(process)
        return process.wait(SECONDS), errors


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Return True once the condition holds, False when the process has ended before."""
    limit = time.monotonic() + SECONDS
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < limit, "it does not get there"
        time.sleep(0.002)
    return True
