# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a thread has as current is what it was, after every call of a backend: sound, refused, or made after close.

Current are: the driver's context, CuPy's and the runtime's device, CuPy's stream and allocator, and the mode by which
the thread's calls are judged beside a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import GpuRuntimeError
from tests.backends import Device, cuda_only
from tests.gpu_runtime.every_call import Call, X, refused_calls, sound_calls
from tests.gpu_runtime.test_close import METHODS, arguments_of
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

Situation = Callable[[Callable[[], None]], None]


def capture_mode() -> int:
    from cuda.bindings import driver as bindings

    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, mode = bindings.cuThreadExchangeStreamCaptureMode(relaxed)
    assert status == bindings.CUresult.CUDA_SUCCESS
    bindings.cuThreadExchangeStreamCaptureMode(mode)
    return int(mode)


def state() -> tuple[Any, ...]:
    """Return what CuPy, the runtime and the driver have as current on this thread."""
    import cupy
    from cupy.cuda import driver, runtime

    context = driver.ctxGetCurrent()
    # Asking a thread without a context for these two would give it one.
    device, stream = (runtime.getDevice(), cupy.cuda.get_current_stream().ptr) if context else (None, None)
    return context, device, stream, cupy.cuda.get_allocator(), capture_mode()


def check(calls: dict[str, Call], *, refused: bool) -> None:
    """Make the calls, and name those that changed something."""
    before, changed = state(), []
    for name, call in calls.items():
        try:
            call()
        except (GpuRuntimeError, BufferError, TypeError, ValueError):
            assert refused, name
        else:
            assert not refused, f"{name} was not refused"
        if state() != before:
            changed.append(name)
    assert changed == []


def closed_calls(device: Device) -> dict[str, Call]:
    """Return every method of a backend that is closed."""
    gpu = device.open(ops=REGISTRY)
    pinned = gpu.alloc_host_pinned(8)
    gpu.close()
    return {name: partial(getattr(gpu, name), **arguments_of(name, pinned)) for name in METHODS}


def in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a new thread, which has no context, and raise what it raised."""
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


def with_cupy_s_own(work: Callable[[], None]) -> None:
    """Run ``work`` with a stream and an allocator current that are not CuPy's usual ones."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(pool.malloc):
        assert state()[2:4] == (stream.ptr, pool.malloc)
        work()
        assert cupy.asnumpy(cupy.asarray(X)).tolist() == X.tolist()


def with_another_device(work: Callable[[], None]) -> None:
    """Run ``work`` with the last device current, where there are several."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("there is one device")
    with cupy.cuda.Device(count - 1):
        cupy.zeros(1)
        assert state()[1] == count - 1
        work()


SITUATIONS = pytest.mark.parametrize("situation", [with_cupy_s_own, in_a_thread, with_another_device])


@SITUATIONS
@pytest.mark.parametrize("kind", ["sound", "refused"])
def test_every_call(toy_gpu: GpuBackend, situation: Situation, kind: str) -> None:
    calls = sound_calls(toy_gpu) if kind == "sound" else refused_calls(toy_gpu)
    situation(lambda: check(calls, refused=kind == "refused"))
    toy_gpu.synchronize()


@SITUATIONS
def test_opening_and_closing(device: Device, situation: Situation) -> None:
    def work() -> None:
        before = state()
        gpu = device.open(ops=REGISTRY)
        assert state() == before
        launch(gpu, values(ptr := upload(gpu, X), ptr))
        gpu.begin_capture(gpu.create_stream())
        gpu.close()
        assert state() == before
        check(closed_calls(device), refused=True)

    situation(work)


@SITUATIONS
def test_a_kernel_that_must_be_compiled(device: Device, situation: Situation) -> None:
    """And one that a product ends in."""

    def work() -> None:
        before = state()
        with device.open(ops=REGISTRY, cache=None) as gpu:
            gpu.kernel("toy", "toy_f32")
            assert state() == before
            ptr, out = upload(gpu, X), gpu.alloc(16)
            gpu.gemm(ptr, ptr, out, 1, 1, 4, dtype="f32", activation="gelu")
            assert state() == before
            gpu.sweep_unreleased()

    situation(work)


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
