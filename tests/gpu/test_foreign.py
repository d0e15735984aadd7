# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beside CuPy and other users of the device: their memory, streams and allocators, and their state left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime import from_dlpack, view, wrap
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.backends import Device, cuda_only
from tests.gpu_runtime.toy import SLOW, launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
Call = Callable[[], Any]


def calls_of(gpu: GpuBackend) -> dict[str, Call]:
    """Return one sound call of nearly every method, by name; run in order."""
    ptr, other, space = upload(gpu, X), upload(gpu, X), gpu.alloc(4096)
    memory = gpu.alloc_host_pinned(16)
    handle = gpu.kernel("toy", "toy_f32")
    stream, event, timed = gpu.create_stream(), gpu.create_event(), gpu.create_event(timing=True)
    graphs: list[int] = []

    def trace() -> None:
        with gpu.launch_trace():
            launch(gpu, values(ptr, other))

    def allocate(make: Callable[[int], int]) -> None:
        gpu.free(make(1000))

    def strided() -> None:
        steps: dict[str, Any] = {"stride_a": 2, "stride_w": 0, "stride_c": 1}
        gpu.gemm_strided_batched(ptr, ptr, other, 1, 1, 2, 2, **steps, dtype="f32")

    return {
        "alloc": lambda: allocate(gpu.alloc),
        "alloc_managed": lambda: allocate(gpu.alloc_managed),
        "memset": lambda: gpu.memset(space, 1, 16),
        "memset_async": lambda: gpu.memset_async(space, 1, 16, stream),
        "total_memory": gpu.total_memory,
        "free_memory": gpu.free_memory,
        "alloc_report": gpu.alloc_report,
        "allocation": lambda: gpu.allocation(ptr),
        "live_exports": gpu.live_exports,
        "export": lambda: view(gpu, ptr, 4, "f32").__dlpack__(),
        "export to another stream": lambda: view(gpu, ptr, 4, "f32").__dlpack__(stream=stream),
        "export of a copy": lambda: view(gpu, ptr, 4, "f32").__dlpack__(copy=True),
        "export to the host": lambda: view(gpu, ptr, 4, "f32").__dlpack__(dl_device=(1, 0)),
        "import": lambda: from_dlpack(gpu, view(gpu, ptr, 4, "f32")).close(),
        "import of the host's": lambda: from_dlpack(gpu, X).close(),
        "wrap": lambda: wrap(gpu, ptr, 16, None).close(),
        "copy_h2d": lambda: gpu.copy_h2d(X, ptr),
        "copy_d2h": lambda: gpu.copy_d2h(ptr, bytearray(16)),
        "copy_d2d": lambda: gpu.copy_d2d(ptr, space, 16),
        "copy_d2h_on_stream": lambda: gpu.copy_d2h_on_stream(ptr, bytearray(16), stream),
        "copy_h2d_on_stream": lambda: gpu.copy_h2d_on_stream(memory.array, ptr, stream),
        "copy_h2d_async": lambda: gpu.copy_h2d_async(X, ptr, stream),
        "copy_h2d_async_retained": lambda: gpu.copy_h2d_async_retained(X, ptr, stream),
        "copy_d2h_async": lambda: gpu.copy_d2h_async(ptr, memory.array, stream),
        "copy_d2d_async": lambda: gpu.copy_d2d_async(ptr, space, 16, stream),
        "copy_d2d_2d_async": lambda: gpu.copy_d2d_2d_async(ptr, 8, space, 8, 4, 2, stream),
        "mark_written": lambda: gpu.mark_written(ptr, 16),
        "alloc_host_pinned": lambda: gpu.free_host_pinned(gpu.alloc_host_pinned(64)),
        "host_ptr_to_device": lambda: gpu.host_ptr_to_device(memory),
        "kernel": lambda: gpu.kernel("toy", "toy_bf16"),
        "launch": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other)),
        "launch of a new shape": lambda: gpu.launch(handle, 2, 64, 1024, stream, values(ptr, other)),
        "launch, cooperative": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other), cooperative=True),
        "launch, programmatic": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other), programmatic=True),
        "launch on the legacy stream": lambda: gpu.launch(handle, 1, 32, 0, 1, values(ptr, other)),
        "launch on the thread's stream": lambda: gpu.launch(handle, 1, 32, 0, 2, values(ptr, other)),
        "launch_trace": trace,
        "gemm": lambda: gpu.gemm(ptr, ptr, other, 1, 1, 4, dtype="f32", workspace=space, workspace_bytes=4096),
        "gemm, finished by a kernel": lambda: gpu.gemm(ptr, ptr, other, 1, 1, 4, dtype="f32", activation="gelu"),
        "gemm_strided_batched": strided,
        "default_stream": gpu.default_stream,
        "create_stream": lambda: gpu.destroy_stream(gpu.create_stream()),
        "synchronize": lambda: gpu.synchronize(stream),
        "create_event": lambda: gpu.destroy_event(gpu.create_event(timing=True)),
        "record_event": lambda: gpu.record_event(event, stream),
        "record a timed event": lambda: gpu.record_event(timed),
        "stream_wait_event": lambda: gpu.stream_wait_event(0, event),
        "event_query": lambda: gpu.event_query(event),
        "event_synchronize": lambda: gpu.event_synchronize(timed),
        "event_elapsed_ms": lambda: gpu.event_elapsed_ms(timed, timed),
        "begin_capture": lambda: gpu.begin_capture(stream),
        "launch in a capture": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, ptr)),
        "stream_is_capturing": lambda: gpu.stream_is_capturing(stream),
        "end_capture": lambda: graphs.append(gpu.end_capture(stream)),
        "launch_graph": lambda: gpu.launch_graph(graphs[0], stream),
        "destroy_graph": lambda: gpu.destroy_graph(graphs.pop()),
        "abort_capture_if_active": lambda: gpu.abort_capture_if_active(stream),
        "sm_count": gpu.sm_count,
        "limits": gpu.limits,
        "name": gpu.name,
        "free_host_pinned": lambda: gpu.free_host_pinned(memory),
        "sweep_unreleased": gpu.sweep_unreleased,
    }


