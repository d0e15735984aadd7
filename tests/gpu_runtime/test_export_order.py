# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an export is ordered after, and exports around a capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import DeviceBuffer, DeviceError, GpuBackend, from_dlpack, view
from tests.backends import Device, cuda_only, host_only
from tests.gpu_runtime.exchanging import Producer, X, lent
from tests.gpu_runtime.toy import REGISTRY, SLOW, launch, values
from tests.ops.harness import download, upload

Y = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def busy(gpu: GpuBackend, stream: int) -> DeviceBuffer:
    """Return memory that a slow kernel and a chain of copies are about to write: three quarters of `Y`."""
    source, out = upload(gpu, Y), gpu.alloc(16)
    gpu.memset(out, 0, 16)
    launch(gpu, values(source, source, factor=SLOW), stream)
    for _ in range(20):
        gpu.copy_d2d_async(source, out, 16, stream)
    return view(gpu, out, 4, "f32", stream=stream)


HOST_READERS: dict[str, Any] = {
    "dlpack": np.from_dlpack,
    "memoryview": lambda buffer: np.asarray(buffer.memoryview()),
    "array interface": np.asarray,
}


@host_only
@pytest.mark.parametrize("reader", HOST_READERS)
@pytest.mark.parametrize("order", ["deferred", "adversarial"])
def test_the_host_waits(device: Device, reader: str, order: str) -> None:
    """Where work runs as late as it may, a reader finds the result all the same."""
    with device.open(ops=REGISTRY, order=order) as gpu:
        buffer = busy(gpu, gpu.create_stream())
        got = HOST_READERS[reader](buffer)
        assert got.tolist() == (0.75 * Y).tolist()
        assert got.ctypes.data == buffer.ptr
        del got


@host_only
def test_minus_one_does_not_wait(device: Device) -> None:
    """The host could not tell from waiting otherwise: nothing has run yet."""
    with device.open(ops=REGISTRY, order="deferred") as gpu:
        out = gpu.alloc(16)
        gpu.memset(out, 0, 16)
        gpu.memset_async(out, 1, 16)
        with from_dlpack(gpu, view(gpu, out, 16, "u8").__dlpack__(stream=-1)) as buffer:
            with gpu.launch_trace() as trace:
                capsule = buffer.__dlpack__(stream=-1)
            assert trace == []
            with gpu.launch_trace() as trace:
                capsule = buffer.__dlpack__()
            assert [record.kind for record in trace] == ["wait"]
            del capsule


@cuda_only
def test_a_device_consumer_is_ordered_without_the_host(device: Device) -> None:
    with device.open(ops=REGISTRY) as gpu:
        ours, theirs = gpu.create_stream(), gpu.create_stream()
        buffer, out = busy(gpu, ours), gpu.alloc(16)
        with gpu.launch_trace() as trace:
            capsule = buffer.__dlpack__(stream=theirs)
        assert trace == [], "the host does not wait"
        gpu.copy_d2d_async(buffer.ptr, out, 16, theirs)
        gpu.synchronize(theirs)
        assert download(gpu, out, Y).tolist() == (0.75 * Y).tolist()
        del capsule


@cuda_only
@pytest.mark.parametrize("stream", [0, -5])
def test_streams_that_a_gpu_does_not_take(device: Device, stream: int) -> None:
    with device.open(ops=REGISTRY) as gpu, pytest.raises(ValueError, match="stream: expected"):
        lent(gpu).__dlpack__(stream=stream)


ORDERED: dict[str, Any] = {
    "dlpack": lambda buffer: buffer.__dlpack__(),
    "copy": lambda buffer: buffer.__dlpack__(copy=True),
    "copy on the host": lambda buffer: buffer.__dlpack__(copy=True, dl_device=(1, 0)),
    "import of a copy": lambda buffer: from_dlpack(buffer.gpu, Producer(X), copy=True),
}
ON_HOST: dict[str, Any] = {
    "memoryview": DeviceBuffer.memoryview,
    "array interface": lambda buffer: buffer.__array_interface__,
}
ON_CUDA: dict[str, Any] = {
    "cuda array interface": lambda buffer: buffer.__cuda_array_interface__,
    "another stream": lambda buffer: buffer.__dlpack__(stream=buffer.gpu.create_stream()),
}


@pytest.mark.parametrize("use", ORDERED | ON_HOST | ON_CUDA)
def test_exports_in_a_capture_are_refused(gpu: GpuBackend, use: str) -> None:
    """And leave the capture as it was: its graph does what was captured before and after."""
    uses = ORDERED | (ON_HOST if gpu.kind() == "host" else ON_CUDA)
    if use not in uses:
        return
    buffer, out = lent(gpu), gpu.alloc(48)
    gpu.memset(out, 0, 48)
    exports, blocks = gpu.live_exports(), gpu.live_alloc_count()
    gpu.begin_capture()
    gpu.copy_d2d_async(buffer.ptr, out, 24)
    with pytest.raises(BufferError, match="is capturing: expected an exchange before the capture"):
        uses[use](buffer)
    gpu.copy_d2d_async(buffer.ptr + 24, out + 24, 24)
    graph = gpu.end_capture()
    assert (gpu.live_exports(), gpu.live_alloc_count()) == (exports, blocks)
    gpu.launch_graph(graph)
    assert download(gpu, out, X).tolist() == X.tolist()


def test_without_an_order_an_export_is_no_part_of_a_capture(gpu: GpuBackend) -> None:
    buffer, out = lent(gpu), gpu.alloc(48)
    gpu.begin_capture()
    capsules = [buffer.__dlpack__(stream=-1)]
    if gpu.kind() == "cuda":
        capsules.append(buffer.__dlpack__(stream=gpu.default_stream()))  # the very same stream
    with from_dlpack(gpu, capsules.pop()) as imported:
        gpu.copy_d2d_async(imported.ptr, out, 48)
    gpu.launch_graph(gpu.end_capture())
    assert download(gpu, out, X).tolist() == X.tolist()


def test_a_capture_elsewhere_does_not_matter(gpu: GpuBackend) -> None:
    stream, buffer = gpu.create_stream(), lent(gpu)
    gpu.begin_capture(stream)
    gpu.memset_async(buffer.ptr, 0, 4, stream)
    capsule = buffer.__dlpack__()
    gpu.destroy_graph(gpu.end_capture(stream))
    del capsule


def test_a_stream_that_is_gone(gpu: GpuBackend) -> None:
    stream = gpu.create_stream()
    buffer = lent(gpu, stream=stream)
    gpu.destroy_stream(stream)
    with pytest.raises(DeviceError, match="stream: expected a live stream"):
        buffer.__dlpack__()
    assert gpu.live_exports() == 0
    capsule = buffer.__dlpack__(stream=-1)
    del capsule
