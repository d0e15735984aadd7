# SPDX-License-Identifier: MIT OR Apache-2.0
"""A clock that goes when a test says so."""

from __future__ import annotations


class FakeClock:
    """Seconds, as `time.monotonic` gives them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
