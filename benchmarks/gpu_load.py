# SPDX-License-Identifier: MIT OR Apache-2.0
"""How fast a checkpoint comes onto the device from the page cache, beside the rate of page-locked copies.

    python -m benchmarks.gpu_load --output gpu_load.json

runs where a GPU is. A checkpoint of random weights is written for each stored type and is in the page cache then. In a
process of its own for each case, page-locked copies of as many bytes and loads of the weights take turns. A load is
everything from the plan of the weights to the last byte on the device. Sending is that without the plan, and without
allocating and freeing device and page-locked memory, as the copies are measured too. One more load, of the whole
model, is watched for the anonymous memory that it takes (`RssAnon`, Linux). The exit status is 1 when a case of equal
types sends at less than `LEAST_SHARE` of the copies, or takes more than `SPARE_BYTES` beside the size of the
checkpoint.

`--device host --shape tiny` goes through all of it on a machine without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import metrale
from benchmarks import ROOT
from gpu_runtime import GpuBackend, open_backend
from metrale.bench.machine import describe
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.checkpoint import Checkpoint, open_checkpoint
from metrale.nllb import device_weights
from metrale.nllb.config import NllbConfig
from metrale.nllb.device_weights import load_weights
from metrale.nllb.limits import ModelShape
from metrale.nllb.staging import SLOT_BYTES, Staging, Transfer
from metrale.nllb.weights import match_weights

CASES: Final = (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16"))
"""Stored type and the device's."""

LEAST_SHARE: Final = 0.6
SPARE_BYTES: Final = 1 << 30
LIMITS: Final[dict[str, Any]] = {"max_batch": 8, "max_source_len": 64, "max_new_tokens": 64}
PINNED_SLOTS: Final = 8


