# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps as the engine makes them: the device chooses the ids and feeds them, and the host is a step ahead.

Measured three ways, by the protocol of `metrale.bench.protocol`: the model's calls in a loop, the engine with as many
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

from gpu_runtime import GpuBackend
from metrale.bench.decode import LANGUAGE, Batch, Busy
from metrale.bench.protocol import LEAST_ONES, STANDARD, Lengths, measure_ms, sources, spread, timings
from metrale.bench.timing import Clock
from metrale.engine import Engine, Request
from metrale.model import FeedSource
from metrale.nllb.model import NllbModel

RESULTS: Final = 3
AHEAD: Final = 1
"""Steps that are enqueued while the one before is read, as the engine does on a GPU."""


class FedBatch(Batch):
    """A batch whose ids stay on the device. A context manager that waits for the device and frees everything."""

    def __init__(self, model: NllbModel, size: int, lengths: Lengths = STANDARD) -> None:
        super().__init__(model, size, lengths)
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
            self.model.logits_buffer_ptr(), self.seqs, self._buffers[slot], self._events[slot], untouched=True
        )
        self._flights.append(slot)

    def read(self) -> list[int]:
        """Wait for the oldest choice that is not read, and return it."""
        slot = self._flights.popleft()
        self._free.append(slot)
        self.model.event_synchronize(self._events[slot])
        ids: list[int] = self._buffers[slot][0].tolist()
        return ids


def generate(
    model: NllbModel, size: int, new_tokens: int, lengths: Lengths = STANDARD
) -> tuple[float, list[list[int]]]:
    """Decode greedily, a step ahead; return the wall-clock milliseconds of the call, and the ids step by step."""
    start = time.perf_counter()
    with FedBatch(model, size, lengths) as batch:
        batch.prefill()
        batch.sample()
        ids = []
        for _ in range(new_tokens - 1):
            batch.feed()
            ids.append(batch.read())
        ids.append(batch.read())
    return 1e3 * (time.perf_counter() - start), ids


def engine_of(model: NllbModel, size: int, lengths: Lengths = STANDARD) -> Engine:
    """Return an engine with so many lanes, all of which may be prefilled in one step, as in a peer's call.

    By default an engine prefills fewer sources at a time, for the sake of those that run; then some of the steps of a
    large batch would not have all of its rows.
    """
    return Engine(model, max_lanes=size, max_prefill_tokens=size * lengths.source)


def serve(engine: Engine, model: NllbModel, size: int, new_tokens: int, lengths: Lengths = STANDARD) -> float:
    """Return the wall-clock milliseconds until the engine has served ``size`` requests."""
    requests = [
        Request(ids[1:-1], LANGUAGE, LANGUAGE, max_new_tokens=new_tokens + 1, eos_ids=frozenset())
        for ids in sources(size, lengths.source, model.vocab_size(), LANGUAGE)
    ]
    start = time.perf_counter()
    with model.exclusive():  # all of them are there when the first step begins, as in a peer's call
        handles = [engine.submit(request) for request in requests]
    got = {len(handle.result().raise_for_error().ids) for handle in handles}
    ms = 1e3 * (time.perf_counter() - start)
    if got != {new_tokens}:
        raise RuntimeError(f"expected {size} results of {new_tokens} tokens after the language, got {got}")
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


def device_ms(
    model: NllbModel,
    size: int,
    clock: Clock,
    busy: Busy,
    host_ms: float,
    repeats: int,
    lengths: Lengths = STANDARD,
) -> list[float]:
    """Return the milliseconds of steps half way by the device's clock, the host being ahead of it.

    What keeps the device busy before each of them reads so much that the L2 holds none of the weights.
    """
    keep_busy = busy.during(host_ms)

    def before() -> None:
        batch.read()
        keep_busy()

    with FedBatch(model, size, lengths) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(lengths.half_way):
            batch.feed()
            batch.read()
        return clock.ms(batch.feed, lengths.device_steps(repeats), before=before)


def engine_times(model: NllbModel, size: int, repeats: int, lengths: Lengths = STANDARD) -> dict[str, Any]:
    """Time the engine with as many requests as lanes; return the figures of `measure_ms`."""
    with engine_of(model, size, lengths) as engine:
        return measure_ms(lambda new: serve(engine, model, size, new, lengths), size, repeats, lengths.new)


def measure(model: NllbModel, size: int, clock: Clock, busy: Busy, repeats: int) -> dict[str, Any]:
    """Time one batch size.

    Returns
    -------
    dict
        ``fed`` and ``engine``, as `timings` gives them; ``host_enqueue_ms`` of a step; ``step_device_ms``, what a step
        takes the device alone; ``busy``, that as a part of a step of the engine; ``graph_launches_per_step``; ``ids``,
        those of the first call, step by step.
    """
    new = STANDARD.new
    _, ids = generate(model, size, new)
    generate(model, size, 1)
    ones = [generate(model, size, 1)[0] for _ in range(max(repeats, LEAST_ONES))]
    runs = [generate(model, size, new) for _ in range(repeats)]
    host = host_ms(model, size)
    step_device = spread(device_ms(model, size, clock, busy, max(host), repeats))
    engine = engine_times(model, size, repeats)
    del engine["first_call_ms"]
    return {
        "fed": timings(size, ones, [ms for ms, _ in runs]),
        "engine": engine,
        "host_enqueue_ms": spread(host),
        "step_device_ms": step_device,
        "busy": round(step_device["median"] / engine["step_ms"]["median"], 3),
        "graph_launches_per_step": graph_launches(model.gpu, model, size),
        "same_tokens_each_time": all(found == ids for _, found in runs),
        "ids": ids,
    }


def host_ms(model: NllbModel, size: int, lengths: Lengths = STANDARD) -> list[float]:
    """Return the milliseconds that the host takes to enqueue each of some steps, the device being idle.

    The first two of a kind launch op by op, and capture: they count only where there are no others. Of one token put
    out there is no step.
    """
    times = []
    with FedBatch(model, size, lengths) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(min(STANDARD.half_way, lengths.new - 1)):
            batch.read()
            start = time.perf_counter()
            batch.feed()
            times.append(1e3 * (time.perf_counter() - start))
    return times[2:] or times
