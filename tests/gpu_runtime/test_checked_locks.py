# SPDX-License-Identifier: MIT OR Apache-2.0
"""The two locks of checked memory are taken in one order, by whichever call."""

from __future__ import annotations

import threading
import time

import pytest

from gpu_runtime.host import HostBackend


@pytest.mark.parametrize("name", ["free", "sweep_unreleased", "close"])
def test_a_release_waits_for_work_without_holding_what_that_needs(name: str) -> None:
    gpu = HostBackend(check=True)
    ptr = gpu.alloc(64)
    memory = gpu._memory
    running, ended = threading.Event(), threading.Event()

    def work() -> None:
        with memory._work:  # type: ignore[attr-defined]  # as a piece of work does while it runs
            running.set()
            time.sleep(0.1)
            memory.find(int(ptr))
        ended.set()

    def release() -> None:
        getattr(gpu, name)(*((ptr,) if name == "free" else ()))

    threads = [threading.Thread(target=target, daemon=True) for target in (work, release)]
    threads[0].start()
    running.wait()
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert ended.is_set()
    assert not threads[1].is_alive()
