# SPDX-License-Identifier: MIT OR Apache-2.0
"""What shows that the CUDA backend is right, in one command: `python -m benchmarks.gpu_evidence`, where there is a GPU.

It runs the GPU tests as they are and with kernels compiled to PTX for compute capability 8.0, NVIDIA's memory checkers
over the ops and a few translations and searches, a planted overrun that the checker must find, and every mutant of the
kernels. The steps run side by side, spread over the GPUs there are, and so do parts of the tests. One JSON file says
what was run on what, and how each step ended; the exit code is 0 when all of them ended as they should, and 2, before
anything is run, when there is no GPU or no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import ROOT
from metrale.bench.machine import describe

PACKAGES: Final = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "nvmath-python", "cuda-bindings", "pytest", "ml_dtypes")
FOUND: Final = 9
"""The exit code with which a memory checker says that it found something."""
TAIL_LINES: Final = 25
MEASURED: Final = "measured: "
"""What begins a line in which a test says a figure."""
PYTHON: Final = "python3"
"""Stands in commands for the interpreter that runs this."""

PYTEST: Final = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--require-gpu", "--more")
OPS: Final = "tests/ops/test_conformance.py"
MODEL: Final = "tests/gpu/test_short_run.py"
LAUNCH_COST: Final = "tests/gpu/test_launch_cost.py"
"""Runs before everything else: beside other steps it would measure them."""

LIVE: Final = ("tests/parity/test_live.py", "tests/family/test_live.py", "tests/nllb/test_texts_live.py")
"""Left out: nothing of them runs on a GPU, and where they can, they import torch."""

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "beams and adapters": (
        "tests/gpu/test_beams.py",
        "tests/nllb/test_beam_golden.py",
        "tests/nllb/test_model_adapters.py",
        "tests/nllb/test_model_adapter_slots.py",
        "tests/nllb/test_model_adapter_loading.py",
        "tests/parity",
    ),
    "ops": ("tests/ops",),
    "device layer": ("tests/gpu_runtime", "tests/gpu/test_foreign.py", "tests/gpu/test_foreign_capture.py"),
    "interface": ("tests/model",),
    "searches": (
        "tests/nllb/test_model_beam_calls.py",
        "tests/nllb/test_model_beam_mixes.py",
        "tests/nllb/test_model_beam_orders.py",
        "tests/nllb/test_model_beams.py",
        "tests/nllb/test_search.py",
    ),
    "model": ("tests/nllb",),
    "others": ("tests",),
}
"""The tests, in parts that run side by side: folders and files, each part without what those before it have."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command, the exit code it must end with, a text that its output must then have, and whether it runs alone."""

    name: str
    command: tuple[str, ...]
    expected: int = 0
    text: str = ""
    alone: bool = False


FORMER: Final = ("-k", "not -linear- and not beam and not lora")
BEAMS: Final = ("-k", "beam or lora")
FLOAT32: Final = ("-k", "float32")
"""cuBLASLt's kernels for 16-bit types on Hopper move data by the bulk copy engine. Racecheck does not follow its
ordering and reports hazards inside them; initcheck does not see what it writes. So racecheck leaves out the op that is
a product, `linear` (a name in parameters of a test has dashes around it), and both see the model in float32, whose
products run on other kernels. What 16-bit passes read is held to have been written by the checked host backend.
Racecheck takes longest, so it has the ops in two steps."""


def sanitizer(tool: str, *command: str) -> tuple[str, ...]:
    """Return a command under one of compute-sanitizer's tools, which judges kernels, not calls that return errors."""
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return (find_sanitizer(), "--tool", tool, *options, "--error-exitcode", str(FOUND), *command)


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer, or its bare name when it is not found: `refusal` then says so."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else "compute-sanitizer")


def steps(workers: int) -> list[Step]:
    """Return all steps, the longest first."""
    checked = [
        Step(f"{tool}, {what}", sanitizer(tool, *PYTEST, "--no-pool", *target))
        for tool, what, target in (
            ("racecheck", "ops", (OPS, *FORMER)),
            ("racecheck", "ops of beams and adapters", (OPS, *BEAMS)),
            ("racecheck", "model", (MODEL, *FLOAT32)),
            ("initcheck", "ops", (OPS,)),
            ("initcheck", "model", (MODEL, *FLOAT32)),
            ("memcheck", "ops", (OPS,)),
            ("memcheck", "model", (MODEL,)),
        )
    ]
    planted = sanitizer("memcheck", PYTHON, "-m", "tests.gpu.planted")
    return [
        Step("launch cost", (*PYTEST, LAUNCH_COST), alone=True),
        Step("kernel mutants", (PYTHON, "-m", "tests.mutation", "--kernels", "--workers", str(workers))),
        *checked,
        *tests("tests"),
        *tests("tests, compute_80", "--gpu-arch", "compute_80"),
        Step("planted overrun", planted, FOUND, "Invalid __global__ write of size 4 bytes"),
    ]


