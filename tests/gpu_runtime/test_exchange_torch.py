# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch as the consumer and the producer, on the host and on a GPU. It is no dependency, and may be missing."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, from_cuda_array_interface, from_dlpack, view
from tests.backends import cuda_only
from tests.gpu_runtime.exchanging import X, lent, settle
from tests.gpu_runtime.test_export_order import Y, busy
from tests.ops.harness import download, upload

torch: Any = pytest.importorskip("torch", reason="PyTorch, which no part of the project needs, is not installed")


@pytest.fixture(autouse=True)
def usable(gpu: GpuBackend) -> None:
    if gpu.kind() == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA, or for another driver")


def where(gpu: GpuBackend) -> str:
    return "cpu" if gpu.kind() == "host" else "cuda"


def test_the_same_memory(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype) == (buffer.ptr, (3, 4), torch.float32)
    assert tensor.device.type == where(gpu)
    assert tensor.tolist() == X.tolist()
    turned = torch.from_dlpack(view(gpu, buffer.ptr, (4, 3), "f32", strides=(4, 16)))
    tensor[0, 1] = 9
    assert turned.tolist() == [[0, 4, 8], [9, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_values_while_our_stream_is_busy(gpu: GpuBackend) -> None:
    buffer = busy(gpu, gpu.create_stream())
    with gpu.launch_trace() as trace:
        tensor = torch.from_dlpack(buffer)
    assert (tensor * 4).tolist() == (3 * Y).tolist()
    assert len(trace) == (1 if gpu.kind() == "host" else 0), "only on the host we wait"


@cuda_only  # PyTorch has no streams on the host
def test_values_on_a_stream_of_theirs(gpu: GpuBackend) -> None:
    buffer = busy(gpu, gpu.create_stream())
    with torch.cuda.stream(torch.cuda.Stream()):
        assert (torch.from_dlpack(buffer) * 4).tolist() == (3 * Y).tolist()


def test_memory_in_use_is_not_freed(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    ptr, part = buffer.ptr, torch.from_dlpack(buffer)[1]
    buffer.close()
    gc.collect()
    with pytest.raises(BufferError, match="free: 1 live export"):
        gpu.free(ptr)
    assert part.tolist() == X[1].tolist()
    del part
    gpu.free(ptr)


def test_an_exception_survives_a_tensor_that_dies_of_it(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    with pytest.raises(ZeroDivisionError):
        print(torch.from_dlpack(buffer), 1 // 0)
    gc.collect()
    assert gpu.live_exports() == 0


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64", "i8", "i32", "i64", "u8", "bool"])
def test_element_types(gpu: GpuBackend, dtype: str) -> None:
    buffer = view(gpu, upload(gpu, np.zeros(64, np.uint8)), 8, dtype)
    tensor = torch.from_dlpack(buffer)
    assert tensor.tolist() == [0] * 8
    assert tensor.data_ptr() == buffer.ptr
    with from_dlpack(gpu, tensor) as back:
        assert (back.dtype, back.ptr) == (dtype, buffer.ptr)
    del tensor


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_odd_shapes(gpu: GpuBackend, shape: Any) -> None:
    assert tuple(torch.from_dlpack(lent(gpu, np.zeros(shape, np.float32))).shape) == shape


def test_copies(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    tensor = torch.from_dlpack(buffer, copy=True)
    assert tensor.data_ptr() != buffer.ptr
    assert tensor.tolist() == X.tolist()
    assert gpu.live_exports(buffer.ptr) == 0
    del tensor
    assert gpu.live_exports() == 0


def test_an_import_is_the_same_memory(gpu: GpuBackend) -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16, device=where(gpu)).reshape(3, 4)
    for one in (tensor, tensor.t(), tensor[:, ::2], tensor[1]):
        with from_dlpack(gpu, one) as buffer, buffer.copy() as copy:
            assert (buffer.ptr, buffer.shape) == (one.data_ptr(), tuple(one.shape))
            got = download(gpu, copy.ptr, np.empty(one.shape, np.uint16))
            assert got.tolist() == one.contiguous().view(torch.int16).tolist()


@cuda_only  # a tensor on the host has no such interface
def test_an_import_by_the_cuda_array_interface(gpu: GpuBackend) -> None:
    tensor = torch.arange(4, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()  # PyTorch names no stream there
    with from_cuda_array_interface(gpu, tensor) as buffer:
        assert buffer.ptr == tensor.data_ptr()
        assert download(gpu, buffer.ptr, Y).tolist() == [0, 1, 2, 3]


def test_an_import_keeps_the_tensors_memory(gpu: GpuBackend) -> None:
    buffer = from_dlpack(gpu, torch.arange(4, dtype=torch.float32, device=where(gpu)))
    gc.collect()
    others = [torch.full((4,), 9.0, device=where(gpu)) for _ in range(20)]
    assert download(gpu, buffer.ptr, Y).tolist() == [0, 1, 2, 3]
    buffer.close()
    settle(gpu)
    del others
