# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures what a launch of 12 arguments costs the host, in a process of its own: `python -m tests.gpu.launch_cost`.

The arguments are those of attention weights over one key. Two sets alternate, as from layer to layer. At most 24
launches are in the queue. Prints JSON: for `gpu.launch`, and for CuPy's bare ``launchKernel`` with prebuilt parameters,
the median of each round in us.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpu_runtime.backend import GpuBackend
from metrale.ops.attention_weights import OP, make_inputs
from tests.backends import open_cuda
from tests.ops.harness import upload

QUEUE, BATCHES, ROUNDS = 24, 50, 7


def median_of_rounds(gpu: GpuBackend, calls: Sequence[Callable[[], None]]) -> list[float]:
    """Return each round's median time of a call in us."""
    now, medians = time.perf_counter_ns, []
    for _ in range(ROUNDS):
        times = []
        for _ in range(BATCHES):
            for index in range(QUEUE):
                begin = now()
                calls[index % 2]()
                times.append(now() - begin)
            gpu.synchronize()
        medians.append(statistics.median(times) / 1e3)
    return medians


def measure(gpu: GpuBackend) -> dict[str, list[float]]:
    """Return the medians of both."""
    from cupy.cuda import driver

    inputs: Any = make_inputs(np.random.default_rng(0), "f32", lengths=(1,), heads=1, head_dim=8)
    pool, q, out = upload(gpu, inputs["spans"].pool), upload(gpu, inputs["q"]), gpu.alloc(64)
    spans, lengths = upload(gpu, np.array([int(pool)], np.uint64)), upload(gpu, np.array([1], np.int32))
    sets = [(q, spans, lengths, out, 1, 1, 8, 1, 8, offset, 32, 0.5) for offset in (0, 16)]
    assert OP.plan is not None
    plan = OP.plan(OP.spec.dims(sets[0]), "f32", gpu.limits())
    handle: Any = gpu.kernel(OP.spec.name, plan.entry)
    ours = [partial(gpu.launch, handle, plan.grid, plan.block, plan.shared_bytes, 0, values) for values in sets]
    for call in ours:
        call()
    packed = [handle.launches[values] for values in sets]
    on = gpu.default_stream()
    bare = [partial(driver.launchKernel, handle.function, *one.geometry, on, one.params, 0) for one in packed]
    return {"gpu.launch": median_of_rounds(gpu, ours), "launchKernel": median_of_rounds(gpu, bare)}


if __name__ == "__main__":
    with open_cuda() as backend:
        print(json.dumps(measure(backend)))
        backend.sweep_unreleased()
