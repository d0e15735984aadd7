# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a benchmark ran on, for its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(*packages: str, commit: str | None = None) -> dict[str, Any]:
    """Return the processor, the versions of the named packages, and the commit (marked when the tree has changes).

    ``commit`` says it where git cannot.
    """
    return {
        "cpu": _cpu(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "commit": commit or _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    measured = ("gpu_runtime", "metrale", "kernels", "benchmarks/*.py")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *measured)
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")
