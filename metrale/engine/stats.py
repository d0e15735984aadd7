# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the engine has done and is doing: counted while it runs, and read as one snapshot."""

from __future__ import annotations

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

from metrale.engine.request import FinishReason

REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)

SECONDS_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""Upper bounds of the buckets of every histogram, in seconds; one without a bound follows."""

WINDOW_SECONDS: Final = 10.0
"""Length of the sliding window of `EngineStats.tokens_per_second`."""

_CELLS: Final = 100
"""Parts of the sliding window."""

_RECENT: Final = 4096
"""Values that percentiles are taken from."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took, each time that it happened.

    Attributes
    ----------
    count : int
    sum : float
        Seconds.
    p50, p90, p99 : float or None
        Percentiles of the last 4096, by nearest rank; None before the first.
    buckets : tuple of int
        How many were at most as long as each of `SECONDS_BUCKETS`, those of the smaller bounds included.
    """

    count: int
    sum: float
    p50: float | None
    p90: float | None
    p99: float | None
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is the case at one moment; the engine knows it anyway, so nothing counts it.

    Attributes
    ----------
    waiting : int
        Requests in the queue.
    running : int
        Lanes taken.
    max_lanes : int
    swapped_out : int
        Requests whose KV is in host memory.
    kv_used_bytes, kv_total_bytes : int or None
        None when the model does not say.
    device_live_bytes : int or None
        Device memory allocated; None when not known.
    """

    waiting: int
    running: int
    max_lanes: int
    swapped_out: int = 0
    kv_used_bytes: int | None = None
    kv_total_bytes: int | None = None
    device_live_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot: all counters are of one moment.

    Attributes
    ----------
    uptime : float
        Seconds since the engine started.
    now : Gauges
    submitted : int
        Requests let in.
    rejected : int
        Requests not let in because the queue was full.
    finished : mapping of FinishReason to int
        Requests ended, by why; every reason is there.
    prompt_tokens : int
        Of the requests prefilled, as given: without language and EOS.
    generated_tokens : int
        Tokens chosen, EOS included, the language token not.
    steps, mixed_steps : int
        Forwards, and those of them that prefilled and decoded at once.
    decoded_rows, padded_rows : int
        Decode rows that served a request, and those that only filled up a batch.
    preemptions : int
        Requests whose KV was moved to host memory to make room.
    swapped_out_bytes, swapped_in_bytes : int
        KV moved to host memory, and back.
    tokens_per_second : float
        Generated in the last 10 seconds.
    tokens_per_second_overall : float
        Generated since the start.
    time_to_first_token : Durations
        From submission.
    request_latency : Durations
        From submission to the end, however it ended.
    queue_wait : Durations
        From submission to the first lane.
    """

    uptime: float
    now: Gauges
    submitted: int
    rejected: int
    finished: Mapping[FinishReason, int]
    prompt_tokens: int
    generated_tokens: int
    steps: int
    mixed_steps: int
    decoded_rows: int
    padded_rows: int
    preemptions: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    tokens_per_second: float
    tokens_per_second_overall: float
    time_to_first_token: Durations
    request_latency: Durations
    queue_wait: Durations

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


class Recorder:
    """Counts for `EngineStats`. Any thread calls; a call takes about a microsecond.

    Parameters
    ----------
    clock : callable
        Seconds; the engine's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._finished = dict.fromkeys(REASONS, 0)
        self._window = _Window(self._started)
        self._first_token = _Timer()
        self._latency = _Timer()
        self._queue_wait = _Timer()

    def submitted(self) -> None:
        """Count a request that was let in."""
        with self._lock:
            self._counts["submitted"] += 1

    def rejected(self) -> None:
        """Count a request that was not let in because the queue was full."""
        with self._lock:
            self._counts["rejected"] += 1

    def admitted(self, waited: float) -> None:
        """Count a request that got its first lane, ``waited`` seconds after it was submitted."""
        with self._lock:
            self._queue_wait.add(waited)

    def first_token(self, seconds: float) -> None:
        """Count a request whose first token came ``seconds`` after it was submitted."""
        with self._lock:
            self._first_token.add(seconds)

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """Count a request that ended ``seconds`` after it was submitted."""
        with self._lock:
            self._finished[reason] += 1
            self._latency.add(seconds)

    def step(self, *, rows: int = 0, padded_rows: int = 0, prefills: int = 0, prompt_tokens: int = 0) -> None:
        """Count a forward.

        Parameters
        ----------
        rows : int
            Sequences decoded.
        padded_rows : int
            Rows decoded beside them, to fill up the batch.
        prefills : int
            Prompts prefilled.
        prompt_tokens : int
            Their tokens.
        """
        with self._lock:
            counts = self._counts
            counts["steps"] += 1
            counts["mixed_steps"] += rows > 0 and prefills > 0
            counts["decoded_rows"] += rows
            counts["padded_rows"] += padded_rows
            counts["prompt_tokens"] += prompt_tokens

    def generated(self, tokens: int) -> None:
        """Count tokens that were chosen."""
        with self._lock:
            self._counts["generated_tokens"] += tokens
            self._window.add(self._clock(), tokens)

    def preempted(self, nbytes: int) -> None:
        """Count a request whose KV was moved to host memory."""
        with self._lock:
            self._counts["preemptions"] += 1
            self._counts["swapped_out_bytes"] += nbytes

    def resumed(self, nbytes: int) -> None:
        """Count a request whose KV was moved back."""
        with self._lock:
            self._counts["swapped_in_bytes"] += nbytes

    def snapshot(self, now: Gauges) -> EngineStats:
        """Return the counts of this moment beside what the engine says is the case."""
        with self._lock:
            time_now = self._clock()
            uptime = time_now - self._started
            counts, finished = dict(self._counts), dict(self._finished)
            recent = self._window.rate(time_now)
            timers = [timer.copy() for timer in (self._first_token, self._latency, self._queue_wait)]
        first_token, latency, queue_wait = (timer.durations() for timer in timers)  # sorts, so without the lock
        return EngineStats(
            uptime=uptime,
            now=now,
            finished=finished,
            tokens_per_second=recent,
            tokens_per_second_overall=counts["generated_tokens"] / uptime if uptime > 0 else 0.0,
            time_to_first_token=first_token,
            request_latency=latency,
            queue_wait=queue_wait,
            **counts,
        )


