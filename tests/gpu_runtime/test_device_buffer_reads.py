# SPDX-License-Identifier: MIT OR Apache-2.0
"""A DeviceBuffer as Python and NumPy read it: memoryviews, the buffer protocol, and the array interfaces."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from gpu_runtime import (
    CudaStream,
    DeviceBuffer,
    DeviceError,
    GpuBackend,
    dtypes,
    from_cuda_array_interface,
    view,
)
from tests.backends import cuda_only, host_only
from tests.gpu_runtime.exchanging import X, lent
from tests.ops.harness import download


@host_only
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"])
def test_memoryviews(gpu: GpuBackend, dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtypes.NUMPY[dtype])
    buffer = lent(gpu, array)
    with buffer.memoryview() as got:
        assert (got.shape, got.format, got.readonly) == (array.shape, array.data.format, False)
        assert np.asarray(got).tolist() == array.tolist()
        np.asarray(got)[0, 0] = 1
        assert gpu.live_exports() == 1
    assert gpu.live_exports() == 0
    assert download(gpu, buffer.ptr, array)[0, 0] == 1


@host_only
def test_a_memoryview_is_an_export_until_it_is_released(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    got = buffer.memoryview()
    part = got[1:]
    got.release()
    rows = np.frombuffer(part, np.float32)
    part.release()
    with pytest.raises(BufferError, match="1 live export"):
        gpu.free(buffer.ptr)
    assert rows.tolist() == X[1:].ravel().tolist()
    del rows
    gpu.free(buffer.ptr)


@host_only
@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes serve the buffer protocol from Python 3.12 on")
@pytest.mark.parametrize("read", [memoryview, np.frombuffer, np.asarray, lambda buffer: memoryview(buffer)[1:]])
def test_the_buffer_protocol_itself(gpu: GpuBackend, read: Any) -> None:
    buffer = lent(gpu)
    got = read(buffer)
    assert gpu.live_exports() == 1
    with pytest.raises(BufferError, match="free: 1 live export"):
        gpu.free(buffer.ptr)
    del got
    gpu.free(buffer.ptr)


@host_only
def test_memoryviews_of_odd_shapes(gpu: GpuBackend) -> None:
    assert lent(gpu, X, readonly=True).memoryview().readonly
    assert np.asarray(lent(gpu, np.array(2.5)).memoryview()).item() == 2.5
    assert view(gpu, 0, (0, 3), "f32").memoryview().shape == (0, 3)
    turned = view(gpu, lent(gpu).ptr, (4, 3), "f32", strides=(4, 16)).memoryview()
    assert np.asarray(turned).tolist() == X.T.tolist()


@host_only
def test_the_array_interface(gpu: GpuBackend) -> None:
    """The array that NumPy makes of it is an export, which the buffer does not outlive."""
    whole = lent(gpu)
    buffer = view(gpu, whole.ptr + 44, (4, 3), "f32", strides=(-4, -16))
    array = np.asarray(buffer)
    assert array.tolist() == X[::-1, ::-1].T.tolist()
    assert array.ctypes.data == buffer.ptr
    array[0, 0] = 77
    assert download(gpu, whole.ptr, X)[2, 3] == 77
    buffer.close()
    with pytest.raises(BufferError, match="1 live export"):
        gpu.free(whole.ptr)
    del array
    assert not np.asarray(view(gpu, whole.ptr, 4, "f32", readonly=True)).flags.writeable
    assert np.asarray(view(gpu, whole.ptr, (0, 2), "f32")).shape == (0, 2)
    assert np.asarray(whole.row(1).row(1)).item() == 5
    gpu.free(whole.ptr)


@pytest.mark.parametrize("way", ["memoryview", "__array_interface__", "__cuda_array_interface__"])
def test_bfloat16_has_no_name(gpu: GpuBackend, way: str) -> None:
    buffer = view(gpu, gpu.alloc(16), 8, "bf16")
    on_gpu = way == "__cuda_array_interface__"
    if on_gpu != (gpu.kind() == "cuda"):
        return
    with pytest.raises(BufferError, match=rf"{way}: expected an element type that has a name there, got bf16"):
        _ = buffer.memoryview() if way == "memoryview" else getattr(buffer, way)


@host_only
def test_host_memory_is_no_gpus(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    assert not hasattr(buffer, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="the memory is the host's"):
        _ = buffer.__cuda_array_interface__
    with pytest.raises(BufferError, match="expected a backend that is a GPU"):
        from_cuda_array_interface(gpu, buffer)
    with pytest.raises(DeviceError, match="CudaStream: expected a backend that is a GPU"):
        CudaStream(gpu)


@cuda_only
def test_a_gpus_memory_is_not_the_hosts(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    assert not hasattr(buffer, "__array_interface__")
    for use in (DeviceBuffer.memoryview, lambda buffer: buffer.__buffer__(0)):
        with pytest.raises(BufferError, match="memory that the host can read"):
            use(buffer)
    assert gpu.live_exports() == 0


@cuda_only
def test_numpy_gets_no_array_of_a_gpus_memory(gpu: GpuBackend) -> None:
    with pytest.raises(TypeError, match="expected memory that the host can read, got a GPU's"):
        np.asarray(lent(gpu))


@cuda_only
def test_the_cuda_array_interface(gpu: GpuBackend) -> None:
    """Reading it is an export for as long as the buffer object lives."""
    stream = gpu.create_stream()
    buffer = lent(gpu, readonly=True, stream=stream)
    ptr = buffer.ptr
    wanted = {"version": 3, "shape": (3, 4), "strides": None, "typestr": "<f4", "data": (ptr, True), "stream": stream}
    assert buffer.__cuda_array_interface__ == buffer.__cuda_array_interface__ == wanted
    assert gpu.live_exports() == 1
    assert lent(gpu).__cuda_array_interface__["stream"] == gpu.default_stream()
    turned = view(gpu, ptr, (4, 3), "f32", strides=(4, 16))
    assert turned.__cuda_array_interface__["strides"] == (4, 16)
    assert view(gpu, ptr, (0,), "f32").__cuda_array_interface__["data"] == (0, False)
    del turned
    buffer.close()
    with pytest.raises(BufferError, match="1 live export"):
        gpu.free(ptr)
    del buffer
    gpu.free(ptr)
