# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beside a capture that other code began, in the mode "global" as libraries do: it is neither hindered nor spoilt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.backends import Device, cuda_only
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
Call = Callable[[], Any]
KEPT: tuple[str, ...] = (
    "alloc",
    "free",
    "alloc and free",
    "managed",
    "pinned",
    "free_memory",
    "copy_h2d",
    "copy_h2d_async, large",
    "copy_d2h",
    "copy_d2d",
    "memset",
    "synchronize",
    "synchronize another",
    "event_query",
    "event_synchronize",
    "record_event",
    "create_stream",
    "create_event",
    "kernel",
    "launch",
    "gemm",
    "gemm, finished by a kernel that is loaded now",
    "own capture",
    "scan_redzones",
)


def calls_of(gpu: GpuBackend) -> dict[str, Call]:
    """Return calls that have nothing to do with anybody else's stream."""
    ptr, out, space = upload(gpu, X), gpu.alloc(16), gpu.alloc(1 << 18)
    event, other, spare, large = gpu.create_event(), gpu.create_stream(), gpu.alloc(300), np.zeros(1 << 18, np.uint8)
    launch(gpu, values(ptr, out))
    gpu.record_event(event)
    gpu.synchronize()

    def capture() -> None:
        gpu.begin_capture()
        launch(gpu, values(ptr, out))
        gpu.destroy_graph(gpu.end_capture())

    return {
        "alloc": lambda: gpu.alloc(40 << 20),
        "free": lambda: gpu.free(spare),
        "alloc and free": lambda: gpu.free(gpu.alloc(300)),
        "managed": lambda: gpu.free(gpu.alloc_managed(300)),
        "pinned": lambda: gpu.free_host_pinned(gpu.alloc_host_pinned(4096)),
        "free_memory": gpu.free_memory,
        "copy_h2d": lambda: gpu.copy_h2d(X, ptr),
        "copy_h2d_async, large": lambda: gpu.copy_h2d_async(large, space),
        "copy_d2h": lambda: gpu.copy_d2h(ptr, bytearray(16)),
        "copy_d2d": lambda: gpu.copy_d2d(ptr, out, 16),
        "memset": lambda: gpu.memset(space, 1, 16),
        "synchronize": gpu.synchronize,
        "synchronize another": lambda: gpu.synchronize(other),
        "event_query": lambda: gpu.event_query(event),
        "event_synchronize": lambda: gpu.event_synchronize(event),
        "record_event": lambda: gpu.record_event(event),
        "create_stream": lambda: gpu.destroy_stream(gpu.create_stream()),
        "create_event": lambda: gpu.destroy_event(gpu.create_event()),
        "kernel": lambda: gpu.kernel("toy", "toy_f16"),
        "launch": lambda: launch(gpu, values(ptr, out, factor=3.0)),
        "gemm": lambda: gpu.gemm(ptr, ptr, out, 1, 1, 3, dtype="f32"),
        "gemm, finished by a kernel that is loaded now": lambda: gpu.gemm(
            ptr, ptr, out, 1, 1, 4, dtype="f32", activation="gelu"
        ),
        "own capture": capture,
        "scan_redzones": gpu.scan_redzones,
    }


@pytest.mark.parametrize("same_thread", [True, False], ids=["same thread", "another thread"])
@pytest.mark.parametrize("name", KEPT)
def test_calls_beside_a_capture_in_global_mode(
    toy_gpu: GpuBackend, device: Device, name: str, same_thread: bool
) -> None:
    """The call works, and what is captured is the foreign work alone."""
    import cupy
    from cupy.cuda import runtime

    if name == "scan_redzones" and not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    stream = cupy.cuda.Stream(non_blocking=True)
    calls, ptr = calls_of(toy_gpu), upload(toy_gpu, X)
    assert tuple(calls) == KEPT
    launch(toy_gpu, values(ptr, ptr), stream.ptr)
    stream.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            calls[name]()
        except BaseException as error:
            errors.append(error)

    stream.begin_capture(runtime.streamCaptureModeGlobal)
    try:
        launch(toy_gpu, values(ptr, ptr), stream.ptr)
        if same_thread:
            work()
        else:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    finally:
        graph = stream.end_capture()  # raises when the capture was spoilt
    assert errors == []
    graph.launch(stream)
    stream.synchronize()
    assert download(toy_gpu, ptr, X).tolist() == (4 * X).tolist()


def refused_calls(gpu: GpuBackend, stream: int) -> dict[str, Call]:
    """Return calls that a capture on ``stream`` forbids."""
    outside, inside, timed = gpu.create_event(), gpu.create_event(), gpu.create_event(timing=True)
    ptr, buffer = upload(gpu, X), bytearray(16)
    gpu.record_event(outside)
    gpu.synchronize()

    def recorded(event: int, call: Call) -> Call:
        def record_and_call() -> None:
            gpu.record_event(event, stream)
            call()

        return record_and_call

    return {
        "wait for outside": lambda: gpu.stream_wait_event(stream, outside),
        "query": recorded(inside, lambda: gpu.event_query(inside)),
        "event_synchronize": recorded(inside, lambda: gpu.event_synchronize(inside)),
        "elapsed": recorded(timed, lambda: gpu.event_elapsed_ms(timed, timed)),
        "synchronize": lambda: gpu.synchronize(stream),
        "copy_d2h": lambda: gpu.copy_d2h_on_stream(ptr, buffer, stream),
        "copy_h2d": lambda: gpu.copy_h2d_on_stream(buffer, ptr, stream),
        "copy_files": lambda: gpu.copy_files_h2d([], stream),
        "begin": lambda: gpu.begin_capture(stream),
        "end": lambda: gpu.end_capture(stream),
    }


