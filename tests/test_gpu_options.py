# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a run of the tests treats a missing GPU: never in silence."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = "tests/gpu_runtime/test_arena.py"  # most of them need no device


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest where no GPU can be seen."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_tests_on_a_gpu_are_left_out_and_the_summary_says_so() -> None:
    done = run(TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tests need a GPU and were left out: cuda" in done.stdout
    assert "2 deselected" in done.stdout


SIDE_BY_SIDE = pytest.param(
    ("-n", "2"),
    id="side by side",
    marks=pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="the extra dev brings pytest-xdist"),
)


@pytest.mark.parametrize("workers", [pytest.param((), id="one process"), SIDE_BY_SIDE])
def test_asking_for_them_alone_is_no_success(workers: tuple[str, ...]) -> None:
    done = run("-m", "gpu", *workers, TESTS)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "2 tests need a GPU and were left out: cuda" in done.stdout


@pytest.mark.parametrize("options", [("-m", "gpu", TESTS), (TESTS,), ("--gpu-arch", "compute_80", "-m", "gpu")])
def test_requiring_a_gpu_fails_at_once(options: tuple[str, ...]) -> None:
    done = run("--require-gpu", *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require-gpu: cuda" in done.stderr
    assert "passed" not in done.stdout
