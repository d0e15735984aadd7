# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beside CuPy and other users of the device: their memory, streams and allocators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.backends import Device, cuda_only
from tests.gpu_runtime.toy import SLOW, launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


def test_memory_of_cupy_is_as_good_as_ours(toy_gpu: GpuBackend) -> None:
    import cupy

    theirs = cupy.asarray(X)
    cupy.cuda.get_current_stream().synchronize()
    ours = toy_gpu.alloc(16)
    launch(toy_gpu, values(theirs.data.ptr, ours))
    toy_gpu.copy_d2d(ours, theirs.data.ptr, 16)
    assert cupy.asnumpy(theirs).tolist() == [2, 4, 6, 8]
    toy_gpu.gemm(theirs.data.ptr, theirs.data.ptr, ours, 1, 1, 4, dtype="f32")
    assert download(toy_gpu, ours, np.zeros(1, np.float32)).tolist() == [120]
    toy_gpu.memset(theirs.data.ptr, 0, 8)
    assert cupy.asnumpy(theirs).tolist() == [0, 0, 6, 8]


def test_streams_of_cupy_are_as_good_as_ours(toy_gpu: GpuBackend) -> None:
    """An object with ``__cuda_stream__``, its raw handle, and the legacy stream, which the object gives as 0."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    ptr, out = upload(toy_gpu, X), toy_gpu.alloc(16)
    forms: list[Any] = [stream.ptr, cupy.cuda.Stream.null.ptr or 1]
    if hasattr(stream, "__cuda_stream__"):
        forms += [stream, cupy.cuda.Stream.null]
    for form in forms:
        toy_gpu.memset(out, 0, 16)
        launch(toy_gpu, values(ptr, out, factor=SLOW), form)
        with toy_gpu.launch_trace() as trace:
            toy_gpu.copy_d2d_async(out, ptr, 16, form)
        toy_gpu.synchronize(form)
        assert download(toy_gpu, out, X).tolist() == (0.75 * X).tolist()
        assert trace[0].stream in (stream.ptr, 1)
        toy_gpu.copy_h2d(X, ptr)


def test_a_foreign_stream_is_ordered_by_events(toy_gpu: GpuBackend) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    ptr, out, event = upload(toy_gpu, X), toy_gpu.alloc(16), toy_gpu.create_event()
    launch(toy_gpu, values(ptr, out))
    toy_gpu.synchronize()
    launch(toy_gpu, values(ptr, ptr, factor=SLOW), stream.ptr)
    toy_gpu.record_event(event, stream.ptr)
    toy_gpu.stream_wait_event(0, event)
    launch(toy_gpu, values(ptr, out))
    assert download(toy_gpu, out, X).tolist() == (1.5 * X).tolist()


def test_a_block_is_kept_for_a_foreign_stream(toy_gpu: GpuBackend) -> None:
    """Freed while the stream still reads it; what is allocated next does not get its memory."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    out = toy_gpu.alloc(4096)
    shape = {"width": 1024, "x_stride": 1024, "out_stride": 1024}
    ptr = upload(toy_gpu, np.full(1024, 2, dtype=np.float32))
    launch(toy_gpu, values(ptr, out, **shape))
    toy_gpu.synchronize()
    launch(toy_gpu, values(ptr, out, factor=SLOW, **shape), stream.ptr)
    toy_gpu.free(ptr)
    for _ in range(20):
        toy_gpu.memset(toy_gpu.alloc(4096), 0xFF, 4096)
    stream.synchronize()
    assert (download(toy_gpu, out, np.empty(1024, np.float32)) == 1.5).all()


def test_the_users_allocator_is_honoured(device: Device) -> None:
    """A memory resource that a user set for CuPy serves our blocks as well, and gets them back."""
    import cupy

    if not device.has_redzones:
        pytest.skip("the session asked for no pool (--no-pool)")
    pool = cupy.cuda.MemoryPool()
    sizes: list[int] = []

    def malloc(nbytes: int) -> Any:
        sizes.append(nbytes)
        return pool.malloc(nbytes)

    with device.open(redzones=False) as gpu, cupy.cuda.using_allocator(malloc):
        ptr = gpu.alloc(123_456)
        assert sizes == [123_456]
        assert pool.used_bytes() >= 123_456
        gpu.free(ptr)
        gpu.synchronize()
        gpu.free(gpu.alloc(8))
    assert pool.used_bytes() == 0


def test_a_cooperative_launch_that_does_not_fit_is_refused(toy_gpu: GpuBackend) -> None:
    """Each time: CuPy would shrink the grid, with a warning."""
    ptr = upload(toy_gpu, X)
    handle = toy_gpu.kernel("toy", "toy_f32")
    for _ in range(2):
        with pytest.raises(ValueError, match="cooperative"):
            toy_gpu.launch(handle, 1 << 20, 1024, 0, 0, values(ptr, ptr), cooperative=True)
    toy_gpu.launch(handle, toy_gpu.sm_count(), 1024, 0, 0, values(ptr, ptr), cooperative=True)
    assert download(toy_gpu, ptr, X).tolist() == (2 * X).tolist()


def test_handles_of_another_backend_find_the_same_kernel(toy_gpu: GpuBackend, device: Device) -> None:
    from tests.gpu_runtime.toy import REGISTRY

    with device.open(ops=REGISTRY) as other:
        handle = other.kernel("toy", "toy_f32")
        ptr = upload(toy_gpu, X)
        toy_gpu.launch(handle, 1, 32, 0, 0, values(ptr, ptr))
        assert download(toy_gpu, ptr, X).tolist() == (2 * X).tolist()
    with pytest.raises(DeviceError, match="closed"):
        other.kernel("toy", "toy_f32")
