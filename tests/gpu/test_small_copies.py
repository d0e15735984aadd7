# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small copies on a GPU: which of them a kernel makes, their place among other work, captures, threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, InvalidPointer
from metrale.ops import layer_norm
from tests.backends import Device, cuda_only, damaged
from tests.gpu.copies import watched
from tests.gpu_runtime.toy import SLOW, launch, values
from tests.hammering import eager_switching, hammer
from tests.ops.harness import download, upload

pytestmark = cuda_only

LARGEST: Final = 64 << 10
X: Final = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
THREADS: Final = 8


def ways(gpu: GpuBackend, host: Any, device: int) -> set[str]:
    """Copy ``host`` to ``device`` and back, compare, and return by what functions."""
    from cupy.cuda import runtime

    expected = bytes(host)
    with watched(gpu, (runtime,), lambda address: True) as seen:
        gpu.copy_h2d_async(host, device)
        gpu.synchronize()
        host[:] = 0
        gpu.copy_d2h_async(device, host)
        gpu.synchronize()
    assert bytes(host) == expected
    return {one.name for one in seen if one.kind}


def drawn(array: Any) -> Any:
    """Fill ``array`` with random bytes and return it."""
    array[:] = np.random.default_rng(array.size).integers(0, 256, array.size, dtype=np.uint8)
    return array


def test_small_copies_of_our_own_memory_are_kernels(toy_gpu: GpuBackend) -> None:
    import cupy

    size = LARGEST + 1
    memory, ptr, managed = toy_gpu.alloc_host_pinned(size), toy_gpu.alloc(size), toy_gpu.alloc_managed(size)
    array, theirs = drawn(memory.array), cupy.empty(64, cupy.uint8)
    cupy.cuda.get_current_stream().synchronize()
    for small in (array[:1], array[3:15], array[1:], array[:LARGEST], array[120:136]):
        assert ways(toy_gpu, small, ptr) == ways(toy_gpu, small, managed) == {"small_copy"}, small.size
    other = toy_gpu.alloc_host_pinned(64)
    locked = np.frombuffer(cupy.cuda.alloc_pinned_memory(64), np.uint8, 64)
    for host, device in (
        (array, ptr),
        (drawn(np.empty(64, np.uint8)), ptr),
        (drawn(locked), ptr),
        (array[:64], theirs.data.ptr),
        (array[:64], toy_gpu.host_ptr_to_device(other)),
    ):
        assert ways(toy_gpu, host, device) == {"memcpyAsync"}, (host.size, device)
    toy_gpu.free_host_pinned(memory)
    with pytest.raises(InvalidPointer, match="expected live pinned memory"):
        toy_gpu.free_host_pinned(memory)
    assert ways(toy_gpu, array[:64], ptr) == {"memcpyAsync"}, "its array still holds the memory"
    toy_gpu.free_host_pinned(other)


def test_bytes_that_are_not_copied_stay(toy_gpu: GpuBackend) -> None:
    """Up to redzones on the device, and between copies side by side on the host."""
    memory = toy_gpu.alloc_host_pinned(3 * 1000)
    for size in (1, 15, 16, 17, 100, 777, 1000):
        ptr = upload(toy_gpu, np.full(size, 7, np.uint8))
        memory.array[:] = 9
        for start in (0, 1000, 2000):
            toy_gpu.copy_d2h_async(ptr, memory.array[start : start + size])
            toy_gpu.copy_h2d_async(memory.array[start : start + size], ptr)
        toy_gpu.synchronize()
        assert np.array_equal(memory.array.reshape(3, 1000), [[7] * size + [9] * (1000 - size)] * 3)
    assert damaged(toy_gpu) == []
    toy_gpu.free_host_pinned(memory)


# order


@pytest.mark.parametrize("own", [True, False], ids=["a stream of ours", "a foreign stream"])
def test_a_copy_has_its_place_in_its_stream(toy_gpu: GpuBackend, own: bool) -> None:
    """After kernels that take 30 ms each, and before those behind it. One copy reads what another has written."""
    import cupy

    theirs = cupy.cuda.Stream(non_blocking=True)
    stream = toy_gpu.create_stream() if own else theirs.ptr
    x, y, event = upload(toy_gpu, X), upload(toy_gpu, 0 * X), toy_gpu.create_event()
    memory = toy_gpu.alloc_host_pinned(32)
    before, after = memory.array.view(np.float32).reshape(2, 4)
    for turn in range(1, 4):
        launch(toy_gpu, values(x, x, factor=SLOW), stream)
        toy_gpu.copy_d2h_async(x, before, stream)
        toy_gpu.copy_h2d_async(before, y, stream)
        launch(toy_gpu, values(y, y, factor=SLOW), stream)
        toy_gpu.copy_d2h_async(y, after, stream)
        toy_gpu.copy_h2d_async(before, y, stream)
        toy_gpu.record_event(event, stream)
        toy_gpu.event_synchronize(event)
        assert before.tolist() == (0.75**turn * X).astype(np.float32).tolist()
        assert after.tolist() == (0.75 ** (turn + 1) * X).astype(np.float32).tolist()
        assert download(toy_gpu, y, X).tolist() == before.tolist()
    toy_gpu.free_host_pinned(memory)


