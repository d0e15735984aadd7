# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whom a use of shared memory waits for, and whom it need not."""

from __future__ import annotations

import pytest

from gpu_runtime import GpuBackend
from metrale.nllb.turns import Turn
from tests.nllb.replaying import counting


@pytest.mark.parametrize(("used", "waits", "told"), [("own", "own", 1), ("own", 0, 1), (0, "own", 1), (0, 0, 0)])
def test_only_the_default_stream_need_not_wait_for_itself(
    gpu: GpuBackend, used: object, waits: object, told: int
) -> None:
    """Another one may have been destroyed since, and a new one have its handle."""
    stream = gpu.create_stream()
    turn = Turn(gpu)
    with turn.use(0 if used == 0 else stream):
        pass
    with counting(gpu) as calls:
        turn.wait(0 if waits == 0 else stream)
    assert calls["stream_wait_event"] == told
    turn.free()
    gpu.destroy_stream(stream)


def test_the_latest_use_counts(gpu: GpuBackend) -> None:
    """Also one that fails half way."""
    stream = gpu.create_stream()
    turn = Turn(gpu)
    with turn.use(0):
        pass
    with pytest.raises(ZeroDivisionError), turn.use(stream):
        _ = 1 // 0
    with counting(gpu) as calls:
        turn.wait(0)
    assert calls["stream_wait_event"] == 1
    turn.free()
    gpu.destroy_stream(stream)
