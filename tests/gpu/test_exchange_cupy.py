# SPDX-License-Identifier: MIT OR Apache-2.0
"""CuPy as the consumer and the producer: the same memory, and right values while streams are busy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime import (
    CudaStream,
    DeviceBuffer,
    DeviceError,
    GpuBackend,
    InvalidPointer,
    from_cuda_array_interface,
    from_dlpack,
    view,
    wrap,
)
from tests.backends import Device, cuda_only
from tests.gpu_runtime.exchanging import Owner, Producer, X, lent, settle
from tests.gpu_runtime.test_export_order import Y, busy
from tests.gpu_runtime.toy import SLOW, launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

Take = Callable[[DeviceBuffer], Any]


def by_dlpack(buffer: DeviceBuffer) -> Any:
    import cupy

    return cupy.from_dlpack(buffer)


def by_interface(buffer: DeviceBuffer) -> Any:
    import cupy

    return cupy.asarray(buffer)


WAYS = pytest.mark.parametrize("take", [by_dlpack, by_interface])


def streams() -> list[Any]:
    """Return streams of CuPy that a consumer may have as its own."""
    import cupy

    return [cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds]


@WAYS
def test_the_same_memory(toy_gpu: GpuBackend, take: Take) -> None:
    buffer = lent(toy_gpu)
    array = take(buffer)
    assert (array.data.ptr, array.shape, array.dtype) == (buffer.ptr, X.shape, X.dtype)
    assert array.get().tolist() == X.tolist()
    turned = take(view(toy_gpu, buffer.ptr, (4, 3), "f32", strides=(4, 16)))
    assert turned.get().tolist() == X.T.tolist()
    array[0, 0] = 7
    assert turned.get()[0, 0] == 7
    del array, turned


@WAYS
@pytest.mark.parametrize("index", range(3))
def test_values_while_our_stream_is_busy(toy_gpu: GpuBackend, take: Take, index: int) -> None:
    """A kernel of 30 ms and a chain of copies come before what CuPy's stream reads."""
    buffer = busy(toy_gpu, toy_gpu.create_stream())
    with streams()[index] as stream:
        with toy_gpu.launch_trace() as trace:
            array = take(buffer)
        copy = array + 0
        stream.synchronize()
        assert copy.get().tolist() == (0.75 * Y).tolist()
        assert trace == [], "we do not wait on the host"
        del array


def test_values_while_the_default_stream_is_busy(toy_gpu: GpuBackend) -> None:
    import cupy

    source, out = upload(toy_gpu, Y), toy_gpu.alloc(16)
    launch(toy_gpu, values(source, out, factor=SLOW))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.from_dlpack(view(toy_gpu, out, 4, "f32"))
        doubled = array * 2
        stream.synchronize()
        assert doubled.get().tolist() == (1.5 * Y).tolist()
        del array


@WAYS
def test_memory_in_use_is_not_freed(toy_gpu: GpuBackend, take: Take) -> None:
    buffer = lent(toy_gpu)
    ptr, array = buffer.ptr, take(buffer)
    del buffer
    part = array[1]
    del array
    gc.collect()
    with pytest.raises(BufferError, match="free: 1 live export"):
        toy_gpu.free(ptr)
    assert part.get().tolist() == X[1].tolist()
    del part
    gc.collect()
    toy_gpu.free(ptr)