def test_a_table_is_overwritten_when_its_readers_have_ended(toy_gpu: GpuBackend) -> None:
    memory, bias, out = toy_gpu.alloc_host_pinned(16), upload(toy_gpu, 0 * X), toy_gpu.alloc(16)
    memory.array.view(np.float32)[:] = X
    x = upload(toy_gpu, X)
    launch(toy_gpu, values(x, out, bias=bias, factor=SLOW))  # reads the bias after 30 ms
    toy_gpu.copy_h2d_async(memory.array, bias)
    toy_gpu.synchronize()
    assert download(toy_gpu, out, X).tolist() == (0.75 * X).tolist()
    assert download(toy_gpu, bias, X).tolist() == X.tolist()
    toy_gpu.free_host_pinned(memory)


@pytest.mark.parametrize("arch", [None, "compute_80"])
def test_copies_among_kernels_that_start_early(device: Device, arch: str | None) -> None:
    """A chain goes to the host and back after every second kernel; the bits are those of the kernels alone."""
    rows, width = 16, 512  # 32 KiB
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, width), dtype=np.float32)
    weight = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    options: Any = {"rows": rows, "width": width, "eps": 1e-5, "dtype": "f32"}
    with device.open(**({} if arch is None else {"arch": arch})) as gpu:
        memory = gpu.alloc_host_pinned(x.nbytes)
        gamma, beta, first, second = (upload(gpu, one) for one in (weight, weight, x, x))

        def chain(through_the_host: bool) -> bytes:
            gpu.copy_h2d(x, first)
            for _ in range(50):
                layer_norm(gpu, first, gamma, beta, second, **options)
                if through_the_host:
                    gpu.copy_d2h_async(second, memory.array)
                    gpu.memset_async(second, 255, x.nbytes)  # NaN
                    gpu.copy_h2d_async(memory.array, second)
                layer_norm(gpu, second, gamma, beta, first, **options)
                if through_the_host:
                    gpu.copy_d2h_async(first, memory.array)
                    gpu.copy_h2d_async(memory.array, second)
                    layer_norm(gpu, second, gamma, beta, second, **options)  # nothing reads it
            return download(gpu, first, x).tobytes()

        assert chain(True) == chain(False)
        gpu.free_host_pinned(memory)
        gpu.sweep_unreleased()


# captures


def test_captured_copies_run_at_each_launch(toy_gpu: GpuBackend) -> None:
    """The host memory is read and written anew; also on a stream that joined, where two kernels are ahead of a copy."""
    memory, x, y = toy_gpu.alloc_host_pinned(32), upload(toy_gpu, X), toy_gpu.alloc(16)
    source, result = memory.array.view(np.float32).reshape(2, 4)
    side, fork, join = toy_gpu.create_stream(), toy_gpu.create_event(), toy_gpu.create_event()
    toy_gpu.begin_capture()
    toy_gpu.copy_h2d_async(source, x)
    toy_gpu.record_event(fork)
    toy_gpu.stream_wait_event(side, fork)
    launch(toy_gpu, values(x, x))
    launch(toy_gpu, values(y, y, factor=0.0), side)
    toy_gpu.record_event(join, side)
    toy_gpu.stream_wait_event(0, join)
    toy_gpu.copy_d2h_async(x, result)
    graph = toy_gpu.end_capture()
    toy_gpu.begin_capture()
    toy_gpu.launch_graph(graph)
    toy_gpu.copy_h2d_async(source, y)
    whole = toy_gpu.end_capture()
    for factor in (1, 3):
        source[:], result[:] = factor * X, 0
        toy_gpu.launch_graph(graph, side)
        toy_gpu.synchronize(side)
        assert result.tolist() == (2 * factor * X).tolist()
        source[:], result[:] = 5 * factor * X, 0
        toy_gpu.launch_graph(whole)
        toy_gpu.synchronize()
        assert result.tolist() == (10 * factor * X).tolist()
        assert download(toy_gpu, y, X).tolist() == source.tolist()
    toy_gpu.destroy_graph(graph)
    toy_gpu.destroy_graph(whole)
    toy_gpu.free_host_pinned(memory)


