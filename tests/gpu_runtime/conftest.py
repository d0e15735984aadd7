# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the device layer's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from tests.backends import Device
from tests.gpu_runtime.toy import REGISTRY


@pytest.fixture
def gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend whose only kernel is the toy one; on the host, with a megabyte of memory."""
    limit = {"memory_limit": 1 << 20} if device.is_host else {}
    with device.open(ops=REGISTRY, **limit) as backend:
        yield backend
        backend.sweep_unreleased()