def tests(name: str, *options: str) -> list[Step]:
    """Return a step for each of `PARTS`."""
    found, before = [], [LAUNCH_COST, *LIVE]
    for part, paths in PARTS.items():
        without = (f"--ignore={path}" for path in before if path not in paths)
        found.append(Step(f"{name}: {part}", (*PYTEST, *options, *paths, *without)))
        before += paths
    return found


def refusal(chosen: Sequence[Step]) -> str | None:
    """Return why these steps cannot be run on this machine, or None. A GPU is tried in a process of its own."""
    if any(step.command[0] == "compute-sanitizer" for step in chosen):
        return (
            "compute-sanitizer is not found, on PATH or in /usr/local/cuda/bin; it comes with the CUDA toolkit "
            "(--skip check --skip planted leaves out what needs it)"
        )
    opened = "from gpu_runtime import open_backend; open_backend('cuda').close()"
    done = subprocess.run([sys.executable, "-c", opened], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no GPU can be used: {(done.stderr.splitlines() or [f'exit code {done.returncode}'])[-1]}"
    return None


def run(step: Step, seconds: float, device: int = 0) -> dict[str, Any]:
    """Run one step, on the GPU of this number alone, and return how it ended."""
    began = time.monotonic()
    command = [sys.executable if word == PYTHON else word for word in step.command]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output:
        try:
            code: int | str = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": str(device)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = "timeout"
        except OSError as error:
            code = f"not started: {error}"
        took = time.monotonic() - began
        output.seek(0)
        text = output.read()
    lines = text.replace(str(ROOT) + os.sep, "").replace(sys.executable, PYTHON).splitlines()
    ended_well = code == step.expected and step.text in text
    print(f"{'ok' if ended_well else 'FAILED':8}{step.name:38}{took:7.1f} s  {summary_of(lines)}", flush=True)
    return {
        "step": step.name,
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in step.command),
        "returncode": code,
        "expected": step.expected,
        "expected_text": step.text,
        "ok": ended_well,
        "seconds": round(took, 1),
        "measured": [line.split(MEASURED, 1)[1] for line in lines if MEASURED in line],
        "tail": lines[-TAIL_LINES:],
    }


def summary_of(lines: Sequence[str]) -> str:
    """Return the line of an output that says most: a checker's or pytest's summary, or the last."""
    for mark in ("ERROR SUMMARY", "RACECHECK SUMMARY", " passed", " failed", "mutants, "):
        for line in reversed(lines):
            if mark in line:
                return line.strip("= ")[:100]
    return lines[-1][:100] if lines else "no output"


def machine(commit: str | None) -> dict[str, Any]:
    """Return the GPU, driver, processor and versions, and the commit (by default, what git says)."""
    query = "name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        gpus = [f"unknown: {error}"]
    found = describe(*PACKAGES)
    found["commit"] = commit or found["commit"]
    return {"gpus": [dict(zip(query.split(","), gpu.split(", "), strict=False)) for gpu in gpus], **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_evidence.json")
    parser.add_argument("--commit", help="what the tree is, where git does not know")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only steps whose name has this")
    parser.add_argument("--skip", action="append", default=[], metavar="TEXT", help="no steps whose name has this")
    parser.add_argument("--jobs", type=int, default=16, help="steps that run side by side")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 4) // 2), help="of the mutants")
    parser.add_argument("--timeout", type=float, default=500.0, metavar="SECONDS", help="for one step")
    options = parser.parse_args()
    chosen = [
        step
        for step in steps(options.workers)
        if (not options.only or any(text in step.name for text in options.only))
        and not any(text in step.name for text in options.skip)
    ]
    if not chosen:
        parser.error("no step has such a name")
    if reason := refusal(chosen):
        parser.error(reason)
    found = machine(options.commit)
    devices = itertools.cycle(range(len(found["gpus"])))
    began = time.monotonic()
    results = [run(step, options.timeout) for step in chosen if step.alone]
    with ThreadPoolExecutor(options.jobs) as pool:
        together = [step for step in chosen if not step.alone]
        results += pool.map(run, together, itertools.repeat(options.timeout), devices)
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": found,
        "ok": all(result["ok"] for result in results),
        "seconds": round(time.monotonic() - began, 1),
        "steps": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(result['ok'] for result in results)} of {len(results)} steps ended as they should; {options.output}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
