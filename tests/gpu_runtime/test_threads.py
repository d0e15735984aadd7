# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many threads on one backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, InvalidPointer
from gpu_runtime.host import HostBackend
from tests.backends import Device, damaged, host_only
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.hammering import eager_switching, hammer
from tests.ops.harness import download, upload

THREADS = 8


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Change threads every few bytecodes, so that a missing lock shows."""
    with eager_switching():
        yield


def test_alloc_copy_free(gpu: GpuBackend) -> None:
    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        for _ in range(40):
            data = rng.integers(0, 256, int(rng.integers(1, 3000)), dtype=np.uint8)
            ptr = gpu.alloc(data.nbytes, tag=f"thread {index}")
            gpu.copy_h2d(data, ptr)
            assert np.array_equal(download(gpu, ptr, data), data)
            gpu.free(ptr)

    hammer(work, THREADS)
    assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
    if gpu.kind() == "host":
        assert gpu.free_memory() == gpu.total_memory()
    assert damaged(gpu) == []


def test_separate_streams(gpu: GpuBackend) -> None:
    ptrs = [upload(gpu, np.ones(4, dtype=np.float32)) for _ in range(THREADS)]

    def work(index: int) -> None:
        stream, event = gpu.create_stream(), gpu.create_event()
        for _ in range(20):
            launch(gpu, values(ptrs[index], ptrs[index]), stream)
            gpu.record_event(event, stream)
            gpu.stream_wait_event(0, event)
            gpu.event_synchronize(event)
        gpu.destroy_event(event)
        gpu.destroy_stream(stream)

    hammer(work, THREADS)
    for ptr in ptrs:
        assert (download(gpu, ptr, np.empty(4, np.float32)) == 2.0**20).all()


def test_one_stream(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.ones(4, dtype=np.float32))

    def work(_: int) -> None:
        for _ in range(10):
            launch(gpu, values(ptr, ptr))

    hammer(work, THREADS)
    assert (download(gpu, ptr, np.empty(4, np.float32)) == 2.0 ** (10 * THREADS)).all()


def test_captures_in_each_thread(gpu: GpuBackend) -> None:
    ptrs = [upload(gpu, np.ones(4, dtype=np.float32)) for _ in range(THREADS)]

    def work(index: int) -> None:
        for _ in range(10):
            gpu.begin_capture(2)
            launch(gpu, values(ptrs[index], ptrs[index]), 2)
            graph = gpu.end_capture(2)
            gpu.launch_graph(graph)
            gpu.destroy_graph(graph)

    hammer(work, THREADS)
    for ptr in ptrs:
        assert (download(gpu, ptr, np.empty(4, np.float32)) == 2.0**10).all()


def test_one_event(gpu: GpuBackend) -> None:
    """Recorded by all threads at once, it is reached as often as it was recorded."""
    event = gpu.create_event()

    def work(index: int) -> None:
        stream = gpu.create_stream()
        for _ in range(300):
            gpu.record_event(event, stream)

    hammer(work, THREADS)
    gpu.event_synchronize(event)
    assert gpu.event_query(event)


def test_traces(gpu: GpuBackend) -> None:
    """Traces that open and close in other threads lose nothing of this one."""
    ptr = gpu.alloc(8)

    def work(index: int) -> None:
        for _ in range(50):
            with gpu.launch_trace() as trace:
                gpu.memset_async(ptr, index, 1 + index)
            assert 1 + index in {record.nbytes for record in trace}

    with gpu.launch_trace() as whole:
        hammer(work, THREADS)
    assert len(whole) == 50 * THREADS
    with gpu.launch_trace() as after:
        gpu.free(ptr)
    assert after == []


def test_one_thread_alone_frees(gpu: GpuBackend) -> None:
    """Each handle is destroyed once; the others get the error for a dead one, never a KeyError."""
    ptr, stream, event, pinned = gpu.alloc(8), gpu.create_stream(), gpu.create_event(), gpu.alloc_host_pinned(8)
    freed: list[str] = []

    def work(index: int) -> None:
        calls: dict[str, Callable[[], None]] = {
            "block": lambda: gpu.free(ptr),
            "pinned": lambda: gpu.free_host_pinned(pinned),
            "event": lambda: gpu.destroy_event(event),
            "stream": lambda: gpu.destroy_stream(stream),
        }
        for name, call in calls.items():
            try:
                call()
            except (InvalidPointer, DeviceError):
                continue
            freed.append(name)

    hammer(work, THREADS)
    assert freed.count("block") == freed.count("pinned") == 1
    assert {"event", "stream"} <= set(freed)


def test_streams_come_and_go(gpu: GpuBackend) -> None:
    """Beside frees, which ask every stream: a stream is one thread's until that destroys it."""
    ptrs = [upload(gpu, np.ones(4, dtype=np.float32)) for _ in range(THREADS)]
    held: set[int] = set()

    def work(index: int) -> None:
        for _ in range(25):
            stream = gpu.create_stream()
            assert stream not in held
            held.add(stream)
            launch(gpu, values(ptrs[index], ptrs[index], factor=-1.0), stream)
            gpu.free(gpu.alloc(64))
            held.remove(stream)
            gpu.destroy_stream(stream)

    hammer(work, THREADS)
    for ptr in ptrs:
        assert (download(gpu, ptr, np.empty(4, np.float32)) == -1).all()


