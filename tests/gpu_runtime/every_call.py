# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every call of a backend, once as it should be and once so that it is refused, for tests of what all have in common.

`test_every_call.py` holds the names to those of `GpuBackend`: a new call needs a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpu_runtime import from_dlpack, view, wrap
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import upload

X: Final = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
HUGE: Final = 1 << 60

Call = Callable[[], Any]

NAMES: Final = frozenset(name for name in vars(GpuBackend) if not name.startswith("_")) - {"ranges"}  # no call
"""Every method and property of a backend."""


def method_of(name: str) -> str:
    """Return the method that a call's name begins with; what follows a colon says which call of it."""
    return name.partition(":")[0]


EXCHANGE: Final = "exchange"
"""What calls of functions that take a backend are named by."""


def sound_calls(gpu: GpuBackend) -> dict[str, Call]:
    """Return calls by name, for a backend with the toy kernel; run in order. `close` is not among them."""
    ptr, other, space = upload(gpu, X), upload(gpu, X), gpu.alloc(4096)
    memory = gpu.alloc_host_pinned(16)
    handle = gpu.kernel("toy", "toy_f32")
    stream, event, timed = gpu.create_stream(), gpu.create_event(), gpu.create_event(timing=True)
    graphs: list[int] = []
    gpu.memset(space, 0, 4096)

    def trace() -> None:
        with gpu.launch_trace():
            launch(gpu, values(ptr, other))

    def in_a_cluster() -> None:
        most = gpu.limits().max_cluster
        gpu.launch(handle, most, 32, 0, stream, values(ptr, other), cluster=most)

    def strided() -> None:
        steps: dict[str, Any] = {"stride_a": 2, "stride_w": 0, "stride_c": 1}
        gpu.gemm_strided_batched(ptr, ptr, other, 1, 1, 2, 2, **steps, dtype="f32")

    def interface() -> None:
        buffer = view(gpu, ptr, 4, "f32")
        assert buffer.__array_interface__ if gpu.kind() == "host" else buffer.__cuda_array_interface__

    def from_a_file() -> None:
        with open(__file__, "rb") as file:
            gpu.copy_files_h2d([(file.fileno(), 7, 1000, space)], stream)

    def watched() -> None:
        gpu.debug_sync_kernels = True
        launch(gpu, values(ptr, other), stream)
        gpu.debug_sync_kernels = False

    return {
        "alloc": lambda: gpu.free(gpu.alloc(1000)),
        "alloc_managed": lambda: gpu.free(gpu.alloc_managed(1000)),
        "free": lambda: gpu.free(0),
        "memset": lambda: gpu.memset(space, 1, 16),
        "memset_async": lambda: gpu.memset_async(space, 1, 16, stream),
        "total_memory": gpu.total_memory,
        "free_memory": gpu.free_memory,
        "live_bytes": gpu.live_bytes,
        "live_alloc_count": gpu.live_alloc_count,
        "alloc_report": gpu.alloc_report,
        "find_block": lambda: gpu.find_block(ptr),
        "live_exports": gpu.live_exports,
        "exchange: export": lambda: view(gpu, ptr, 4, "f32").__dlpack__(),
        "exchange: export without order": lambda: view(gpu, ptr, 4, "f32").__dlpack__(stream=-1),
        "exchange: export of a copy": lambda: view(gpu, ptr, 4, "f32").__dlpack__(copy=True),
        "exchange: export to the host": lambda: view(gpu, ptr, 4, "f32").__dlpack__(dl_device=(1, 0)),
        "exchange: export of a stream's memory": lambda: view(gpu, ptr, 4, "f32", stream=stream).__dlpack__(),
        "exchange: array interface": interface,
        "exchange: import": lambda: from_dlpack(gpu, view(gpu, ptr, 4, "f32")).close(),
        "exchange: import of the host's": lambda: from_dlpack(gpu, X).close(),
        "exchange: wrap": lambda: wrap(gpu, ptr, 16, None).close(),
        "scan_redzones": lambda: _where_there_are_redzones(gpu.scan_redzones),
        "poison_redzones": lambda: _where_there_are_redzones(gpu.poison_redzones),
        "copy_h2d": lambda: gpu.copy_h2d(X, ptr),
        "copy_d2h": lambda: gpu.copy_d2h(ptr, bytearray(16)),
        "copy_d2d": lambda: gpu.copy_d2d(ptr, space, 16),
        "copy_d2h_on_stream": lambda: gpu.copy_d2h_on_stream(ptr, bytearray(16), stream),
        "copy_h2d_on_stream": lambda: gpu.copy_h2d_on_stream(memory.array, ptr, stream),
        "copy_files_h2d": from_a_file,
        "copy_h2d_async": lambda: gpu.copy_h2d_async(X, ptr, stream),
        "copy_h2d_async: a large one": lambda: gpu.copy_h2d_async(bytes(4096), space, stream),
        "copy_h2d_async_retained": lambda: gpu.copy_h2d_async_retained(X, ptr, stream),
        "copy_d2h_async": lambda: gpu.copy_d2h_async(ptr, memory.array, stream),
        "copy_d2d_async": lambda: gpu.copy_d2d_async(ptr, space, 16, stream),
        "copy_d2d_2d_async": lambda: gpu.copy_d2d_2d_async(ptr, 8, space, 8, 4, 2, stream),
        "mark_written": lambda: gpu.mark_written(ptr, 16),
        "alloc_host_pinned": lambda: gpu.free_host_pinned(gpu.alloc_host_pinned(64)),
        "host_ptr_to_device": lambda: gpu.host_ptr_to_device(memory),
        "has_module": lambda: gpu.has_module("toy"),
        "kernel": lambda: gpu.kernel("toy", "toy_bf16"),
        "launch": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other)),
        "launch: a new shape": lambda: gpu.launch(handle, 2, 64, 1024, stream, values(ptr, other)),
        "launch: cooperative": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other), cooperative=True),
        "launch: programmatic": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, other), programmatic=True),
        "launch: in a cluster": in_a_cluster,
        "launch: on the legacy stream": lambda: gpu.launch(handle, 1, 32, 0, 1, values(ptr, other)),
        "launch: on the thread's stream": lambda: gpu.launch(handle, 1, 32, 0, 2, values(ptr, other)),
        "debug_sync_kernels": watched,
        "launch_trace": trace,
        "gemm": lambda: gpu.gemm(ptr, ptr, other, 1, 1, 4, dtype="f32", workspace=space, workspace_bytes=4096),
        "gemm: finished by a kernel": lambda: gpu.gemm(ptr, ptr, other, 1, 1, 4, dtype="f32", activation="gelu"),
        "gemm_strided_batched": strided,
        "default_stream": gpu.default_stream,
        "create_stream": lambda: gpu.destroy_stream(gpu.create_stream()),
        "destroy_stream": lambda: gpu.destroy_stream(gpu.create_stream()),
        "synchronize": lambda: gpu.synchronize(stream),
        "create_event": lambda: gpu.destroy_event(gpu.create_event(timing=True)),
        "destroy_event": lambda: gpu.destroy_event(gpu.create_event()),
        "record_event": lambda: gpu.record_event(event, stream),
        "record_event: a timed one": lambda: gpu.record_event(timed),
        "stream_wait_event": lambda: gpu.stream_wait_event(0, event),
        "event_query": lambda: gpu.event_query(event),
        "event_synchronize": lambda: gpu.event_synchronize(timed),
        "event_elapsed_ms": lambda: gpu.event_elapsed_ms(timed, timed),
        "begin_capture": lambda: gpu.begin_capture(stream),
        "launch: in a capture": lambda: gpu.launch(handle, 1, 32, 0, stream, values(ptr, ptr)),
        "stream_is_capturing": lambda: gpu.stream_is_capturing(stream),
        "end_capture": lambda: graphs.append(gpu.end_capture(stream)),
        "launch_graph": lambda: gpu.launch_graph(graphs[0], stream),
        "destroy_graph": lambda: gpu.destroy_graph(graphs.pop()),
        "abort_capture_if_active": lambda: gpu.abort_capture_if_active(stream),
        "is_watched": gpu.is_watched,
        "sm_count": gpu.sm_count,
        "limits": gpu.limits,
        "kind": gpu.kind,
        "name": gpu.name,
        "free_host_pinned": lambda: gpu.free_host_pinned(memory),
        "sweep_unreleased": gpu.sweep_unreleased,
    }


