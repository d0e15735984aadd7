# SPDX-License-Identifier: MIT OR Apache-2.0
"""The text that Prometheus reads, judged by the format's own rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metrale.engine.prometheus import CONTENT_TYPE, prometheus_text
from metrale.engine.stats import Durations, Gauges, Recorder
from metrale.errors import InvalidInput
from tests.engine.clock import FakeClock
from tests.engine.exposition import check, parse
from tests.engine.recorded import IDLE, busy


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