def test_frees_beside_captures(gpu: GpuBackend) -> None:
    """Half of the threads capture on streams of their own; allocations and frees of the others are no part of it."""
    ptrs = [upload(gpu, np.ones(4, dtype=np.float32)) for _ in range(THREADS)]

    def work(index: int) -> None:
        if index % 2:
            for _ in range(100):
                gpu.free(gpu.alloc(256))
            return
        stream = gpu.create_stream()
        for _ in range(25):
            gpu.begin_capture(stream)
            launch(gpu, values(ptrs[index], ptrs[index], factor=-1.0), stream)
            graph = gpu.end_capture(stream)
            gpu.launch_graph(graph, stream)
            gpu.destroy_graph(graph)
        gpu.synchronize(stream)

    hammer(work, THREADS)
    for index, ptr in enumerate(ptrs):
        assert (download(gpu, ptr, np.empty(4, np.float32)) == (1 if index % 2 else -1)).all()


@pytest.mark.parametrize("check", [False, True])
def test_one_graph_on_many_streams(device: Device, check: bool) -> None:
    """As CUDA has it, launches of one graph come one after the other, whatever stream they are on."""
    options = {"memory_limit": 1 << 20, "check": check} if device.is_host else {}
    with device.open(ops=REGISTRY, **options) as gpu:
        total, one = upload(gpu, np.zeros(4, np.float32)), upload(gpu, np.ones(4, np.float32))
        gpu.begin_capture()
        launch(gpu, values(total, total, bias=one, factor=1.0))
        graph = gpu.end_capture()

        def work(_: int) -> None:
            stream = gpu.create_stream()
            for _ in range(50):
                gpu.launch_graph(graph, stream)
            gpu.synchronize(stream)

        hammer(work, THREADS)
        assert (download(gpu, total, np.empty(4, np.float32)) == 50 * THREADS).all()
        gpu.sweep_unreleased()


@host_only
def test_a_capture_that_a_dead_thread_left_is_nobodys(gpu: GpuBackend) -> None:
    """tests/gpu has it for a GPU, in a process of its own."""
    ptr = upload(gpu, np.ones(4, dtype=np.float32))

    def use() -> None:
        assert not gpu.stream_is_capturing(2)
        event = gpu.create_event()
        launch(gpu, values(ptr, ptr), 2)
        gpu.record_event(event, 2)
        gpu.synchronize(2)
        assert gpu.event_query(event)
        with pytest.raises(DeviceError, match="did not begin a capture"):
            gpu.end_capture(2)

    for work in (lambda: gpu.begin_capture(2), use):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    assert (download(gpu, ptr, np.empty(4, np.float32)) == 2).all()


def test_sweep_and_close_beside_other_calls() -> None:
    for _ in range(5):
        gpu = HostBackend(memory_limit=1 << 20)

        def work(index: int, gpu: HostBackend = gpu) -> None:
            try:
                for _ in range(20):
                    ptr = gpu.alloc(64)
                    gpu.sweep_unreleased()
                    gpu.memset_async(ptr, 0, 8)
            except (InvalidPointer, DeviceError):
                pass
            if index == 3:
                gpu.close()

        hammer(work, THREADS)
        with pytest.raises(DeviceError, match="closed"):
            gpu.alloc(8)


def test_a_thread_that_ends_takes_its_stream_along() -> None:
    with HostBackend() as gpu:
        handles: list[int] = []

        def work() -> None:
            gpu.synchronize(2)
            handles.append(gpu._thread_stream())

        for _ in range(5):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        for handle in set(handles):
            with pytest.raises(DeviceError, match="expected a live stream"):
                gpu.synchronize(handle)
