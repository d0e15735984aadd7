# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams and events."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.host import HostBackend
from gpu_runtime.host.streams import HostStream, InOrder
from tests.backends import Device, cuda_only, host_only, words
from tests.gpu_runtime.toy import FAIL, REGISTRY, SLOW, launch, values
from tests.ops.harness import download, upload


def test_default_stream_has_a_handle_of_its_own(gpu: GpuBackend) -> None:
    default = gpu.default_stream()
    assert default == gpu.default_stream()
    assert default not in (0, 1, 2)
    assert default != gpu.create_stream()
    gpu.synchronize()
    gpu.synchronize(default)


def test_streams_live_until_they_are_destroyed(gpu: GpuBackend) -> None:
    streams = [gpu.create_stream() for _ in range(3)]
    assert len(set(streams)) == 3
    gpu.destroy_stream(streams[1])
    for call in (gpu.destroy_stream, gpu.synchronize, gpu.stream_is_capturing, gpu.begin_capture):
        with pytest.raises(DeviceError, match="expected a live stream"):
            call(streams[1])
    gpu.synchronize(streams[0])
    gpu.synchronize(streams[2])


def test_streams_that_the_backend_owns_cannot_be_destroyed(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(8)
    with gpu.launch_trace() as trace:
        gpu.memset_async(ptr, 0, 8, 2)
    for stream in (0, 1, 2, gpu.default_stream(), trace[0].stream):
        with pytest.raises(DeviceError, match=words(gpu, "one that the backend owns")):
            gpu.destroy_stream(stream)
        gpu.synchronize(stream)


@host_only
def test_each_thread_has_its_own_per_thread_stream(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(8)
    with gpu.launch_trace() as trace:
        for _ in range(2):
            gpu.memset_async(ptr, 0, 8, 2)
        thread = threading.Thread(target=gpu.memset_async, args=(ptr, 0, 8, 2))
        thread.start()
        thread.join()
    first, second, other = (record.stream for record in trace)
    assert first == second != other


@host_only
def test_handles_of_another_backend_mean_nothing(gpu: GpuBackend) -> None:
    with HostBackend() as other:
        stream, event = other.create_stream(), other.create_event()
        with pytest.raises(DeviceError, match="live stream"):
            gpu.synchronize(stream)
        with pytest.raises(DeviceError, match="live event"):
            gpu.record_event(event)
        with pytest.raises(DeviceError, match="live stream"):
            gpu.synchronize(other.default_stream())


def test_events(gpu: GpuBackend) -> None:
    stream, event = gpu.create_stream(), gpu.create_event()
    assert gpu.event_query(event), "never recorded"
    gpu.event_synchronize(event)
    gpu.stream_wait_event(0, event)
    gpu.record_event(event, stream)
    gpu.stream_wait_event(0, event)
    gpu.event_synchronize(event)
    assert gpu.event_query(event)
    gpu.destroy_event(event)
    calls: list[Any] = [gpu.record_event, gpu.event_query, gpu.event_synchronize, gpu.destroy_event]
    for call in (*calls, lambda event: gpu.stream_wait_event(0, event)):
        with pytest.raises(DeviceError, match=words(gpu, "expected a live event")):
            call(event)


def test_elapsed(gpu: GpuBackend) -> None:
    start, end = gpu.create_event(timing=True), gpu.create_event(timing=True)
    with pytest.raises(DeviceError, match=words(gpu, "recorded and reached")):
        gpu.event_elapsed_ms(start, end)
    gpu.record_event(start)
    with pytest.raises(DeviceError, match=words(gpu, "recorded and reached")):
        gpu.event_elapsed_ms(start, end)
    gpu.record_event(end)
    gpu.event_synchronize(end)
    assert gpu.event_elapsed_ms(start, end) >= 0
    assert gpu.event_elapsed_ms(start, start) == 0
    assert gpu.event_elapsed_ms(end, start) == pytest.approx(-gpu.event_elapsed_ms(start, end))


def test_elapsed_needs_timing(gpu: GpuBackend) -> None:
    start, end = gpu.create_event(timing=True), gpu.create_event()
    gpu.record_event(start)
    gpu.record_event(end)
    with pytest.raises(DeviceError, match=words(gpu, "timing=True")):
        gpu.event_elapsed_ms(start, end)


@pytest.mark.parametrize("handle", [None, "7", 1.0, True, [1]])
def test_handles_are_integers(gpu: GpuBackend, handle: Any) -> None:
    calls = (gpu.record_event, gpu.event_query, gpu.destroy_event, gpu.launch_graph, gpu.destroy_graph)
    for call in calls:
        with pytest.raises(TypeError, match="expected an integer"):
            call(handle)
    for stream_call in (gpu.destroy_stream, gpu.synchronize, gpu.end_capture):
        with pytest.raises(TypeError, match="stream: expected"):
            stream_call(handle)


def test_kinds_of_handles_are_told_apart(gpu: GpuBackend) -> None:
    stream, event = gpu.create_stream(), gpu.create_event()
    with pytest.raises(DeviceError):
        gpu.destroy_event(stream)
    with pytest.raises(DeviceError):
        gpu.destroy_stream(event)
    with pytest.raises(DeviceError):
        gpu.launch_graph(event)


@host_only
def test_a_kernel_that_fails_leaves_the_stream_usable(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.ones(4, dtype=np.float32))
    with pytest.raises(DeviceError, match="failed as asked"):
        launch(gpu, values(ptr, ptr, factor=FAIL))
    launch(gpu, values(ptr, ptr))
    gpu.synchronize()


@cuda_only
def test_work_on_a_gpu_runs_later(gpu: GpuBackend) -> None:
    """A kernel of 30 ms: nothing that enqueues waits for it, and everything that waits does."""
    ptr, other = upload(gpu, np.ones(4, dtype=np.float32)), gpu.alloc(16)
    gpu.launch(gpu.kernel("toy", "toy_f32"), 1, 32, 0, 0, values(ptr, other))  # the module is loaded
    gpu.synchronize()
    streams = [gpu.create_stream() for _ in range(2)]
    start, end, joined = gpu.create_event(timing=True), gpu.create_event(timing=True), gpu.create_event()
    memory = gpu.alloc_host_pinned(16)
    out = memory.array.view(np.float32)
    gpu.record_event(start, streams[0])
    launch(gpu, values(ptr, other, factor=SLOW), streams[0])
    gpu.record_event(end, streams[0])
    gpu.stream_wait_event(streams[1], end)
    launch(gpu, values(other, other), streams[1])
    gpu.copy_d2h_async(other, out, streams[1])
    gpu.record_event(joined, streams[1])
    assert not gpu.event_query(end)
    assert not gpu.event_query(joined)
    assert out.tolist() == [0] * 4
    with pytest.raises(DeviceError):
        gpu.event_elapsed_ms(start, end)
    gpu.event_synchronize(joined)
    assert out.tolist() == [1.5] * 4
    assert gpu.event_query(end)
    assert 29 < gpu.event_elapsed_ms(start, end) < 3000
    for wait in (gpu.synchronize, gpu.destroy_stream):
        out[:] = 0
        launch(gpu, values(ptr, ptr, factor=SLOW), streams[0])
        gpu.copy_d2h_async(ptr, out, streams[0])
        wait(streams[0])
        assert out[0] > 0
    gpu.free_host_pinned(memory)


@cuda_only
def test_a_block_may_be_freed_while_work_uses_it(gpu: GpuBackend) -> None:
    """On a stream that the free knows nothing of; new blocks do not get its memory before the work is done."""
    stream = gpu.create_stream()
    ptr, out = upload(gpu, np.full(1024, 2, dtype=np.float32)), gpu.alloc(4096)
    shape = {"width": 1024, "x_stride": 1024, "out_stride": 1024}
    launch(gpu, values(ptr, out, **shape))
    gpu.synchronize()
    launch(gpu, values(ptr, out, factor=SLOW, **shape), stream)
    gpu.free(ptr)
    blocks = [gpu.alloc(4096) for _ in range(20)]
    for block in blocks:
        gpu.memset(block, 0xFF, 4096)
    gpu.synchronize(stream)
    assert (download(gpu, out, np.empty(1024, np.float32)) == 1.5).all()


@cuda_only
def test_close_finishes_the_work_of_a_gpu(device: Device) -> None:
    gpu = device.open(ops=REGISTRY)
    ptr, target, stream = upload(gpu, np.ones(4, dtype=np.float32)), np.zeros(4, np.float32), gpu.create_stream()
    launch(gpu, values(ptr, ptr, factor=SLOW), stream)
    gpu.copy_d2h_async(ptr, target, stream)
    gpu.free(ptr)
    gpu.close()
    assert target.tolist() == [0.75] * 4


def test_in_order_keeps_one_stream_to_one_thread_at_a_time() -> None:
    stream, order, inside, peak = HostStream(0x100), InOrder(), 0, 0

    def work() -> None:
        nonlocal inside, peak
        inside += 1
        peak = max(peak, inside)
        threading.Event().wait(0.001)
        inside -= 1

    threads = [threading.Thread(target=order.submit, args=(stream, work)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak == 1