def test_a_graph_keeps_page_locked_memory_that_was_given_up(toy_gpu: GpuBackend) -> None:
    memory, x = toy_gpu.alloc_host_pinned(16), upload(toy_gpu, X)
    memory.array.view(np.float32)[:] = 7
    toy_gpu.begin_capture()
    toy_gpu.copy_h2d_async(memory.array, x)
    graph = toy_gpu.end_capture()
    toy_gpu.free_host_pinned(memory)
    del memory
    taken = [toy_gpu.alloc_host_pinned(16) for _ in range(8)]  # would have its place
    toy_gpu.launch_graph(graph)
    assert download(toy_gpu, x, X).tolist() == [7] * 4
    toy_gpu.destroy_graph(graph)
    for one in taken:
        toy_gpu.free_host_pinned(one)


def test_a_destroyed_graph_keeps_what_its_launches_need(toy_gpu: GpuBackend) -> None:
    """The launch waits behind a kernel that takes 30 ms; the graph and its host memory are given up meanwhile."""
    for stream in (0, toy_gpu.create_stream()):
        memory, x, y = toy_gpu.alloc_host_pinned(16), upload(toy_gpu, X), upload(toy_gpu, X)
        memory.array.view(np.float32)[:] = 7
        toy_gpu.begin_capture(stream)
        toy_gpu.copy_h2d_async(memory.array, x, stream)
        graph = toy_gpu.end_capture(stream)
        toy_gpu.free_host_pinned(memory)
        del memory
        launch(toy_gpu, values(y, y, factor=SLOW), stream)
        toy_gpu.launch_graph(graph, stream)
        toy_gpu.destroy_graph(graph)
        gc.collect()
        taken = [toy_gpu.alloc_host_pinned(16) for _ in range(8)]  # would have its place
        toy_gpu.synchronize(stream)
        assert download(toy_gpu, x, X).tolist() == [7] * 4
        for one in taken:
            toy_gpu.free_host_pinned(one)


def test_a_graph_that_is_destroyed_while_its_stream_is(toy_gpu: GpuBackend) -> None:
    """Another thread waits 30 ms for the stream's work, which no stream that may be used knows of meanwhile."""
    stream = toy_gpu.create_stream()
    memory, x, y = toy_gpu.alloc_host_pinned(16), upload(toy_gpu, X), upload(toy_gpu, X)
    memory.array.view(np.float32)[:] = 7
    toy_gpu.begin_capture(stream)
    toy_gpu.copy_h2d_async(memory.array, x, stream)
    graph = toy_gpu.end_capture(stream)
    array = weakref.ref(memory.array)
    toy_gpu.free_host_pinned(memory)
    del memory
    launch(toy_gpu, values(y, y, factor=SLOW), stream)
    toy_gpu.launch_graph(graph, stream)
    waiting = threading.Thread(target=toy_gpu.destroy_stream, args=(stream,))
    waiting.start()
    time.sleep(0.005)
    toy_gpu.destroy_graph(graph)
    gc.collect()
    assert not waiting.is_alive() or array() is not None
    waiting.join()
    assert download(toy_gpu, x, X).tolist() == [7] * 4


def test_a_copy_in_somebody_else_s_capture(toy_gpu: GpuBackend) -> None:
    import cupy

    memory, x = toy_gpu.alloc_host_pinned(32), upload(toy_gpu, X)
    source, result = memory.array.view(np.float32).reshape(2, 4)
    stream = cupy.cuda.Stream(non_blocking=True)
    launch(toy_gpu, values(x, x))  # which loads the kernel
    with stream:
        stream.begin_capture()
        toy_gpu.copy_h2d_async(source, x, stream.ptr)
        launch(toy_gpu, values(x, x), stream.ptr)
        toy_gpu.copy_d2h_async(x, result, stream.ptr)
        graph = stream.end_capture()
    for factor in (1, 3):
        source[:] = factor * X
        graph.launch(stream)
        stream.synchronize()
        assert result.tolist() == (2 * factor * X).tolist()
    toy_gpu.free_host_pinned(memory)


# copies that come again