_COUNTERS: Final = (
    "submitted",
    "rejected",
    "prompt_tokens",
    "generated_tokens",
    "steps",
    "mixed_steps",
    "decoded_rows",
    "padded_rows",
    "preemptions",
    "swapped_out_bytes",
    "swapped_in_bytes",
)


class _Window:
    """A count over the last `WINDOW_SECONDS`, to a hundredth of them."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._cells: deque[list[int]] = deque(maxlen=_CELLS)  # [number of the cell since the start, count]

    def _cell(self, now: float) -> int:
        return int((now - self._started) * _CELLS / WINDOW_SECONDS)

    def add(self, now: float, count: int) -> None:
        cell = self._cell(now)
        if self._cells and self._cells[-1][0] == cell:
            self._cells[-1][1] += count
        else:
            self._cells.append([cell, count])

    def rate(self, now: float) -> float:
        """Return the count per second: of the cells that lie wholly in the window, and the one that has begun."""
        first = max(0, self._cell(now) - _CELLS + 1)
        seconds = now - self._started - first * WINDOW_SECONDS / _CELLS
        return sum(count for cell, count in self._cells if cell >= first) / seconds if seconds > 0 else 0.0


class _Timer:
    """Durations as they come: a histogram of all, and the last few thousand as they are."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.buckets = [0] * len(SECONDS_BUCKETS)  # not cumulative yet
        self.recent = array("d")

    def add(self, seconds: float) -> None:
        if len(self.recent) < _RECENT:
            self.recent.append(seconds)
        else:
            self.recent[self.count % _RECENT] = seconds
        self.count += 1
        self.sum += seconds
        bucket = bisect_left(SECONDS_BUCKETS, seconds)
        if bucket < len(self.buckets):
            self.buckets[bucket] += 1

    def copy(self) -> _Timer:
        other = _Timer()
        other.count, other.sum, other.buckets, other.recent = self.count, self.sum, self.buckets[:], self.recent[:]
        return other

    def durations(self) -> Durations:
        ranked = sorted(self.recent)
        cumulative, total = [], 0
        for count in self.buckets:
            total += count
            cumulative.append(total)
        p50, p90, p99 = (ranked[math.ceil(share * len(ranked)) - 1] if ranked else None for share in (0.5, 0.9, 0.99))
        return Durations(self.count, self.sum, p50, p90, p99, tuple(cumulative))