def test_a_thread_that_drops_the_last_array(toy_gpu: GpuBackend) -> None:
    buffer = lent(toy_gpu)
    arrays = [by_dlpack(buffer) for _ in range(8)]
    threads = [threading.Thread(target=arrays.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    toy_gpu.free(buffer.ptr)


def test_read_only_memory(toy_gpu: GpuBackend) -> None:
    buffer = lent(toy_gpu, readonly=True)
    assert buffer.__cuda_array_interface__["data"] == (buffer.ptr, True)
    assert by_interface(buffer).get().tolist() == X.tolist()


def test_bfloat16(toy_gpu: GpuBackend) -> None:
    import cupy

    if int(cupy.__version__.partition(".")[0]) < 14:
        pytest.skip("CuPy takes bfloat16 from version 14 on")
    bits = np.arange(8, dtype=np.uint16) << 7
    buffer = view(toy_gpu, upload(toy_gpu, bits), 8, "bf16")
    array = by_dlpack(buffer)
    assert array.data.ptr == buffer.ptr
    assert array.view(np.uint16).get().tolist() == bits.tolist()
    del array


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@WAYS
def test_nothing_at_all(toy_gpu: GpuBackend, take: Take, shape: Any) -> None:
    assert take(view(toy_gpu, toy_gpu.alloc(8), shape, "f32")).shape == shape


def test_a_copy_is_the_consumers(toy_gpu: GpuBackend) -> None:
    """Also one on the host, which NumPy takes."""
    buffer = busy(toy_gpu, toy_gpu.create_stream())

    class Copy:
        def __init__(self, **request: Any) -> None:
            self._request = request

        def __dlpack_device__(self) -> tuple[int, int]:
            asked: tuple[int, int] | None = self._request.get("dl_device")
            return asked or buffer.__dlpack_device__()

        def __dlpack__(self, **request: Any) -> Any:
            return buffer.__dlpack__(**{**request, **self._request})

    import cupy

    array = cupy.from_dlpack(Copy(copy=True))
    on_host = np.from_dlpack(Copy(dl_device=(1, 0)))
    assert array.data.ptr != buffer.ptr
    assert toy_gpu.live_exports(buffer.ptr) == 0
    assert array.get().tolist() == on_host.tolist() == (0.75 * Y).tolist()
    toy_gpu.free(buffer.ptr)
    del array
    assert toy_gpu.live_exports() == 0


def test_page_locked_memory_is_read_after_its_stream(toy_gpu: GpuBackend) -> None:
    """NumPy knows no streams; so the host waits."""
    source, stream = upload(toy_gpu, Y), toy_gpu.create_stream()
    memory = toy_gpu.alloc_host_pinned(16)
    launch(toy_gpu, values(source, source, factor=SLOW), stream)
    toy_gpu.copy_d2h_async(source, memory.array, stream)
    buffer = view(toy_gpu, memory.address, 4, "f32", stream=stream)
    array = np.from_dlpack(buffer)
    assert array.ctypes.data == memory.address
    assert array.tolist() == (0.75 * Y).tolist()
    assert np.asarray(buffer).tolist() == buffer.memoryview().tolist() == (0.75 * Y).tolist()
    with pytest.raises(BufferError, match="free_host_pinned: 1 live export"):
        toy_gpu.free_host_pinned(memory)
    del array
    toy_gpu.free_host_pinned(memory)


# CuPy as the producer


def import_dlpack(gpu: GpuBackend, array: Any, stream: Any = 0) -> DeviceBuffer:
    return from_dlpack(gpu, array, stream=stream)


def import_interface(gpu: GpuBackend, array: Any, stream: Any = 0) -> DeviceBuffer:
    return from_cuda_array_interface(gpu, array, stream=stream)


IMPORTS = pytest.mark.parametrize("bring", [import_dlpack, import_interface])


@IMPORTS
def test_an_import_is_the_same_memory(toy_gpu: GpuBackend, bring: Any) -> None:
    import cupy

    array = cupy.asarray(X)
    views = [array, array.T, array[:, ::2], array[1], cupy.zeros((0, 3), "f2")]
    if bring is import_interface:
        views.append(array[::-1])  # CuPy's capsules do not say strides below 0 rightly
    for one in views:
        with bring(toy_gpu, one) as buffer, buffer.copy() as copy:
            assert (buffer.shape, buffer.strides) == (one.shape, one.strides) or not one.size
            if one.size:
                assert buffer.ptr == one.data.ptr
            assert download(toy_gpu, copy.ptr, np.empty(one.shape, one.dtype)).tolist() == one.get().tolist()


@IMPORTS
@pytest.mark.parametrize("ours", [False, True])
def test_an_import_comes_after_the_producers_stream(toy_gpu: GpuBackend, bring: Any, ours: bool) -> None:
    """The producer's stream is in a kernel of 30 ms; ours reads what that writes, and the host waits for neither."""
    import cupy

    source, out = upload(toy_gpu, Y), toy_gpu.alloc(16)
    launch(toy_gpu, values(source, out))
    toy_gpu.synchronize()
    stream = toy_gpu.create_stream() if ours else 0
    with cupy.cuda.Stream(non_blocking=True) as theirs:
        array = cupy.zeros(4, cupy.float32)
        launch(toy_gpu, values(source, array.data.ptr, factor=SLOW), theirs.ptr)
        buffer = bring(toy_gpu, array, stream)
    toy_gpu.copy_d2d_async(buffer.ptr, out, 16, stream)
    toy_gpu.synchronize(stream)
    assert download(toy_gpu, out, Y).tolist() == (0.75 * Y).tolist()
    buffer.close()


@IMPORTS
def test_an_import_is_kept_until_our_work_is_done(toy_gpu: GpuBackend, bring: Any) -> None:
    """Closed and dropped while a slow kernel reads it: CuPy does not get the memory back before."""
    import cupy

    out = toy_gpu.alloc(4096)
    shape = {"width": 1024, "x_stride": 1024, "out_stride": 1024}
    array = cupy.full(1024, 2, cupy.float32)
    ptr = array.data.ptr
    buffer = bring(toy_gpu, array)
    launch(toy_gpu, values(buffer.ptr, out, factor=SLOW, **shape))
    buffer.close()
    del array, buffer
    gc.collect()
    others = [cupy.full(1024, 9, cupy.float32) for _ in range(20)]
    assert ptr not in {other.data.ptr for other in others}
    assert (download(toy_gpu, out, np.empty(1024, np.float32)) == 1.5).all()
    settle(toy_gpu)
    del others


def test_wrapped_memory(toy_gpu: GpuBackend) -> None:
    import cupy

    owner = Owner(cupy.asarray(Y))
    gone, address = owner.gone, owner.array.data.ptr
    out = toy_gpu.alloc(16)
    with wrap(toy_gpu, address, 16, owner) as buffer:
        del owner
        launch(toy_gpu, values(buffer.ptr, out))
        assert download(toy_gpu, out, Y).tolist() == (2 * Y).tolist()
        assert gone == []
    settle(toy_gpu)
    assert gone == [True]


@pytest.mark.parametrize("address", [X.ctypes.data, 64, 1 << 40])
def test_what_a_gpu_cannot_reach(toy_gpu: GpuBackend, address: int) -> None:
    with pytest.raises(InvalidPointer, match="foreign memory: expected an address that device"):
        wrap(toy_gpu, address, 16, None)


def test_page_locked_and_managed_memory_of_others(toy_gpu: GpuBackend) -> None:
    import cupy

    source = upload(toy_gpu, Y)
    locked, managed = cupy.cuda.alloc_pinned_memory(16), cupy.cuda.malloc_managed(16)
    for memory in (locked, managed):
        with wrap(toy_gpu, memory.ptr, 16, memory) as buffer:
            toy_gpu.copy_d2d(source, buffer.ptr, 16)
            assert download(toy_gpu, buffer.ptr, Y).tolist() == Y.tolist()
    assert np.frombuffer(locked, np.float32, 4).tolist() == Y.tolist()


def test_interfaces_that_are_refused(toy_gpu: GpuBackend) -> None:
    good = lent(toy_gpu).__cuda_array_interface__

    class Bad:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = {**good, **changes}

    for changes, error, words in (
        ({"mask": object()}, BufferError, "without a mask"),
        ({"typestr": "<M8[s]"}, BufferError, "dtype: expected one of"),
        ({"typestr": ">f4"}, BufferError, "dtype: expected one of"),
        ({"data": 12}, ValueError, "expected data, shape and typestr"),
        ({"stream": 0}, ValueError, "stream: expected at least 1"),
        ({"strides": (4,)}, ValueError, "strides: expected 2"),
    ):
        with pytest.raises(error, match=words):
            from_cuda_array_interface(toy_gpu, Bad(**changes))
    with pytest.raises(TypeError, match="expected an object with __cuda_array_interface__"):
        from_cuda_array_interface(toy_gpu, X)
    with from_cuda_array_interface(toy_gpu, Bad(stream=None, strides=None)) as buffer:
        assert buffer.ptr == good["data"][0]


def test_a_host_array_is_copied(toy_gpu: GpuBackend) -> None:
    producer = Producer(X)
    with from_dlpack(toy_gpu, producer) as buffer:
        assert toy_gpu.find_block(buffer.ptr) is not None
        assert by_dlpack(buffer).get().tolist() == X.tolist()
    settle(toy_gpu)
    assert len(producer.deleted) == 1


# streams given out


def test_our_stream_as_cupys(toy_gpu: GpuBackend) -> None:
    """What CuPy puts on it comes after what is there."""
    import cupy

    if not hasattr(cupy.cuda.Stream, "from_external"):
        pytest.skip("this CuPy takes no streams by __cuda_stream__")
    for number in (0, toy_gpu.create_stream()):
        source, out = upload(toy_gpu, Y), toy_gpu.alloc(16)
        launch(toy_gpu, values(source, out, factor=SLOW), number)
        ours = CudaStream(toy_gpu, number)
        assert ours.__cuda_stream__() == (0, number or toy_gpu.default_stream())
        with cupy.cuda.Stream.from_external(ours):
            array = cupy.from_dlpack(view(toy_gpu, out, 4, "f32", stream=number))
            array *= 2
            del array
        toy_gpu.synchronize(number)
        assert download(toy_gpu, out, Y).tolist() == (1.5 * Y).tolist()


def test_streams_that_are_no_streams(device: Device) -> None:
    with device.open() as gpu:
        gone = gpu.create_stream()
        gpu.destroy_stream(gone)
        with pytest.raises(DeviceError, match="destroyed"):
            CudaStream(gpu, gone)
        ours = CudaStream(gpu)
    with pytest.raises(DeviceError, match="closed"):
        ours.__cuda_stream__()