def state() -> tuple[Any, ...]:
    """Return what CuPy and the driver have as current on this thread."""
    import cupy
    from cupy.cuda import driver, runtime

    context = driver.ctxGetCurrent()
    device = runtime.getDevice() if context else None  # asking a thread without a context would give it one
    return (context, device, cupy.cuda.get_current_stream().ptr, cupy.cuda.get_allocator())


def test_calls_leave_cupy_as_it_was(toy_gpu: GpuBackend) -> None:
    """Each of them with another CuPy stream and another allocator current."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(pool.malloc):
        before = state()
        assert before[2] == stream.ptr != 0
        assert before[3] == pool.malloc
        for name, call in calls_of(toy_gpu).items():
            call()
            assert state() == before, name
        assert cupy.asnumpy(cupy.asarray(X)).tolist() == X.tolist()
    toy_gpu.synchronize()


def in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a new thread and raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_calls_from_a_thread_without_a_context(toy_gpu: GpuBackend) -> None:
    """They work, and leave the thread without one."""
    from cupy.cuda import driver

    def work() -> None:
        assert driver.ctxGetCurrent() == 0
        for name, call in calls_of(toy_gpu).items():
            call()
            assert driver.ctxGetCurrent() == 0, name

    in_a_thread(work)


def test_bind_to_thread_makes_the_device_current(toy_gpu: GpuBackend) -> None:
    from cupy.cuda import driver

    def work() -> None:
        assert driver.ctxGetCurrent() == 0
        toy_gpu.bind_to_thread()
        assert driver.ctxGetCurrent() != 0
        toy_gpu.bind_to_thread()
        ptr = upload(toy_gpu, X)
        assert download(toy_gpu, ptr, X).tolist() == X.tolist()
        assert driver.ctxGetCurrent() != 0

    in_a_thread(work)


def test_close_leaves_cupy_as_it_was(device: Device) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        before = state()
        device.open().close()
        assert state() == before
        assert cupy.asnumpy(cupy.asarray(X)).tolist() == X.tolist()


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
    """CuPy would shrink the grid, with a warning."""
    ptr = upload(toy_gpu, X)
    handle = toy_gpu.kernel("toy", "toy_f32")
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
