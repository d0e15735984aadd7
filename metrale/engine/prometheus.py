# SPDX-License-Identifier: MIT OR Apache-2.0
"""`EngineStats` as Prometheus reads it: the text exposition format, version 0.0.4."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from metrale.engine.stats import SECONDS_BUCKETS, Durations, EngineStats
from metrale.errors import InvalidInput

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""What an HTTP response with this text says it is."""

_PREFIX: Final = "metrale_"
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS: Final = {"reason", "le"}


def prometheus_text(stats: EngineStats, labels: Mapping[str, str] | None = None) -> str:
    """Return the snapshot as text, one metric after another. What is not known is left out.

    Parameters
    ----------
    stats : EngineStats
    labels : mapping of str to str, or None
        Labels of every sample, for example the model's name.

    Raises
    ------
    InvalidInput
        When a label's name is not one, or is used by a metric itself.
    """
    common = dict(labels or {})
    for name in common:
        if not _LABEL.fullmatch(name) or name in _OURS:
            raise InvalidInput("labels", "names that are identifiers, without a leading __, not reason or le", name)
    lines = [
        *_counters(stats, common),
        *_gauges(stats, common),
        *_histogram("time_to_first_token", "From submission to the first token.", stats.time_to_first_token, common),
        *_histogram("request_latency", "From submission to the end of the request.", stats.request_latency, common),
        *_histogram("queue_wait", "From submission to the first lane.", stats.queue_wait, common),
    ]
    return "\n".join(lines) + "\n"


def _counters(stats: EngineStats, labels: dict[str, str]) -> Iterator[str]:
    name = "requests_finished_total"
    yield from _head(name, "counter", "Requests ended, by why.")
    for reason, count in stats.finished.items():
        yield _sample(name, {**labels, "reason": reason}, count)
    for name, text, value in (
        ("requests_submitted_total", "Requests let in.", stats.submitted),
        ("requests_rejected_total", "Requests refused because the queue was full.", stats.rejected),
        ("prompt_tokens_total", "Source tokens prefilled.", stats.prompt_tokens),
        ("generated_tokens_total", "Tokens chosen, EOS included.", stats.generated_tokens),
        ("steps_total", "Forwards.", stats.steps),
        ("mixed_steps_total", "Forwards that prefilled and decoded at once.", stats.mixed_steps),
        ("decoded_rows_total", "Decode rows that served a request.", stats.decoded_rows),
        ("padded_rows_total", "Decode rows that only filled up a batch.", stats.padded_rows),
        ("preemptions_total", "Requests moved to host memory to make room.", stats.preemptions),
        ("swapped_out_bytes_total", "KV moved to host memory.", stats.swapped_out_bytes),
        ("swapped_in_bytes_total", "KV moved back from host memory.", stats.swapped_in_bytes),
    ):
        yield from _head(name, "counter", text)
        yield _sample(name, labels, value)


def _gauges(stats: EngineStats, labels: dict[str, str]) -> Iterator[str]:
    now = stats.now
    for name, text, value in (
        ("uptime_seconds", "Since the engine started.", stats.uptime),
        ("requests_waiting", "Requests in the queue.", now.waiting),
        ("lanes_running", "Lanes that serve a request.", now.running),
        ("lanes", "Lanes there are.", now.max_lanes),
        ("requests_swapped_out", "Requests whose KV is in host memory.", now.swapped_out),
        ("tokens_per_second", "Tokens generated a second, over the last 10 seconds.", stats.tokens_per_second),
        ("kv_used_bytes", "KV cache taken by live sequences.", now.kv_used_bytes),
        ("kv_total_bytes", "KV cache there is.", now.kv_total_bytes),
        ("device_live_bytes", "Device memory allocated.", now.device_live_bytes),
    ):
        if value is not None:
            yield from _head(name, "gauge", text)
            yield _sample(name, labels, value)


def _histogram(name: str, text: str, durations: Durations, labels: dict[str, str]) -> Iterator[str]:
    name = f"{name}_seconds"
    yield from _head(name, "histogram", text)
    for bound, count in zip(SECONDS_BUCKETS, durations.buckets, strict=True):
        yield _sample(f"{name}_bucket", {**labels, "le": repr(bound)}, count)
    yield _sample(f"{name}_bucket", {**labels, "le": "+Inf"}, durations.count)
    yield _sample(f"{name}_sum", labels, durations.sum)
    yield _sample(f"{name}_count", labels, durations.count)


def _head(name: str, kind: Literal["counter", "gauge", "histogram"], text: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{_PREFIX}{name}{{{pairs}}} {value!r}" if pairs else f"{_PREFIX}{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
