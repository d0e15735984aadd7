# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps as the engine makes them: the device chooses the ids and feeds them, and the host is a step ahead.

Measured three ways, by the protocol of `benchmarks.peers`: the model's calls in a loop, the engine with as many
requests as lanes, and one step by the device's clock, the host being ahead of it. How much of an engine's step the
device alone takes says how busy it is.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_decode import LANGUAGE, Batch, Busy
from benchmarks.gpu_timing import Clock
from benchmarks.peers.protocol import NEW_TOKENS, SOURCE_TOKENS, sources, spread, timings
from gpu_runtime import GpuBackend
from metrale.engine import Engine, Request
from metrale.model import FeedSource
from metrale.nllb.model import NllbModel

RESULTS: Final = 3
AHEAD: Final = 1
"""Steps that are enqueued while the one before is read, as the engine does on a GPU."""


class FedBatch(Batch):
    """A batch whose ids stay on the device. A context manager that waits for the device and frees everything."""

    def __init__(self, model: NllbModel, size: int) -> None:
        super().__init__(model, size)
        self._memory = model.alloc_host_pinned((AHEAD + 1) * RESULTS * size * 4)
        words = self._memory.array[: (AHEAD + 1) * RESULTS * size * 4].view(np.int32)
        self._buffers: list[NDArray[np.int32]] = list(words.reshape(AHEAD + 1, RESULTS, size))
        self._events = [model.create_event() for _ in self._buffers]
        self._free = deque(range(AHEAD + 1))
        self._flights: deque[int] = deque()
        self._sources = [FeedSource(sampled=True)] * size

    def free(self) -> None:
        self.model.synchronize()
        super().free()
        self.model.free_host_pinned(self._memory)
        for event in self._events:
            self.model.destroy_event(event)

    def feed(self) -> None:
        """Enqueue a step that takes in what was chosen, and the next choice."""
        self.model.decode_batch_fed(self._sources, self.seqs)
        for seq in self.seqs:
            seq.seq_len += 1
        self.sample()

    def sample(self) -> None:
        """Enqueue the choice of every sequence's next id, and the copy of it to the host."""
        slot = self._free.popleft()
        self.model.sample_batch_to_feed(
            self.model.logits_buffer_ptr(), self.seqs, self._buffers[slot], self._events[slot]
        )
        self._flights.append(slot)

    def read(self) -> list[int]:
        """Wait for the oldest choice that is not read, and return it."""
        slot = self._flights.popleft()
        self._free.append(slot)
        self.model.event_synchronize(self._events[slot])
        ids: list[int] = self._buffers[slot][0].tolist()
        return ids


def generate(model: NllbModel, size: int, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Decode greedily, a step ahead; return the wall-clock milliseconds of the call, and the ids step by step."""
    start = time.perf_counter()
    with FedBatch(model, size) as batch:
        batch.prefill()
        batch.sample()
        ids = []
        for _ in range(new_tokens - 1):
            batch.feed()
            ids.append(batch.read())
        ids.append(batch.read())
    return 1e3 * (time.perf_counter() - start), ids


def serve(engine: Engine, model: NllbModel, size: int, new_tokens: int) -> float:
    """Return the wall-clock milliseconds until the engine has served ``size`` requests."""
    requests = [
        Request(ids[1:-1], LANGUAGE, LANGUAGE, max_new_tokens=new_tokens + 1, eos_ids=frozenset())
        for ids in sources(size, SOURCE_TOKENS, model.vocab_size(), LANGUAGE)
    ]
    start = time.perf_counter()
    handles = [engine.submit(request) for request in requests]
    lengths = {len(handle.result().raise_for_error().ids) for handle in handles}
    ms = 1e3 * (time.perf_counter() - start)
    if lengths != {new_tokens}:
        raise RuntimeError(f"expected {size} results of {new_tokens} tokens after the language, got {lengths}")
    return ms


def graph_launches(gpu: GpuBackend, model: NllbModel, size: int) -> int:
    """Return how many graphs a step launches, once its kind has come before."""
    with FedBatch(model, size) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(2):
            batch.feed()
            batch.read()
        with patch.object(gpu, "launch_graph", wraps=gpu.launch_graph) as launched:
            batch.feed()
        return int(launched.call_count)


def device_ms(model: NllbModel, size: int, clock: Clock, busy: Busy, host_ms: float, repeats: int) -> list[float]:
    """Return the milliseconds of steps half way by the device's clock, the host being ahead of it."""
    keep_busy = busy.during(host_ms)

    def before() -> None:
        batch.read()
        keep_busy()

    with FedBatch(model, size) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(NEW_TOKENS // 2):
            batch.feed()
            batch.read()
        return clock.ms(batch.feed, min(repeats, 16), before=before)


def measure(model: NllbModel, size: int, clock: Clock, busy: Busy, repeats: int) -> dict[str, Any]:
    """Time one batch size.

    Returns
    -------
    dict
        ``fed`` and ``engine``, as `timings` gives them; ``host_enqueue_ms`` of a step; ``step_device_ms``, what a step
        takes the device alone; ``busy``, that as a part of a step of the engine; ``graph_launches_per_step``; ``ids``,
        those of the first call, step by step.
    """
    _, ids = generate(model, size, NEW_TOKENS)
    generate(model, size, 1)
    ones = [generate(model, size, 1)[0] for _ in range(max(repeats, 3))]
    runs = [generate(model, size, NEW_TOKENS) for _ in range(repeats)]
    host = host_ms(model, size)
    alone = device_ms(model, size, clock, busy, max(host), repeats)
    with Engine(model, max_lanes=size) as engine:
        serve(engine, model, size, NEW_TOKENS)
        serve(engine, model, size, 1)
        served_ones = [serve(engine, model, size, 1) for _ in range(max(repeats, 3))]
        served = [serve(engine, model, size, NEW_TOKENS) for _ in range(repeats)]
    engine_times, step_device = timings(size, served_ones, served), spread(alone)
    return {
        "fed": timings(size, ones, [ms for ms, _ in runs]),
        "engine": engine_times,
        "host_enqueue_ms": spread(host),
        "step_device_ms": step_device,
        "busy": round(step_device["median"] / engine_times["step_ms"]["median"], 3),
        "graph_launches_per_step": graph_launches(model.gpu, model, size),
        "same_tokens_each_time": all(found == ids for _, found in runs),
        "ids": ids,
    }


def host_ms(model: NllbModel, size: int) -> list[float]:
    """Return the milliseconds that the host takes to enqueue each of some steps, the device being idle."""
    times = []
    with FedBatch(model, size) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(NEW_TOKENS // 2):
            batch.read()
            start = time.perf_counter()
            batch.feed()
            times.append(1e3 * (time.perf_counter() - start))
    return times[2:]  # the first ones launch op by op, and capture
