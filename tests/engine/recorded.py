# SPDX-License-Identifier: MIT OR Apache-2.0
"""A recorder on which everything happened."""

from __future__ import annotations

from metrale.engine.stats import Gauges, Recorder
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
