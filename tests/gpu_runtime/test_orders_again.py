# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tests of streams, captures, copies and threads once more, on host backends whose work runs later.

What runs on a GPU as well says nothing of when work runs, so it holds for every order. Tests of the host alone are left
out: many of them look at what a call has done before anybody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends import Device
from tests.gpu_runtime import test_capture, test_copies, test_streams, test_threads
from tests.gpu_runtime.test_capture import ptrs
from tests.gpu_runtime.test_copies import ptr

__all__ = ["device", "ptr", "ptrs"]  # fixtures


@pytest.fixture(scope="session", params=["deferred", "adversarial-0", "adversarial-1"])
def device(request: pytest.FixtureRequest) -> Device:
    order, _, seed = request.param.partition("-")
    return Device("host", {"order": order, "seed": int(seed or 0)})


def on_any_device() -> Iterator[tuple[str, Any]]:
    """Yield the tests of these modules that run on any backend, each under a name of its own."""
    for module in (test_capture, test_copies, test_streams, test_threads):
        for name, function in vars(module).items():
            marks = getattr(function, "pytestmark", [])
            if name.startswith("test_") and not any(mark.args[:1] == ("device",) for mark in marks):
                yield f"{name}_of_{module.__name__.rpartition('_')[2]}", function


globals().update(on_any_device())
