# SPDX-License-Identifier: MIT OR Apache-2.0
"""The calls that tests of every call make: they are all, and they pass or are refused, as they should."""

from __future__ import annotations

from typing import Any

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import GpuRuntimeError
from tests.gpu_runtime.every_call import CANNOT_FAIL, EXCHANGE, NAMES, method_of, refused_calls, sound_calls


def test_they_are_all(gpu: GpuBackend) -> None:
    assert {method_of(name) for name in sound_calls(gpu)} == NAMES - {"bind_to_thread", "close"} | {EXCHANGE}
    assert {method_of(name) for name in refused_calls(gpu)} == NAMES - CANNOT_FAIL | {EXCHANGE}


def test_they_pass(gpu: GpuBackend) -> None:
    for call in sound_calls(gpu).values():
        call()


def test_they_are_refused(gpu: GpuBackend) -> None:
    """And leave the backend usable."""
    for name, call in refused_calls(gpu).items():
        error: Any = None
        try:
            call()
        except (GpuRuntimeError, BufferError, TypeError, ValueError) as caught:
            error = caught
        assert error is not None, f"{name} was not refused"
    gpu.synchronize()
    assert gpu.live_alloc_count() == 1
