# SPDX-License-Identifier: MIT OR Apache-2.0
"""What work that runs later needs: it lives until then, and not longer; what does not live is told of."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError, InvalidPointer
from gpu_runtime.host import HostBackend
from gpu_runtime.streams import PER_THREAD_STREAM
from tests.gpu_runtime.checked import opened
from tests.gpu_runtime.ordered import LATER, Noted, every_order
from tests.gpu_runtime.test_checked_faults import FAULTS, Fault

later_orders = pytest.mark.parametrize(("order", "seed"), LATER[:4])


def test_a_buffer_lives_until_its_copy_has_run() -> None:
    class Buffer(np.ndarray[Any, Any]):
        """An array that can be watched."""

    with HostBackend(memory_limit=64, order="deferred") as gpu:
        ptr = gpu.alloc(4)
        buffer = Buffer(4, np.uint8)
        watch = weakref.ref(buffer)
        gpu.copy_h2d_async(buffer, ptr)
        del buffer
        gc.collect()
        assert watch() is not None
        gpu.synchronize()
        gc.collect()
        assert watch() is None
        gpu.free(ptr)


@pytest.mark.parametrize("check", [False, True])
@every_order
def test_work_may_use_a_block_that_is_freed_after_it_was_enqueued(order: Any, seed: int, check: bool) -> None:
    with HostBackend(memory_limit=256, order=order, seed=seed, check=check) as gpu:
        x, y, streams, event = gpu.alloc(8), gpu.alloc(8), [gpu.create_stream() for _ in range(2)], gpu.create_event()
        gpu.memset_async(x, 5, 8, streams[0])
        gpu.record_event(event, streams[0])
        gpu.stream_wait_event(streams[1], event)
        gpu.copy_d2d_async(x, y, 8, streams[1])
        gpu.free(x)
        out = bytearray(8)
        gpu.copy_d2h_on_stream(y, out, streams[1])
        assert out == b"\x05" * 8
        gpu.free(y)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", ["deferred", "adversarial"])
def test_work_that_runs_after_a_free_is_told_so(order: Any, check: bool) -> None:
    """A graph's launch is what can still use a freed block; its arrays were made before."""
    with HostBackend(memory_limit=256, order=order, check=check) as gpu:
        x, y = gpu.alloc(8), gpu.alloc(8)
        gpu.memset(x, 1, 8)
        for _ in range(2):
            gpu.gemm(x, x, y, 1, 1, 2, dtype="f32")
        gpu.begin_capture()
        gpu.gemm(x, x, y, 1, 1, 2, dtype="f32")
        graph = gpu.end_capture()
        gpu.free(x)
        gpu.launch_graph(graph)
        with pytest.raises(InvalidPointer, match=r"gemm: a: [^\n]*\nenqueued at .*in test_work_that_runs_after_a_free"):
            gpu.synchronize()
        gpu.free(y)


@every_order
def test_work_of_a_thread_that_has_ended_runs_all_the_same(order: Any, seed: int) -> None:
    noted = Noted(order, seed)
    thread = threading.Thread(target=noted.put, args=(1, PER_THREAD_STREAM))
    thread.start()
    thread.join()
    gc.collect()
    noted.end()
    assert noted.done == [1]


def test_a_capture_begins_behind_work_that_has_not_run() -> None:
    noted = Noted("deferred")
    gpu = noted.gpu
    noted.put(1)
    gpu.begin_capture()
    noted.put(2)
    graph = gpu.end_capture()
    gpu.launch_graph(graph)
    noted.put(3)
    gpu.launch_graph(graph)
    gpu.destroy_graph(graph)
    assert noted.done == []
    gpu.synchronize()
    assert noted.done == [1, 2, 3, 2]
    noted.end()


def test_a_node_waits_for_what_its_capture_says_and_no_more() -> None:
    """The copy comes after the first fill, and in no certain order with the second one."""
    found = set()
    for seed in range(24):
        with HostBackend(memory_limit=64, order="adversarial", seed=seed) as gpu:
            x, y, out, side, event = gpu.alloc(1), gpu.alloc(1), bytearray(1), gpu.create_stream(), gpu.create_event()
            gpu.begin_capture()
            gpu.memset_async(x, 1, 1)
            gpu.record_event(event)
            gpu.memset_async(x, 2, 1)
            gpu.stream_wait_event(side, event)
            gpu.copy_d2d_async(x, y, 1, side)
            gpu.record_event(event, side)
            gpu.stream_wait_event(0, event)
            gpu.launch_graph(gpu.end_capture())
            gpu.copy_d2h(y, out)
            found.add(out[0])
            gpu.sweep_unreleased()
    assert found == {1, 2}


def run(planted: Fault, faulty: bool, order: Any, seed: int) -> None:
    gpu = opened(planted.reference, order=order, seed=seed)
    planted.program(gpu, faulty)
    gpu.close()


@later_orders
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_at_the_latest_by_close(name: str, order: Any, seed: int) -> None:
    """It is reported in the words that name the call which enqueued the work."""
    planted = FAULTS[name]
    with pytest.raises(DeviceError) as found:
        run(planted, True, order, seed)
    assert type(found.value) is planted.error
    assert re.search(".*".join(planted.says), str(found.value)), f"{found.value}\nshould say {planted.says}"


@later_orders
@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_program_runs_clean(name: str, order: Any, seed: int) -> None:
    run(FAULTS[name], False, order, seed)
