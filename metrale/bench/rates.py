# SPDX-License-Identifier: MIT OR Apache-2.0
"""The speeds that a run's floors follow from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpu_runtime import GpuBackend, dtypes
from metrale.bench.floors import H200, Rates
from metrale.bench.timing import Clock, Reader, ceilings

HOST_READ_BYTES: Final = 256 << 20
"""More than the caches of a processor hold."""
HOST_PRODUCT_SIZE: Final = 1024


def floor_rates(gpu: GpuBackend, dtype: str, clock: Clock, reader: Reader, repeats: int) -> dict[str, Any]:
    """Measure what the device reaches on plain work, and say which rates count for floors.

    Those of an H200 are fixed for 16-bit types, so that runs can be compared. Any other device is held to what it
    reached in this run.

    Returns
    -------
    dict
        ``read_bytes_per_s``, ``flop_per_s``, ``origin`` (a sentence), ``ceilings`` (what was measured).
    """
    short = dtypes.short_name(dtype)
    if gpu.kind() == "host":
        measured = host_ceilings(repeats)
        rates = Rates(1e9 * measured["read_gb_per_s"], 1e12 * measured["product_f32_tflop_per_s"])
    else:
        measured = ceilings(clock, reader, short, repeats)
        rates = Rates(1e9 * measured["read_gb_per_s"], 1e12 * measured[f"product_{short}_tflop_per_s"])
    fixed = "H200" in gpu.name() and short != "f32"
    rates = H200 if fixed else rates
    return {
        "read_bytes_per_s": rates.read_bytes_per_s,
        "flop_per_s": rates.flop_per_s,
        "origin": "fixed for an H200" if fixed else "measured in this run",
        "ceilings": measured,
    }


def host_ceilings(repeats: int) -> dict[str, float]:
    """Return what this machine's processor reaches: reading memory, and a product in float32."""
    row = np.ones(HOST_READ_BYTES // 4, dtype=np.float32)
    square = np.ones((HOST_PRODUCT_SIZE, HOST_PRODUCT_SIZE), dtype=np.float32)
    return {
        "read_gb_per_s": round(row.nbytes / _best_s(lambda: row.dot(row), repeats) / 1e9, 2),
        "read_bytes": row.nbytes,
        "product_f32_tflop_per_s": round(
            2 * HOST_PRODUCT_SIZE**3 / _best_s(lambda: square @ square, repeats) / 1e12, 4
        ),
        "product_size": HOST_PRODUCT_SIZE,
    }


def _best_s(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
