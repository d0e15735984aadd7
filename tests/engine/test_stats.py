# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the engine counts, and the text that Prometheus reads, judged by the format's own rules."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import tracemalloc
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import get_args

import numpy as np
import pytest

from metrale.engine.prometheus import CONTENT_TYPE, prometheus_text
from metrale.engine.request import FinishReason
from metrale.engine.stats import SECONDS_BUCKETS, Durations, EngineStats, Gauges, Recorder
from metrale.errors import InvalidInput
from tests.engine.clock import FakeClock

IDLE = Gauges(waiting=0, running=0, max_lanes=4)


def busy(clock: FakeClock) -> Recorder:
    """Return a recorder on which everything happened at least once, in different numbers."""
    recorder = Recorder(clock)
    for _ in range(7):
        recorder.submitted()
    for _ in range(2):
        recorder.rejected()
    for waited in (0.01, 0.02, 0.03):
        recorder.admitted(waited)
    for seconds in (0.05, 0.5):
        recorder.first_token(seconds)
    recorder.step(prefills=2, prompt_tokens=30)
    recorder.step(rows=3, padded_rows=1)
    recorder.step(rows=3, padded_rows=1, prefills=1, prompt_tokens=5)
    recorder.generated(6)
    recorder.preempted(1000)
    recorder.preempted(500)
    recorder.resumed(1000)
    for reason, seconds in (("eos", 1.0), ("eos", 2.0), ("length", 400.0), ("error", 0.0)):
        recorder.finished(reason, seconds)  # type: ignore[arg-type]
    clock.now += 5
    return recorder


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


# The text.


@dataclass
class Family:
    """One metric of the text: its type, its help, and samples by name and labels."""

    kind: str
    text: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def labels_of(text: str) -> tuple[tuple[str, str], ...]:
    """Parse what is between the braces; all of it must be labels."""
    pairs, at = [], 0
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, f"not a label: {text[at:]}"
        value = re.sub(r'\\[\\"n]', lambda one: ESCAPES[one.group()], found[2])
        pairs.append((found[1], value))
        at = found.end()
    assert len({name for name, _ in pairs}) == len(pairs), "a label occurs once"
    return tuple(pairs)


def parse(text: str) -> dict[str, Family]:
    """Parse text of format 0.0.4, and refuse what breaks its rules.

    The rules: the last line ends in a line feed; HELP and TYPE come once each, before the samples; the samples of a
    metric are one group; a sample is there once; a histogram has the suffixes _bucket, _sum, and _count and no others.
    """
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current, helped = "", ""
    for line in text.splitlines():
        assert line, "no line is empty"
        if line.startswith("# HELP "):
            _, _, helped, description = line.split(" ", 3)
            assert NAME.fullmatch(helped)
            assert not re.search(r"\\(?![\\n])", description), "only backslash and line feed are escaped in a HELP"
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current == helped, "HELP comes before TYPE"
            assert current not in families, "the lines of a metric are one group"
            assert kind in {"counter", "gauge", "histogram", "summary", "untyped"}
            families[current] = Family(kind, description)
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            name, labels, value = found[1], labels_of(found[2] or ""), float(found[3])
            family = families[current]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert name in {current + suffix for suffix in suffixes}, f"{name} in the group of {current}"
            assert (name, labels) not in family.samples, "a sample is there once"
            family.samples[name, labels] = value
    return families


def check(families: dict[str, Family]) -> None:
    """Refuse what breaks the conventions of names, counters and histograms."""
    for name, family in families.items():
        assert name.startswith("metrale_")
        assert family.text
        assert family.text[0].isupper()
        assert family.samples
        assert (family.kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|us|milliseconds|minutes|kb|mb|kib|mib)(_|$)", name), "base units alone"
        if family.kind != "gauge":
            assert all(value >= 0 for value in family.samples.values())
        if family.kind == "histogram":
            check_histogram(name, family)


def check_histogram(name: str, family: Family) -> None:
    groups: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    for (sample, labels), value in family.samples.items():
        if sample.endswith("_bucket"):
            bounds = dict(labels)
            groups[tuple(pair for pair in labels if pair[0] != "le")].append((float(bounds["le"]), value))
    assert groups
    for labels, buckets in groups.items():
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets), "buckets are cumulative"
        assert buckets[-1][0] == math.inf
        assert buckets[-1][1] == family.samples[f"{name}_count", labels]
        assert (f"{name}_sum", labels) in family.samples


def test_the_text_follows_the_rules() -> None:
    clock = FakeClock()
    stats = busy(clock).snapshot(Gauges(1, 2, 4, 1, 100, 200, 300))
    for labels in (None, {}, {"model": "nllb"}, {"model": "a", "_device": "0"}):
        families = parse(prometheus_text(stats, labels))
        check(families)
        for family in families.values():
            for _, found in family.samples:
                assert set((labels or {}).items()) <= set(found)
    assert "version=0.0.4" in CONTENT_TYPE


