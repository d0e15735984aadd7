# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a mutated module calls instead of `metrale.nllb.turns.Turn.use`: one half of it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_runtime.streams import StreamLike
from metrale.nllb.turns import Turn


@contextmanager
def without_wait(turn: Turn, stream: StreamLike) -> Iterator[None]:
    """Record the turn's event after the work, which has not waited for the use before it."""
    try:
        yield
    finally:
        turn._gpu.record_event(turn.event, stream)


@contextmanager
def without_record(turn: Turn, stream: StreamLike) -> Iterator[None]:
    """Wait for the use before, and leave no trace of this one."""
    turn.wait(stream)
    yield
