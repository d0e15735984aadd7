# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend that ops run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from tests.backends import Device


@pytest.fixture(scope="module")
def backend(device: Device) -> Iterator[GpuBackend]:
    """One backend for a file's tests: on a GPU, a new one would load every module again."""
    with device.open() as gpu:
        yield gpu


@pytest.fixture
def gpu(backend: GpuBackend) -> Iterator[GpuBackend]:
    """`backend`, whose memory is taken back after the test."""
    yield backend
    backend.sweep_unreleased()