REFUSED = (
    "wait for outside",
    "query",
    "event_synchronize",
    "elapsed",
    "synchronize",
    "copy_d2h",
    "copy_h2d",
    "copy_files",
    "begin",
    "end",
)


@pytest.mark.parametrize("mode", ["global", "relaxed"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_foreign_capture_forbids_is_refused(toy_gpu: GpuBackend, name: str, mode: str) -> None:
    """As for a capture of ours: a DeviceError, and the capture goes on as if nothing had been asked."""
    import cupy
    from cupy.cuda import runtime

    stream = cupy.cuda.Stream(non_blocking=True)
    calls, ptr = refused_calls(toy_gpu, stream.ptr), upload(toy_gpu, X)
    assert tuple(calls) == REFUSED
    launch(toy_gpu, values(ptr, ptr), stream.ptr)
    stream.synchronize()
    stream.begin_capture(runtime.streamCaptureModeGlobal if mode == "global" else runtime.streamCaptureModeRelaxed)
    try:
        with pytest.raises(DeviceError):
            calls[name]()
        assert toy_gpu.stream_is_capturing(stream.ptr)
        launch(toy_gpu, values(ptr, ptr), stream.ptr)
    finally:
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert download(toy_gpu, ptr, X).tolist() == (4 * X).tolist()


def test_a_graph_becomes_part_of_a_foreign_capture(toy_gpu: GpuBackend) -> None:
    """And outlives its handle there; a block that the foreign graph uses may be freed meanwhile."""
    import cupy

    stream, ptr, used = cupy.cuda.Stream(non_blocking=True), upload(toy_gpu, X), toy_gpu.alloc(16)
    toy_gpu.begin_capture()
    launch(toy_gpu, values(ptr, ptr))
    inner = toy_gpu.end_capture()
    stream.begin_capture()
    toy_gpu.launch_graph(inner, stream.ptr)
    toy_gpu.memset_async(used, 0, 16, stream.ptr)
    toy_gpu.free(toy_gpu.alloc(16))
    graph = stream.end_capture()
    toy_gpu.destroy_graph(inner)
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    assert download(toy_gpu, ptr, X).tolist() == (4 * X).tolist()


def test_the_default_stream_joins_a_foreign_capture_by_a_stream_of_ours(toy_gpu: GpuBackend) -> None:
    """Whose handle others know: from then on the default stream is known to capture, until they end it."""
    from cupy.cuda import runtime

    stream, fork, join, ptr = (
        toy_gpu.create_stream(),
        toy_gpu.create_event(),
        toy_gpu.create_event(),
        upload(toy_gpu, X),
    )
    launch(toy_gpu, values(ptr, ptr))
    toy_gpu.synchronize()
    runtime.streamBeginCapture(stream, runtime.streamCaptureModeRelaxed)
    toy_gpu.record_event(fork, stream)
    toy_gpu.stream_wait_event(0, fork)
    launch(toy_gpu, values(ptr, ptr))
    assert toy_gpu.stream_is_capturing()
    for refused in (toy_gpu.synchronize, lambda: toy_gpu.event_query(fork)):
        with pytest.raises(DeviceError, match="captur"):
            refused()
    toy_gpu.record_event(join)
    toy_gpu.stream_wait_event(stream, join)
    graph = runtime.graphInstantiate(runtime.streamEndCapture(stream))
    assert not toy_gpu.stream_is_capturing()
    runtime.graphLaunch(graph, stream)
    toy_gpu.synchronize(stream)
    assert download(toy_gpu, ptr, X).tolist() == (4 * X).tolist()


def test_the_default_stream_leaves_a_capture_that_others_end(toy_gpu: GpuBackend) -> None:
    """One that we began on a stream whose handle they know."""
    from cupy.cuda import runtime

    stream, fork, join, ptr = (
        toy_gpu.create_stream(),
        toy_gpu.create_event(),
        toy_gpu.create_event(),
        upload(toy_gpu, X),
    )
    toy_gpu.begin_capture(stream)
    toy_gpu.record_event(fork, stream)
    toy_gpu.stream_wait_event(0, fork)
    toy_gpu.record_event(join)
    toy_gpu.stream_wait_event(stream, join)
    runtime.graphDestroy(runtime.streamEndCapture(stream))
    launch(toy_gpu, values(ptr, ptr))
    toy_gpu.synchronize()
    assert download(toy_gpu, ptr, X).tolist() == (2 * X).tolist()
