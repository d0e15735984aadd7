# SPDX-License-Identifier: MIT OR Apache-2.0
"""The trial of a GPU, whose body runs on any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_runtime.host import HostBackend
from metrale.cli import gpu_check


@pytest.mark.gpu
def test_the_trial_reports_small_errors() -> None:
    report = gpu_check.probe()
    assert 0 < report["layer_norm_error"] < 2e-6
    assert 0 < report["product_error"] < 1e-3


@pytest.mark.parametrize("attempt", [gpu_check.try_kernel, gpu_check.try_product])
def test_a_trial_leaves_nothing_behind(attempt: Callable[[HostBackend], float]) -> None:
    with HostBackend() as gpu:
        assert 0 < attempt(gpu) < 1e-3
        assert gpu.live_alloc_count() == 0


class Wrong(HostBackend):
    """A device that stores a wrong number, or none at all."""

    value: float = 0.0

    def copy_d2h_on_stream(self, src: int, dst: Any, stream: Any = 0) -> None:
        super().copy_d2h_on_stream(src, dst, stream)
        dst.reshape(-1)[7] = self.value

    def copy_d2h(self, src: int, dst: Any) -> None:
        self.copy_d2h_on_stream(src, dst)


@pytest.mark.parametrize("attempt", [gpu_check.try_kernel, gpu_check.try_product])
@pytest.mark.parametrize("value", [0.0, float("nan"), 1e3])
def test_a_trial_notices_one_wrong_number(attempt: Callable[[HostBackend], float], value: float) -> None:
    with Wrong() as gpu:
        gpu.value = value
        with pytest.raises(RuntimeError, match="expected a relative error of at most"):
            attempt(gpu)
        gpu.sweep_unreleased()
