# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the device layer's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime.host import HostBackend
from tests.gpu_runtime.toy import REGISTRY


@pytest.fixture
def gpu() -> Iterator[HostBackend]:
    """A host backend whose only kernel is the toy one, with a megabyte of memory."""
    with HostBackend(ops=REGISTRY, memory_limit=1 << 20) as backend:
        yield backend
        backend.sweep_unreleased()
