# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small copies between page-locked host memory and the device: by ``cudaMemcpyAsync``, by a kernel, by the backend.

    python -m benchmarks.small_copies --out small_copies.json

runs where a GPU is. Every way to copy is first shown to copy right. Then a stream gets small kernels with a copy
between any two, each of which touches what the copy does, while it is held up by other work; and the same kernels
without copies. ``stream_us`` is what a copy adds to the stream's time, ``host_us`` what it takes the host to enqueue.
The exit status is 1 when a copy was wrong, or the stream had to wait for the host; `problems` says which.

`--device host` goes through all of it with the backend's own copies; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpu_runtime import GpuBackend
from gpu_runtime.config import Config
from metrale.bench.machine import describe
from metrale.bench.timing import READ_ALL, Reader, open_device

DIRECTIONS: Final = ("h2d", "d2h")
SIZES: Final = (12, 768, 8 << 10, 30 << 10, 64 << 10)
"""A row's results, those of 64 rows, and tables of a decode step up to the largest copy that is a kernel."""

COPIES: Final = 100
"""In one measurement: few enough that the queue of launches takes all of it."""

HOLD_BYTES: Final = {"cuda": 1 << 30, "host": 1 << 16}
"""What is read to hold the stream up, as often as it takes the host to enqueue everything behind it."""

MOST_HOLDS: Final = 256

Copy = Callable[[int], object]
"""Enqueues one copy on a stream."""


