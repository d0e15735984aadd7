# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls from threads that Python did not make, and what other threads do while a call waits."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64, c_uint64
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.backends import Device
from tests.c_api.library import Library
from tests.hammering import hammer

THREADS, CALLS = 16, 1000


def test_many_native_threads(library: Library, backend: int, gpu: GpuBackend) -> None:
    """Each fills, writes, copies and reads blocks of its own, and finds in them what it put there."""
    library.raw.crowd.restype = c_int64
    assert library.raw.crowd(c_int64(backend), THREADS, CALLS) == 0
    assert gpu.live_alloc_count() == 0


def test_native_threads_beside_threads_of_python(library: Library, backend: int, gpu: GpuBackend) -> None:
    library.raw.crowd.restype = c_int64

    def work(index: int) -> None:
        if index < 2:
            assert library.raw.crowd(c_int64(backend), 4, 80) == 0
            return
        for _ in range(40):
            ptr = gpu.alloc(64)
            gpu.memset(ptr, index, 64)
            out = bytearray(64)
            gpu.copy_d2h(ptr, out)
            assert out == bytes([index]) * 64
            gpu.free(ptr)

    hammer(work, 6)


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A thread that counts, a hundred times a second or more often, while it is let."""
    count, stop = [0], threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("gil", [False, True], ids=["without the GIL", "with the GIL"])
@pytest.mark.parametrize("wait", ["synchronize", "event_synchronize", "copy_d2h_on_stream", "destroy_stream"])
def test_others_go_on_while_a_call_waits(library: Library, device: Device, wait: str, gil: bool) -> None:
    """Also when the caller held the GIL: the call gives it up while it waits."""
    with busy(device) as gpu:
        handle = library.backend(gpu)
        stream, event = gpu.create_stream(), gpu.create_event()
        ptr = enqueue_much(gpu, stream)
        gpu.record_event(event, stream)
        out = ctypes.create_string_buffer(16)
        arguments: dict[str, tuple[Any, ...]] = {
            "synchronize": (stream,),
            "event_synchronize": (event,),
            "copy_d2h_on_stream": (ptr, out, 16, stream),
            "destroy_stream": (stream,),
        }
        with counting() as count:
            time.sleep(0.05)
            before, began = count(), time.monotonic()
            library.call(wait, handle, *arguments[wait], gil=gil)
            took, counted = time.monotonic() - began, count() - before
        assert took > 0.05, "there was nothing to wait for"
        assert counted > took / 0.02, f"{counted} in {took} s"
        library.call("backend_release", handle)
        gpu.free(ptr)


@contextmanager
def busy(device: Device) -> Iterator[GpuBackend]:
    with device.open(**({"order": "deferred"} if device.is_host else {})) as gpu:
        yield gpu


def enqueue_much(gpu: GpuBackend, stream: int) -> int:
    """Enqueue work of a tenth of a second or more, and return the block that it writes."""
    if gpu.kind() == "cuda":
        ptr = gpu.alloc(1 << 30)
        for _ in range(1000):  # a quarter of a millisecond each at 4 TB/s
            gpu.memset_async(ptr, 1, 1 << 30, stream)
        return int(ptr)
    ptr = gpu.alloc(1 << 20)
    gpu.memset_async(ptr, 1, 1 << 20, stream)
    gpu._enqueue(gpu._stream(stream), lambda: time.sleep(0.15))  # type: ignore[attr-defined]  # a kernel that takes long
    return int(ptr)


def test_a_failed_call_on_one_thread_is_no_other_threads(library: Library, backend: int) -> None:
    """Last errors are each thread's own: `crowd` looks for its own beside fifteen others that fail."""
    seen = []

    def fail(index: int) -> None:
        with pytest.raises(Exception, match=hex(index + 1)):
            library.call("free", backend, index + 1)
        seen.append(library.last_error())

    hammer(fail, 4)
    assert len({text.split(",")[1] for text in seen}) == 4


def test_a_call_while_the_backend_closes_fails_in_words(library: Library, device: Device) -> None:
    gpu = device.open()
    handle = library.backend(gpu)
    began = threading.Event()
    errors: list[str] = []

    def work() -> None:
        while True:
            try:
                ptr = library.get(c_uint64, "alloc", handle, 64, None)
                began.set()
                library.call("free", handle, ptr)
            except Exception as error:
                errors.append(str(error))
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    began.wait()
    gpu.close()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 4
    if device.is_host:  # on a GPU the words may be the driver's
        words = ("closed", "expected the start of a live", "freed twice")  # closing frees what is being freed
        assert all(any(word in error for word in words) for error in errors), errors
    with pytest.raises(DeviceError):
        gpu.alloc(1)
    library.call("backend_release", handle)
