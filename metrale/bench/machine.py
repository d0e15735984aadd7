# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a benchmark ran on, for its JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from gpu_runtime import GpuBackend

GPU_PACKAGES: Final = ("cupy-cuda12x", "cupy-cuda13x", "nvmath-python", "nvidia-cublas", "nvidia-cublas-cu12")
"""The packages by whose versions a GPU's figures differ."""

SMI_FIELDS: Final = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.limit,temperature.gpu,pstate"
)
_CHECKOUT: Final = Path(__file__).parents[2]
_MEASURED: Final = ("gpu_runtime", "metrale", "kernels", "benchmarks/*.py")
"""What a change counts in, of the files that git knows."""


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
    """Return the checkout's commit, or "unknown": an installed package may lie in another program's checkout."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=_CHECKOUT, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != _CHECKOUT.resolve():
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")


def describe_gpu(gpu: GpuBackend) -> dict[str, Any]:
    """Return what the device is, and what nvidia-smi reads of it now."""
    found: dict[str, Any] = {
        "kind": gpu.kind(),
        "name": gpu.name(),
        "sm_count": gpu.sm_count(),
        "memory_bytes": gpu.total_memory(),
    }
    return found | {"nvidia_smi": read_smi()} if gpu.kind() == "cuda" else found


def read_smi() -> dict[str, str]:
    """Return clocks and the like as nvidia-smi reads them of the first GPU, or why it does not."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    values = done.stdout.splitlines()[0].split(",")
    return {name: value.strip() for name, value in zip(SMI_FIELDS.split(","), values, strict=False)}