def test_a_copy_that_comes_again_is_checked_again(toy_gpu: GpuBackend) -> None:
    """The same array, address and stream: quick while all is as it was, and refused or recorded when it is not."""
    from cupy.cuda import runtime

    memory, ptr, stream = toy_gpu.alloc_host_pinned(32), toy_gpu.alloc(16), toy_gpu.create_stream()
    source, result = memory.array[:16], memory.array[16:]

    def both() -> None:
        toy_gpu.copy_h2d_async(source, ptr, stream)
        toy_gpu.copy_d2h_async(ptr, result, stream)
        toy_gpu.synchronize(stream)

    for value in (3, 4, 5):
        source[:] = value
        both()
        assert result.tolist() == [value] * 16
    with toy_gpu.launch_trace() as trace:
        both()
    assert [one.name for one in trace if one.kind == "copy"] == ["h2d", "d2h"]

    source[:], result[:] = 6, 0
    toy_gpu.begin_capture(stream)
    toy_gpu.copy_h2d_async(source, ptr, stream)
    toy_gpu.copy_d2h_async(ptr, result, stream)
    graph = toy_gpu.end_capture(stream)
    runtime.streamBeginCapture(stream, runtime.streamCaptureModeRelaxed)
    toy_gpu.copy_h2d_async(source, ptr, stream)
    toy_gpu.copy_d2h_async(ptr, result, stream)
    theirs = runtime.graphInstantiate(runtime.streamEndCapture(stream))
    assert result.tolist() == [0] * 16, "nothing ran"
    toy_gpu.launch_graph(graph, stream)
    toy_gpu.synchronize(stream)
    assert result.tolist() == [6] * 16
    source[:] = 7
    runtime.graphLaunch(theirs, stream)
    toy_gpu.synchronize(stream)
    assert result.tolist() == [7] * 16

    result.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        toy_gpu.copy_d2h_async(ptr, result, stream)
    result.flags.writeable = True
    both()
    toy_gpu.destroy_graph(graph)
    toy_gpu.destroy_stream(stream)
    with pytest.raises(DeviceError, match="destroyed"):
        toy_gpu.copy_h2d_async(source, ptr, stream)
    toy_gpu.free(ptr)
    again = toy_gpu.alloc(16)
    for _ in range(2):
        assert ways(toy_gpu, source, again) == {"small_copy"}
    toy_gpu.free_host_pinned(memory)
    assert ways(toy_gpu, source, again) == {"memcpyAsync"}, "its array still holds the memory"


def test_copies_that_may_come_again_hold_no_memory_that_was_given_up(toy_gpu: GpuBackend) -> None:
    """Page-locked memory goes with its last array."""
    memory, ptr = toy_gpu.alloc_host_pinned(32), toy_gpu.alloc(16)
    arrays = [memory.array, memory.array[:16], memory.array[16:]]
    toy_gpu.copy_h2d_async(arrays[1], ptr)
    toy_gpu.copy_d2h_async(ptr, arrays[2])
    toy_gpu.synchronize()
    gone = [weakref.ref(array) for array in arrays]
    toy_gpu.free_host_pinned(memory)
    del memory, arrays
    gc.collect()
    assert [array() for array in gone] == [None] * 3


# threads


def test_threads_copy_at_once(device: Device) -> None:
    """Each through a buffer of its own, on streams that all share; sizes and addresses change from copy to copy."""
    with device.open() as gpu:
        streams = [gpu.create_stream() for _ in range(4)]
        host = [gpu.alloc_host_pinned(2 * LARGEST) for _ in range(THREADS)]
        places = [gpu.alloc(LARGEST) for _ in range(THREADS)]

        def work(index: int) -> None:
            rng = np.random.default_rng(index)
            out, back = host[index].array.reshape(2, LARGEST)
            for turn in range(150):
                stream = streams[(index + turn) % len(streams)]
                start, size = int(rng.integers(0, 40)), int(rng.choice([1, 12, 768, 8192, 30_000, LARGEST - 40]))
                part = slice(start, start + size)
                out[part] = rng.integers(0, 256, size, dtype=np.uint8)
                at = places[index] + int(rng.integers(0, 40))
                gpu.copy_h2d_async(out[part], at, stream)
                gpu.copy_d2h_async(at, back[part], stream)
                gpu.synchronize(stream)
                assert np.array_equal(out[part], back[part]), (index, turn)

        with eager_switching():
            hammer(work, THREADS)
        for memory in host:
            gpu.free_host_pinned(memory)
        gpu.sweep_unreleased()


def test_a_thread_that_has_no_context_yet(toy_gpu: GpuBackend) -> None:
    memory, x = toy_gpu.alloc_host_pinned(16), upload(toy_gpu, 0 * X)
    memory.array.view(np.float32)[:] = X
    hammer(lambda index: toy_gpu.copy_h2d_async(memory.array, x), 2)
    assert download(toy_gpu, x, X).tolist() == X.tolist()
    toy_gpu.free_host_pinned(memory)
