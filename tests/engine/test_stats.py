# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the engine counts."""

from __future__ import annotations

import json
import math
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest

from metrale.engine.request import FinishReason
from metrale.engine.stats import SECONDS_BUCKETS, Durations, EngineStats, Gauges, Recorder
from tests.engine.clock import FakeClock
from tests.engine.recorded import IDLE, busy

# Counting.


def test_everything_is_counted_where_it_belongs() -> None:
    stats = busy(FakeClock()).snapshot(Gauges(1, 2, 4, 1, 100, 200, 300))
    assert stats == EngineStats(
        uptime=5.0,
        now=Gauges(
            waiting=1,
            running=2,
            max_lanes=4,
            swapped_out=1,
            kv_used_bytes=100,
            kv_total_bytes=200,
            device_live_bytes=300,
        ),
        submitted=7,
        rejected=2,
        finished={"eos": 2, "length": 1, "cancelled": 0, "timeout": 0, "error": 1},
        prompt_tokens=35,
        generated_tokens=6,
        steps=3,
        mixed_steps=1,
        decoded_rows=6,
        padded_rows=2,
        preemptions=2,
        swapped_out_bytes=1500,
        swapped_in_bytes=1000,
        tokens_per_second=1.2,
        tokens_per_second_overall=1.2,
        time_to_first_token=stats.time_to_first_token,
        request_latency=stats.request_latency,
        queue_wait=stats.queue_wait,
    )
    assert stats.queue_wait.count == 3
    assert stats.queue_wait.sum == pytest.approx(0.06)
    assert (stats.time_to_first_token.count, stats.time_to_first_token.p99) == (2, 0.5)
    assert (stats.request_latency.count, stats.request_latency.sum) == (4, 403.0)
    assert stats.request_latency.buckets[-1] == 3, "400 seconds are beyond the last bound"


def test_a_recorder_at_its_start() -> None:
    stats = Recorder(FakeClock()).snapshot(IDLE)
    assert (stats.uptime, stats.tokens_per_second, stats.tokens_per_second_overall) == (0.0, 0.0, 0.0)
    assert stats.queue_wait == Durations(0, 0.0, None, None, None, (0,) * len(SECONDS_BUCKETS))
    assert set(stats.finished) == set(get_args(FinishReason))


def test_a_snapshot_stays_what_it_is() -> None:
    clock = FakeClock()
    recorder = busy(clock)
    before = recorder.snapshot(IDLE)
    text = json.dumps(before.to_dict())
    recorder.finished("eos", 1.0)
    recorder.generated(5)
    assert json.dumps(before.to_dict()) == text
    assert recorder.snapshot(IDLE).finished["eos"] == before.finished["eos"] + 1


def test_the_dict_is_json_and_complete() -> None:
    stats = busy(FakeClock()).snapshot(IDLE)
    again = json.loads(json.dumps(stats.to_dict()))
    assert set(again) == {one.name for one in fields(EngineStats)}
    assert again["now"]["kv_used_bytes"] is None
    assert again["request_latency"]["count"] == 4


# The sliding window.


def test_the_rate_at_a_steady_pace() -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    for _ in range(3000):
        clock.now += 0.01
        recorder.generated(2)
    stats = recorder.snapshot(IDLE)
    # Cells of 0.1 seconds: the one that has begun may be empty or full.
    assert stats.tokens_per_second == pytest.approx(200, rel=0.011)
    assert stats.tokens_per_second_overall == pytest.approx(200)


def test_the_rate_forgets() -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    clock.now += 1.05
    recorder.generated(1000)
    clock.now += 8.8
    assert recorder.snapshot(IDLE).tokens_per_second == pytest.approx(1000 / 9.85)
    clock.now += 1.0
    assert recorder.snapshot(IDLE).tokens_per_second == pytest.approx(1000 / 9.95)
    clock.now += 0.2
    assert recorder.snapshot(IDLE).tokens_per_second == 0.0
    recorder.generated(10)
    assert recorder.snapshot(IDLE).tokens_per_second == pytest.approx(10 / 9.95)
    assert recorder.snapshot(IDLE).tokens_per_second_overall == pytest.approx(1010 / 11.05)


def test_the_rate_of_a_young_engine_is_over_its_age() -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    clock.now += 0.5
    recorder.generated(50)
    assert recorder.snapshot(IDLE).tokens_per_second == pytest.approx(100)


# Durations.


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 4096])
def test_percentiles_are_numpys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    recorder = Recorder(FakeClock())
    for value in values:
        recorder.first_token(value)
    found = recorder.snapshot(IDLE).time_to_first_token
    expected = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    assert (found.p50, found.p90, found.p99) == tuple(expected)
    assert found.sum == pytest.approx(math.fsum(values))


def test_percentiles_are_of_the_last_ones_and_buckets_of_all() -> None:
    recorder = Recorder(FakeClock())
    for value in [100.0] * 5000 + [1.0] * 4096:
        recorder.admitted(value)
    waits = recorder.snapshot(IDLE).queue_wait
    assert (waits.p50, waits.p99, waits.count) == (1.0, 1.0, 9096)
    assert waits.buckets[SECONDS_BUCKETS.index(1.0)] == 4096, "a value at a bound is in its bucket"
    assert waits.buckets[SECONDS_BUCKETS.index(120.0)] == 9096


def test_buckets_are_cumulative_and_hold_what_is_at_most_their_bound() -> None:
    rng = random.Random(5)
    values = [*SECONDS_BUCKETS, *(rng.expovariate(0.1) for _ in range(500)), 1e6]
    recorder = Recorder(FakeClock())
    for value in values:
        recorder.finished("eos", value)
    found = recorder.snapshot(IDLE).request_latency.buckets
    assert found == tuple(sum(value <= bound for value in values) for bound in SECONDS_BUCKETS)


# Threads and memory.


def test_many_threads_count_as_one() -> None:
    clock = FakeClock()
    recorder = Recorder(clock)
    barrier = threading.Barrier(9)
    seen: list[EngineStats] = []

    def work() -> None:
        barrier.wait()
        for _ in range(500):
            recorder.submitted()
            recorder.step(rows=2, padded_rows=1)
            recorder.generated(2)
            recorder.finished("eos", 1.0)

    with ThreadPoolExecutor(9) as pool:
        futures = [pool.submit(work) for _ in range(8)]
        barrier.wait()
        while not all(future.done() for future in futures):
            seen.append(recorder.snapshot(IDLE))
        for future in futures:
            future.result()
    stats = recorder.snapshot(IDLE)
    assert (stats.submitted, stats.steps, stats.decoded_rows, stats.finished["eos"]) == (4000, 4000, 8000, 4000)
    assert (stats.request_latency.count, stats.generated_tokens) == (4000, 8000)
    for one in seen:
        assert one.request_latency.count == one.finished["eos"]
        assert one.padded_rows * 2 == one.decoded_rows


def test_memory_does_not_grow() -> None:
    """Half a day of steps and requests: what is kept is bounded by the window and by the last few thousand."""
    clock = FakeClock()
    recorder = Recorder(clock)

    def hours(count: int) -> None:
        for _ in range(count * 1000):
            clock.now += 3.6
            recorder.step(rows=1)
            recorder.generated(1)
            recorder.first_token(1.0)
            recorder.finished("eos", 1.0)

    hours(6)
    tracemalloc.start()
    try:
        hours(6)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 20_000  # the cells of the window, renewed