class Bench:
    """Memory at both ends, a kernel that touches it, and a stream that can be held up. A context manager.

    Parameters
    ----------
    gpu : GpuBackend
    number : int
        Of the device, for calls that do not go through the backend.
    """

    def __init__(self, gpu: GpuBackend, number: int = 0) -> None:
        self.gpu = gpu
        with ExitStack() as undo:
            self.host = gpu.alloc_host_pinned(max(SIZES))
            undo.callback(gpu.free_host_pinned, self.host)
            self.device, self.spare = (gpu.alloc(max(SIZES), tag="benchmark") for _ in range(2))
            for block in (self.device, self.spare):
                undo.callback(gpu.free, block)
                gpu.memset(block, 1, max(SIZES))
            self.stream = gpu.create_stream()
            undo.callback(gpu.destroy_stream, self.stream)
            self._start, self._stop = gpu.create_event(timing=True), gpu.create_event(timing=True)
            for event in (self._start, self._stop):
                undo.callback(gpu.destroy_event, event)
            self._reader = undo.enter_context(Reader(gpu, HOLD_BYTES[gpu.kind()]))
            self._raw = self._open_raw(number, undo) if gpu.kind() == "cuda" else {}
            self._undo = undo.pop_all()
        self._holds = 4

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _open_raw(self, number: int, undo: ExitStack) -> dict[str, Callable[[int, int, int, int], object]]:
        """Return what enqueues a copy to an address from another, of some bytes, on a stream, by its name."""
        from cupy.cuda import runtime

        from gpu_runtime.cuda import nvrtc
        from gpu_runtime.cuda.device import native_arch
        from gpu_runtime.cuda.driver import Context
        from gpu_runtime.cuda.small_copies import SmallCopies

        self.gpu.bind_to_thread()  # for the runtime's own call
        arch = native_arch(self.gpu.limits().compute_capability)
        small = SmallCopies(Context(number), arch, nvrtc.default_cache(Config.from_env()))
        small.load()
        undo.callback(small.close)
        return {
            "memcpyAsync": lambda dst, src, size, stream: runtime.memcpyAsync(
                dst, src, size, runtime.memcpyDefault, stream
            ),
            "kernel": lambda dst, src, size, stream: small.enqueue(dst, src, size, stream, early=False),
            "kernel, early": lambda dst, src, size, stream: small.enqueue(dst, src, size, stream, early=True),
        }

    def ways(self, direction: str, size: int) -> dict[str, Copy]:
        """Return every way to copy ``size`` bytes."""
        ends = (int(self.device), self.host.address)
        dst, src = ends if direction == "h2d" else ends[::-1]
        found: dict[str, Copy] = {
            name: lambda stream, call=call: call(dst, src, size, stream)  # type: ignore[misc]
            for name, call in self._raw.items()
        }
        array, gpu = self.host.array[:size], self.gpu
        if direction == "h2d":
            found["backend"] = lambda stream: gpu.copy_h2d_async(array, self.device, stream)
        else:
            found["backend"] = lambda stream: gpu.copy_d2h_async(self.device, array, stream)
        return found

    def kernel(self, direction: str) -> Copy:
        """Return what enqueues a kernel that reads what a copy has written, or writes what one is about to read."""
        src, out = (self.device, self.spare) if direction == "h2d" else (self.spare, self.device)
        values = (src, out, 2, 1)  # one block reads 16 bytes and writes 8
        assert READ_ALL.plan is not None
        how = READ_ALL.plan(READ_ALL.spec.dims(values), "f32", self.gpu.limits())
        handle = self.gpu.kernel(READ_ALL.spec.name, how.entry)
        return lambda stream: self.gpu.launch(handle, how.grid, how.block, how.shared_bytes, stream, values)

    # results

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the copies of each way."""
        drawn = np.random.default_rng(0)
        for direction in DIRECTIONS:
            for size in SIZES:
                for name, copy in self.ways(direction, size).items():
                    sent, received = drawn.integers(0, 256, (2, size), dtype=np.uint8)
                    if direction == "h2d":
                        self.host.array[:size] = sent
                        copy(self.stream)
                        self.gpu.copy_d2h_on_stream(self.device, received, self.stream)
                    else:
                        self.gpu.copy_h2d(sent, self.device)
                        copy(self.stream)
                        self.gpu.synchronize(self.stream)
                        received = self.host.array[:size]
                    if not np.array_equal(sent, received):
                        yield f"{direction}, {size} bytes, {name}: {np.sum(sent != received)} bytes are wrong"

    # times

    def measure(self, work: Callable[[], object], repeats: int) -> tuple[float, float]:
        """Return the medians of what ``work`` takes the stream and the host, in microseconds.

        Raises
        ------
        RuntimeError
            When the stream cannot be held up as long as the host needs.
        """
        found: list[tuple[float, float]] = []
        while len(found) < repeats:
            for _ in range(self._holds):
                self._reader.read(self._reader.nbytes, self.stream)
            self.gpu.record_event(self._start, self.stream)
            begin = time.perf_counter_ns()
            work()
            host = time.perf_counter_ns() - begin
            held = not self.gpu.event_query(self._start) or self.gpu.kind() == "host"
            self.gpu.record_event(self._stop, self.stream)
            self.gpu.event_synchronize(self._stop)
            if held:
                found.append((1e3 * self.gpu.event_elapsed_ms(self._start, self._stop), host / 1e3))
                continue
            self._holds *= 2
            if self._holds > MOST_HOLDS:
                raise RuntimeError(f"the host takes {host / 1e6:.1f} ms to enqueue what is measured")
        stream, on_host = zip(*found, strict=True)
        return statistics.median(stream), statistics.median(on_host)

    def case(self, direction: str, size: int, repeats: int) -> dict[str, Any]:
        """Return the times of all ways to copy ``size`` bytes."""
        kernel = self.kernel(direction)

        def chain(copy: Copy | None) -> None:
            for _ in range(COPIES):
                kernel(self.stream)
                if copy is not None:
                    copy(self.stream)
            kernel(self.stream)

        def alone(copy: Copy) -> None:
            for _ in range(COPIES):
                copy(self.stream)

        chain(None)
        kernels, _ = self.measure(lambda: chain(None), repeats)
        ways: dict[str, dict[str, float]] = {}
        for name, copy in self.ways(direction, size).items():
            chain(copy)
            between, _ = self.measure(lambda copy=copy: chain(copy), repeats)  # type: ignore[misc]
            stream, host = self.measure(lambda copy=copy: alone(copy), repeats)  # type: ignore[misc]
            ways[name] = {
                "stream_us": round((between - kernels) / COPIES, 3),
                "copies_alone_us": round(stream / COPIES, 3),
                "host_us": round(host / COPIES, 3),
            }
        per_kernel = round(kernels / (COPIES + 1), 3)
        return {"direction": direction, "nbytes": size, "kernel_us": per_kernel, "ways": ways}


def line(case: dict[str, Any]) -> str:
    """Return a line of the table."""
    cells = [f"{case['direction']} {case['nbytes']:6d} {case['kernel_us']:7.2f}"]
    cells += [f"{name} {way['stream_us']:6.2f} {way['host_us']:6.2f}" for name, way in case["ways"].items()]
    return " | ".join(cells)


def run(gpu: GpuBackend, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time every way to copy."""
    report: dict[str, Any] = {
        "benchmark": "small_copies",
        "machine": describe("metrale", "numpy", "cupy-cuda12x", "cuda-bindings", commit=options.commit),
        "gpu": {"kind": gpu.kind(), "name": gpu.name(), "sm_count": gpu.sm_count()},
        "copies": [],
        "problems": [],
    }
    number = options.device.partition(":")[2]
    with Bench(gpu, int(number or 0)) as bench:
        report["problems"] += list(bench.problems())
        print("     bytes  kernel | way, us of the stream, us of the host", flush=True)
        try:
            for direction in DIRECTIONS:
                for size in SIZES:
                    report["copies"].append(bench.case(direction, size, options.repeats))
                    print(line(report["copies"][-1]), flush=True)
        except RuntimeError as error:
            report["problems"].append(str(error))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="what to call the commit where git cannot say")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with open_device(options.device) as gpu:
        report = run(gpu, options)
    for problem in report["problems"]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