def copy_seconds(gpu: GpuBackend, nbytes: int) -> float:
    """Return the seconds that page-locked copies of ``nbytes`` in all take, in pieces as large as the loader's."""
    room = min(SLOT_BYTES, nbytes)
    target = gpu.alloc(room * PINNED_SLOTS)
    memory = gpu.alloc_host_pinned(room * PINNED_SLOTS)
    stream = gpu.create_stream()
    try:
        memory.array[:] = 1
        began = time.perf_counter()
        for index in range(max(1, nbytes // room)):
            at = index % PINNED_SLOTS * room
            gpu.copy_h2d_async(memory.array[at : at + room], target.offset(at), stream)
        gpu.synchronize(stream)
        return time.perf_counter() - began
    finally:
        gpu.destroy_stream(stream)
        gpu.free_host_pinned(memory)
        gpu.free(target)


class Sending:
    """How long `device_weights.send` takes, without allocating and freeing page-locked memory."""

    seconds = 0.0

    @classmethod
    def watch(cls) -> None:
        """Note the time of each from here on."""
        send = device_weights.send  # type: ignore[attr-defined]

        def timed(gpu: GpuBackend, transfers: Sequence[Transfer]) -> None:
            began, Sending.seconds = time.perf_counter(), 0.0
            send(gpu, transfers)
            Sending.seconds += time.perf_counter() - began

        device_weights.send = timed  # type: ignore[attr-defined]
        cls._leave_out(Staging, "__init__")
        with suppress(ImportError):  # where no CUDA is
            from gpu_runtime.cuda.file_copies import Slots
            from gpu_runtime.cuda.memory import _Pinned

            cls._leave_out(Slots, "__init__")
            cls._leave_out(_Pinned, "__del__")

    @staticmethod
    def _leave_out(kind: Any, name: str) -> None:
        """Take the time of making or of freeing one of these off."""
        call = getattr(kind, name)

        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            call(*arguments)
            Sending.seconds -= time.perf_counter() - began

        setattr(kind, name, timed)


def load_seconds(gpu: GpuBackend, shape: ModelShape, config: NllbConfig, checkpoint: Checkpoint) -> tuple[float, float]:
    """Return the seconds that loading the weights takes, and those of sending alone; the weights are freed."""
    found = match_weights(config, checkpoint)
    began = time.perf_counter()
    weights = load_weights(gpu, shape, checkpoint, found)
    took = time.perf_counter() - began
    weights.arena.free()
    return took, Sending.seconds


def anonymous_bytes() -> int | None:
    """Return the process's anonymous memory, or None where it cannot be read."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def watched_load(folder: Path, device: str, dtype: str) -> dict[str, Any]:
    """Return what loading the whole model takes: seconds, and anonymous memory before it and at most."""
    before = anonymous_bytes()
    peak, stop = before or 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, anonymous_bytes() or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    model = metrale.load(folder, device, dtype, **LIMITS)
    took = time.perf_counter() - began
    stop.set()
    watcher.join()
    total = model.memory_plan().total
    model.close()
    known = before is not None
    return {
        "seconds": round(took, 3),
        "memory_plan_bytes": total,
        "rss_anon_before_bytes": before,
        "rss_anon_peak_bytes": peak if known else None,
    }


def measure(folder: Path, device: str, dtype: str, runs: int) -> dict[str, Any]:
    """Return one case, measured in this process."""
    whole = watched_load(folder, device, dtype)
    config = NllbConfig.from_dir(folder)
    with open_backend(device) as gpu, open_checkpoint(folder) as checkpoint:
        model = metrale.load(folder, gpu, dtype, **LIMITS)
        shape, nbytes = model.shape, model.memory_plan().weights
        model.close()
        Sending.watch()
        copies, loads, sends = [], [], []
        for _ in range(runs):
            copies.append(copy_seconds(gpu, nbytes))
            loaded, sent = load_seconds(gpu, shape, config, checkpoint)
            loads.append(loaded)
            sends.append(sent)
    return {
        "weight_bytes": nbytes,
        "copy_bytes_per_s": [round(nbytes / took) for took in copies],
        "send_bytes_per_s": [round(nbytes / took) for took in sends],
        "load_bytes_per_s": [round(nbytes / took) for took in loads],
        "share": round(median(copies) / median(sends), 3),
        "share_with_setup": round(median(copies) / median(loads), 3),
        "whole": whole,
    }


def problems_of(case: dict[str, Any], on_gpu: bool) -> list[str]:
    """Return what a case does not keep: the rate where no type is converted on the way, and the memory."""
    found = []
    if on_gpu and case["stored"] == case["dtype"] and case["share"] < LEAST_SHARE:
        found.append(f"{case['stored']}: {case['share']:.2f} of the rate of page-locked copies, expected {LEAST_SHARE}")
    peak = case["whole"]["rss_anon_peak_bytes"]
    if peak is not None and peak > case["stored_bytes"] + SPARE_BYTES:
        found.append(f"{case['stored']}: {peak:,} bytes of anonymous memory, for {case['stored_bytes']:,} stored")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_load.json")
    parser.add_argument("--shape", choices=SHAPES, default="600M")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--commit", help="what the tree is, where git does not know")
    parser.add_argument("--case", nargs=2, metavar=("FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        folder, dtype = options.case
        print(json.dumps(measure(Path(folder), options.device, dtype, options.runs)))
        return 0
    with open_backend(options.device) as gpu:
        name, on_gpu = gpu.name(), gpu.kind() != "host"
    report: dict[str, Any] = {
        "benchmark": "gpu_load",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": name,
        "machine": describe("numpy", "cupy-cuda12x", "cupy-cuda13x", "safetensors", "ml_dtypes", commit=options.commit),
        "shape": options.shape,
        "cases": [],
        "problems": [],
    }
    with tempfile.TemporaryDirectory() as place:
        sizes = {
            stored: write_checkpoint(Path(place) / stored, SHAPES[options.shape], stored) for stored in dict(CASES)
        }
        for stored, dtype in CASES:
            command = [sys.executable, "-m", "benchmarks.gpu_load", "--device", options.device]
            command += ["--runs", str(options.runs), "--case", str(Path(place) / stored), dtype]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                report["problems"].append(f"{stored} to {dtype}: {done.stderr[-2000:]}")
                continue
            case: dict[str, Any] = {"stored": stored, "dtype": dtype, "stored_bytes": sizes[stored]}
            case |= json.loads(done.stdout.splitlines()[-1])
            report["cases"].append(case)
            report["problems"] += problems_of(case, on_gpu)
            print(
                f"{stored} to {dtype}: {max(case['send_bytes_per_s']) / 1e9:.1f} GB/s at best, {case['share']:.2f} of "
                f"page-locked copies, {case['share_with_setup']:.2f} with setup; RssAnon "
                f"{case['whole']['rss_anon_peak_bytes']}",
                flush=True,
            )
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for problem in report["problems"]:
        print(problem, file=sys.stderr)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