def _where_there_are_redzones(call: Call) -> None:
    try:
        call()
    except DeviceError as error:
        if "redzones=False" not in str(error):
            raise


CANNOT_FAIL: Final = frozenset(
    {
        *("total_memory", "free_memory", "live_bytes", "live_alloc_count", "alloc_report", "sweep_unreleased"),
        *("find_block", "live_exports"),
        *("scan_redzones", "poison_redzones", "has_module", "debug_sync_kernels", "launch_trace", "default_stream"),
        *(
            "create_stream",
            "create_event",
            "is_watched",
            "sm_count",
            "limits",
            "kind",
            "name",
            "bind_to_thread",
            "close",
        ),
    }
)
"""What an open backend refuses nobody. A closed one refuses all of it but `close`."""


def refused_calls(gpu: GpuBackend) -> dict[str, Call]:
    """Return calls by name, in any order, that raise: for what they are given, or because a stream is capturing."""
    ptr, gone = upload(gpu, X), gpu.alloc_host_pinned(16)
    gpu.free_host_pinned(gone)
    handle = gpu.kernel("toy", "toy_f32")
    capturing, event = gpu.create_stream(), gpu.create_event()
    gpu.begin_capture(capturing)
    bad = 3
    steps: dict[str, Any] = {"stride_a": 2, "stride_w": 0, "stride_c": 1}

    def in_a_capture(call: Call) -> Call:
        def run() -> None:
            gpu.begin_capture()
            try:
                call()
            finally:
                gpu.abort_capture_if_active()

        return run

    return {
        "alloc": lambda: gpu.alloc(HUGE),
        "alloc_managed": lambda: gpu.alloc_managed(HUGE),
        "free": lambda: gpu.free(ptr + 1),
        "memset": lambda: gpu.memset(ptr, 256, 1),
        "memset: in a capture": in_a_capture(lambda: gpu.memset(ptr, 0, 1)),
        "memset_async": lambda: gpu.memset_async(ptr, 0, 17),
        "copy_h2d": lambda: gpu.copy_h2d(X, ptr + 8),
        "copy_h2d: in a capture": in_a_capture(lambda: gpu.copy_h2d(X, ptr)),
        "copy_d2h": lambda: gpu.copy_d2h(ptr + 8, bytearray(16)),
        "copy_d2h: in a capture": in_a_capture(lambda: gpu.copy_d2h(ptr, bytearray(16))),
        "copy_d2d": lambda: gpu.copy_d2d(ptr, ptr + 4, 8),
        "copy_d2d: in a capture": in_a_capture(lambda: gpu.copy_d2d(ptr, ptr + 8, 8)),
        "copy_d2h_on_stream": lambda: gpu.copy_d2h_on_stream(ptr, bytearray(16), capturing),
        "copy_h2d_on_stream": lambda: gpu.copy_h2d_on_stream(X, ptr, capturing),
        "copy_files_h2d": lambda: gpu.copy_files_h2d([(-1, 0, 8, ptr)]),
        "copy_files_h2d: in a capture": lambda: gpu.copy_files_h2d([], capturing),
        "copy_h2d_async": lambda: gpu.copy_h2d_async(X, ptr + 8),
        "copy_h2d_async_retained": lambda: gpu.copy_h2d_async_retained(X, ptr + 8),
        "copy_d2h_async": lambda: gpu.copy_d2h_async(ptr, b"read-only bytes."),
        "copy_d2d_async": lambda: gpu.copy_d2d_async(ptr, ptr, 16),
        "copy_d2d_2d_async": lambda: gpu.copy_d2d_2d_async(ptr, 1, ptr, 8, 4, 2),
        "mark_written": lambda: gpu.mark_written(ptr, 17),
        "alloc_host_pinned": lambda: gpu.alloc_host_pinned(HUGE),
        "free_host_pinned": lambda: gpu.free_host_pinned(gone),
        "host_ptr_to_device": lambda: gpu.host_ptr_to_device(gone),
        "exchange: past the block": lambda: view(gpu, ptr, 5, "f32"),
        "exchange: no such device": lambda: view(gpu, ptr, 4, "f32").__dlpack__(dl_device=(9, 9)),
        "exchange: in a capture": in_a_capture(lambda: view(gpu, ptr, 4, "f32").__dlpack__()),
        "exchange: NULL": lambda: wrap(gpu, 0, 16, None),
        "exchange: no array": lambda: from_dlpack(gpu, "text"),
        "kernel": lambda: gpu.kernel("toy", "toy_f64"),
        "launch": lambda: gpu.launch(handle, 1, 32, 0, 0, values(ptr, ptr)[:-1]),
        "launch: too many threads": lambda: gpu.launch(handle, 1, 4096, 0, 0, values(ptr, ptr)),
        "launch: no whole cluster": lambda: gpu.launch(handle, 1, 32, 0, 0, values(ptr, ptr), cluster=2),
        "launch: not aligned": lambda: gpu.launch(handle, 1, 32, 0, 0, values(ptr, ptr + 2)),
        "launch: no such stream": lambda: gpu.launch(handle, 1, 32, 0, bad, values(ptr, ptr)),
        "gemm": lambda: gpu.gemm(ptr, ptr, ptr, 1, 1, 4, dtype="f32"),
        "gemm_strided_batched": lambda: gpu.gemm_strided_batched(ptr, ptr, ptr, 1, 1, 2, 2, **steps, dtype="f32"),
        "destroy_stream": lambda: gpu.destroy_stream(capturing),
        "synchronize": lambda: gpu.synchronize(capturing),
        "record_event": lambda: gpu.record_event(bad),
        "stream_wait_event": lambda: gpu.stream_wait_event(bad, event),
        "event_query": lambda: gpu.event_query(bad),
        "event_synchronize": lambda: gpu.event_synchronize(bad),
        "event_elapsed_ms": lambda: gpu.event_elapsed_ms(event, event),
        "destroy_event": lambda: gpu.destroy_event(bad),
        "begin_capture": lambda: gpu.begin_capture(capturing),
        "end_capture": gpu.end_capture,
        "launch_graph": lambda: gpu.launch_graph(bad),
        "destroy_graph": lambda: gpu.destroy_graph(bad),
        "stream_is_capturing": lambda: gpu.stream_is_capturing(bad),
        "abort_capture_if_active": lambda: gpu.abort_capture_if_active(bad),
    }