def test_the_text_says_what_the_snapshot_says() -> None:
    stats = busy(FakeClock()).snapshot(Gauges(1, 2, 4, 1, 100, 200, 300))
    values = {name: family.samples for name, family in parse(prometheus_text(stats)).items()}
    plain = {name: samples[name, ()] for name, samples in values.items() if (name, ()) in samples}
    assert plain == {
        "metrale_uptime_seconds": 5.0,
        "metrale_requests_submitted_total": 7,
        "metrale_requests_rejected_total": 2,
        "metrale_prompt_tokens_total": 35,
        "metrale_generated_tokens_total": 6,
        "metrale_steps_total": 3,
        "metrale_mixed_steps_total": 1,
        "metrale_decoded_rows_total": 6,
        "metrale_padded_rows_total": 2,
        "metrale_preemptions_total": 2,
        "metrale_swapped_out_bytes_total": 1500,
        "metrale_swapped_in_bytes_total": 1000,
        "metrale_tokens_per_second": 1.2,
        "metrale_requests_waiting": 1,
        "metrale_lanes_running": 2,
        "metrale_lanes": 4,
        "metrale_requests_swapped_out": 1,
        "metrale_kv_used_bytes": 100,
        "metrale_kv_total_bytes": 200,
        "metrale_device_live_bytes": 300,
    }
    finished = values["metrale_requests_finished_total"]
    assert {dict(labels)["reason"]: value for (_, labels), value in finished.items()} == stats.finished
    for name in ("time_to_first_token", "request_latency", "queue_wait"):
        durations: Durations = getattr(stats, name)
        samples = values[f"metrale_{name}_seconds"]
        assert samples[f"metrale_{name}_seconds_sum", ()] == durations.sum
        buckets = [value for (sample, _), value in samples.items() if sample.endswith("_bucket")]
        assert buckets == [*durations.buckets, durations.count]


def test_what_is_not_known_is_left_out() -> None:
    stats = busy(FakeClock()).snapshot(IDLE)
    names = set(parse(prometheus_text(stats)))
    assert not {"metrale_kv_used_bytes", "metrale_kv_total_bytes", "metrale_device_live_bytes"} & names
    known = replace(stats, now=replace(IDLE, kv_used_bytes=0))
    assert parse(prometheus_text(known))["metrale_kv_used_bytes"].samples["metrale_kv_used_bytes", ()] == 0


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", "a\\nb", 'C:\\"x"\n', "", 'größer, {x}="1"', "a,b"])
def test_label_values_are_escaped(value: str) -> None:
    text = prometheus_text(Recorder(FakeClock()).snapshot(IDLE), {"model": value})
    families = parse(text)
    check(families)
    assert all(dict(labels)["model"] == value for family in families.values() for _, labels in family.samples)


@pytest.mark.parametrize("name", ["", "1a", "a-b", "__a", "le", "reason", "a:b", "é"])
def test_label_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="labels"):
        prometheus_text(Recorder(FakeClock()).snapshot(IDLE), {name: "x"})


GOOD = "# HELP metrale_a_total Things.\n# TYPE metrale_a_total counter\nmetrale_a_total 1\n"
HISTOGRAM = (
    "# HELP metrale_h_seconds Times.\n# TYPE metrale_h_seconds histogram\n"
    'metrale_h_seconds_bucket{le="1.0"} 2\nmetrale_h_seconds_bucket{le="+Inf"} 3\n'
    "metrale_h_seconds_sum 4.5\nmetrale_h_seconds_count 3\n"
)


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-1],
        GOOD + GOOD,
        GOOD.replace("_total", ""),
        GOOD.replace("counter", "count"),
        GOOD + "metrale_a_total 2\n",
        GOOD + "metrale_b_total 2\n",
        GOOD.replace("metrale_a_total 1", 'metrale_a_total{x="a"b"} 1'),
        GOOD.replace("metrale_a_total 1", "metrale_a_total -1"),
        GOOD.replace("metrale_a_total 1", "metrale_a_total one"),
        HISTOGRAM.replace(" 2\n", " 5\n"),
        HISTOGRAM.replace("+Inf", "9.0"),
        HISTOGRAM.replace("count 3", "count 4"),
        HISTOGRAM.replace("metrale_h_seconds_sum 4.5\n", ""),
        HISTOGRAM.replace("seconds", "ms"),
    ],
)
def test_the_judge_refuses_what_is_wrong(text: str) -> None:
    for sound in (GOOD, HISTOGRAM):
        check(parse(sound))
    with pytest.raises((AssertionError, ValueError, KeyError)):
        check(parse(text))
