# SPDX-License-Identifier: MIT OR Apache-2.0
"""Capture and replay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, InvalidPointer
from gpu_runtime.streams import LEGACY_STREAM
from tests.backends import host_only, words
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

ONES = np.ones(4, dtype=np.float32)


def read(gpu: GpuBackend, ptr: int) -> float:
    """Return the value that all four elements have, after the work on the default stream."""
    (value,) = set(download(gpu, ptr, ONES).tolist())
    return float(value)


def double(gpu: GpuBackend, src: int, dst: int, stream: int = 0) -> None:
    launch(gpu, values(src, dst), stream)


@pytest.fixture
def ptrs(gpu: GpuBackend) -> list[int]:
    return [upload(gpu, ONES) for _ in range(4)]


def test_captured_work_runs_at_each_launch_and_not_before(gpu: GpuBackend, ptrs: list[int]) -> None:
    stream = gpu.create_stream()
    assert not gpu.stream_is_capturing(stream)
    gpu.begin_capture(stream)
    assert gpu.stream_is_capturing(stream)
    assert not gpu.stream_is_capturing()
    double(gpu, ptrs[0], ptrs[0], stream)
    graph = gpu.end_capture(stream)
    assert not gpu.stream_is_capturing(stream)
    assert read(gpu, ptrs[0]) == 1
    for times in (1, 2, 3):
        on = (0, stream, LEGACY_STREAM)[times - 1]
        gpu.launch_graph(graph, on)
        gpu.synchronize(on)
        assert read(gpu, ptrs[0]) == 2**times


def test_everything_that_enqueues_is_captured(gpu: GpuBackend, ptrs: list[int]) -> None:
    pinned = [gpu.alloc_host_pinned(16) for _ in range(2)]
    host, out = (memory.array.view(np.float32) for memory in pinned)
    host[:] = 5
    gpu.begin_capture()
    gpu.copy_h2d_async(host, ptrs[0])
    double(gpu, ptrs[0], ptrs[1])
    gpu.copy_d2d_async(ptrs[1], ptrs[2], 16)
    gpu.copy_d2d_2d_async(ptrs[2], 8, ptrs[3], 8, 8, 2)
    gpu.gemm(ptrs[3], ptrs[3], ptrs[2], 1, 1, 4, dtype="f32")
    gpu.copy_d2h_async(ptrs[2], out[:1])
    gpu.memset_async(ptrs[0], 0, 16)
    graph = gpu.end_capture()
    gpu.synchronize()
    assert out[0] == 0
    gpu.launch_graph(graph)
    gpu.synchronize()
    assert (out[0], read(gpu, ptrs[0]), read(gpu, ptrs[3])) == (400, 0, 10)
    host[:] = 1
    gpu.launch_graph(graph)
    gpu.synchronize()
    assert out[0] == 16, "a replay reads the host buffer again"
    for memory in pinned:
        gpu.free_host_pinned(memory)


def test_arguments_are_frozen(gpu: GpuBackend, ptrs: list[int]) -> None:
    arguments = values(ptrs[0], ptrs[1])
    gpu.begin_capture()
    launch(gpu, arguments)
    graph = gpu.end_capture()
    arguments[:] = values(ptrs[2], ptrs[3], factor=9)
    gpu.launch_graph(graph)
    assert [read(gpu, ptr) for ptr in ptrs] == [1, 2, 1, 1]


@host_only
def test_addresses_are_frozen(gpu: GpuBackend, ptrs: list[int]) -> None:
    gpu.begin_capture()
    double(gpu, ptrs[0], ptrs[1])
    graph = gpu.end_capture()
    gpu.free(ptrs[1])
    with pytest.raises(InvalidPointer, match="toy: out"):
        gpu.launch_graph(graph)


def test_fork_and_join(gpu: GpuBackend, ptrs: list[int]) -> None:
    side, fork, join = gpu.create_stream(), gpu.create_event(), gpu.create_event()
    gpu.begin_capture()
    double(gpu, ptrs[0], ptrs[1])
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    assert gpu.stream_is_capturing(side)
    double(gpu, ptrs[1], ptrs[2], side)
    gpu.record_event(join, side)
    gpu.stream_wait_event(0, join)
    double(gpu, ptrs[2], ptrs[3])
    graph = gpu.end_capture()
    assert not gpu.stream_is_capturing(side)
    double(gpu, ptrs[0], ptrs[0], side)
    gpu.synchronize(side)
    assert read(gpu, ptrs[0]) == 2, "the side stream runs its work again"
    gpu.launch_graph(graph)
    assert [read(gpu, ptr) for ptr in ptrs] == [2, 4, 8, 16]


def test_join_through_a_third_stream(gpu: GpuBackend, ptrs: list[int]) -> None:
    streams = [gpu.default_stream(), gpu.create_stream(), gpu.create_stream()]
    events = [gpu.create_event() for _ in range(3)]
    gpu.begin_capture()
    for index, stream in enumerate(streams):
        double(gpu, ptrs[index], ptrs[index + 1], stream)
        gpu.record_event(events[index], stream)
        gpu.stream_wait_event(streams[(index + 1) % 3], events[index])
    gpu.launch_graph(gpu.end_capture())
    assert read(gpu, ptrs[3]) == 8


@host_only
def test_a_joined_stream_without_work_needs_no_join(gpu: GpuBackend) -> None:
    side, fork = gpu.create_stream(), gpu.create_event()
    gpu.begin_capture()
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    gpu.launch_graph(gpu.end_capture())
    assert not gpu.stream_is_capturing(side)


@pytest.mark.parametrize("late", [False, True], ids=["never joined", "work after the join"])
def test_an_unjoined_stream_is_an_error(gpu: GpuBackend, ptrs: list[int], late: bool) -> None:
    side, fork, join = gpu.create_stream(), gpu.create_event(), gpu.create_event()
    gpu.begin_capture()
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    if late:
        gpu.record_event(join, side)
        gpu.stream_wait_event(0, join)
    double(gpu, ptrs[0], ptrs[1], side)
    with pytest.raises(DeviceError, match=words(gpu, f"work of streams {side:#x} was not joined back")):
        gpu.end_capture()
    assert not gpu.stream_is_capturing()
    assert not gpu.stream_is_capturing(side)
    assert read(gpu, ptrs[1]) == 1
    double(gpu, ptrs[0], ptrs[1], side)
    gpu.synchronize(side)
    assert read(gpu, ptrs[1]) == 2


def test_waiting_is_refused_in_a_capture(gpu: GpuBackend, ptrs: list[int]) -> None:
    event, buffer = gpu.create_event(timing=True), bytearray(16)
    gpu.record_event(event)
    gpu.begin_capture()
    double(gpu, ptrs[0], ptrs[1])
    gpu.record_event(event)
    calls: list[Callable[[], Any]] = [
        gpu.synchronize,
        lambda: gpu.copy_h2d(buffer, ptrs[0]),
        lambda: gpu.copy_d2h(ptrs[0], buffer),
        lambda: gpu.copy_d2h_on_stream(ptrs[0], buffer),
        lambda: gpu.copy_h2d_on_stream(buffer, ptrs[0]),
        lambda: gpu.copy_files_h2d([]),
        lambda: gpu.copy_d2d(ptrs[0], ptrs[1], 16),
        lambda: gpu.memset(ptrs[0], 0, 16),
        lambda: gpu.event_query(event),
        lambda: gpu.event_synchronize(event),
        lambda: gpu.event_elapsed_ms(event, event),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="captur"):
            call()
    gpu.synchronize(gpu.create_stream())  # another stream is another matter
    gpu.launch_graph(gpu.end_capture())
    assert [read(gpu, ptr) for ptr in ptrs[:2]] == [1, 2], "what was refused left no trace in the graph"
    with pytest.raises(DeviceError, match="captur"):
        gpu.event_query(event)
    gpu.record_event(event)
    gpu.event_synchronize(event)
    assert gpu.event_query(event)


def test_a_capturing_stream_cannot_be_destroyed(gpu: GpuBackend) -> None:
    stream = gpu.create_stream()
    gpu.begin_capture(stream)
    with pytest.raises(DeviceError, match=words(gpu, "destroy_stream")):
        gpu.destroy_stream(stream)
    gpu.abort_capture_if_active(stream)
    gpu.destroy_stream(stream)


def test_a_capture_does_not_wait_for_work_outside_it(gpu: GpuBackend) -> None:
    """As CUDA has it: the event's work may be done, and may even be the stream's own."""
    event, never = gpu.create_event(), gpu.create_event()
    gpu.record_event(event)
    gpu.synchronize()
    gpu.begin_capture()
    gpu.stream_wait_event(0, never)
    with pytest.raises(DeviceError, match=words(gpu, "a capture cannot wait for work outside it")):
        gpu.stream_wait_event(0, event)
    gpu.destroy_graph(gpu.end_capture())


def test_abort(gpu: GpuBackend, ptrs: list[int]) -> None:
    side, fork = gpu.create_stream(), gpu.create_event()
    assert gpu.abort_capture_if_active() is False
    for stream in (0, side):
        gpu.begin_capture()
        double(gpu, ptrs[0], ptrs[0])
        gpu.record_event(fork)
        gpu.stream_wait_event(side, fork)
        assert gpu.abort_capture_if_active(stream) is True
        assert not gpu.stream_is_capturing()
        assert not gpu.stream_is_capturing(side)
        assert gpu.abort_capture_if_active(stream) is False
        with pytest.raises(DeviceError, match=words(gpu, "did not begin a capture")):
            gpu.end_capture()
        with pytest.raises(DeviceError, match=words(gpu, "a capture that has ended")):
            gpu.stream_wait_event(side, fork)
    assert read(gpu, ptrs[0]) == 1


def test_end_on_the_wrong_stream(gpu: GpuBackend) -> None:
    side, fork = gpu.create_stream(), gpu.create_event()
    with pytest.raises(DeviceError, match=words(gpu, "did not begin a capture")):
        gpu.end_capture()
    gpu.begin_capture()
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    for stream in (side, gpu.create_stream()):
        with pytest.raises(DeviceError, match=words(gpu, "did not begin a capture")):
            gpu.end_capture(stream)
    gpu.destroy_graph(gpu.end_capture())


def test_begin_twice(gpu: GpuBackend) -> None:
    side, fork = gpu.create_stream(), gpu.create_event()
    gpu.begin_capture()
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    for stream in (0, gpu.default_stream(), side):
        with pytest.raises(DeviceError, match=words(gpu, "is capturing already")):
            gpu.begin_capture(stream)
    gpu.destroy_graph(gpu.end_capture())


def test_the_legacy_stream_takes_no_part(gpu: GpuBackend, ptrs: list[int]) -> None:
    class Legacy:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0)

    event = gpu.create_event()
    for stream in (LEGACY_STREAM, Legacy()):
        with pytest.raises(DeviceError, match=words(gpu, "legacy stream cannot be captured")):
            gpu.begin_capture(stream)
        gpu.begin_capture()
        gpu.record_event(event)
        with pytest.raises(DeviceError, match=words(gpu, "legacy stream cannot join")):
            gpu.stream_wait_event(stream, event)
        gpu.abort_capture_if_active()
    gpu.begin_capture(2)
    double(gpu, ptrs[0], ptrs[0], 2)
    gpu.launch_graph(gpu.end_capture(2))
    assert read(gpu, ptrs[0]) == 2, "of the default stream, where the graph was launched"


def test_two_captures_stay_apart(gpu: GpuBackend, ptrs: list[int]) -> None:
    one, two, event = gpu.create_stream(), gpu.create_stream(), gpu.create_event()
    gpu.begin_capture(one)
    gpu.begin_capture(two)
    double(gpu, ptrs[0], ptrs[1], one)
    double(gpu, ptrs[2], ptrs[3], two)
    gpu.record_event(event, one)
    with pytest.raises(DeviceError, match=words(gpu, "belongs to another capture")):
        gpu.stream_wait_event(two, event)
    first, second = gpu.end_capture(one), gpu.end_capture(two)
    gpu.launch_graph(second)
    assert [read(gpu, ptr) for ptr in ptrs] == [1, 1, 1, 2]
    gpu.launch_graph(first)
    assert [read(gpu, ptr) for ptr in ptrs] == [1, 2, 1, 2]


def test_a_graph_inside_a_graph(gpu: GpuBackend, ptrs: list[int]) -> None:
    gpu.begin_capture()
    double(gpu, ptrs[0], ptrs[0])
    inner = gpu.end_capture()
    gpu.begin_capture()
    gpu.launch_graph(inner)
    gpu.launch_graph(inner)
    outer = gpu.end_capture()
    assert read(gpu, ptrs[0]) == 1
    gpu.destroy_graph(inner)
    gpu.launch_graph(outer)
    assert read(gpu, ptrs[0]) == 4


def test_graphs_live_until_they_are_destroyed(gpu: GpuBackend) -> None:
    gpu.begin_capture()
    graph = gpu.end_capture()
    gpu.launch_graph(graph)
    gpu.destroy_graph(graph)
    for call in (gpu.launch_graph, gpu.destroy_graph):
        with pytest.raises(DeviceError, match=words(gpu, "expected a live graph")):
            call(graph)


@pytest.mark.parametrize("end", ["destroyed", "aborted", "spoilt"])
def test_buffers_of_captured_copies_are_let_go(gpu: GpuBackend, ptrs: list[int], end: str) -> None:
    """With the graph, or the capture that comes to none, although an event that was recorded in it lives on."""

    class Buffer(np.ndarray[Any, Any]):
        """An array that can be watched."""

    event, side = gpu.create_event(), gpu.create_stream()
    buffer = Buffer(4, np.float32)  # it owns its memory, so that whoever needs that needs the object
    buffer[:] = 7
    watch = weakref.ref(buffer)
    gpu.begin_capture()
    gpu.copy_h2d_async(buffer, ptrs[0])
    gpu.record_event(event)
    del buffer
    assert watch() is not None
    if end == "aborted":
        gpu.abort_capture_if_active()
    elif end == "spoilt":
        gpu.stream_wait_event(side, event)
        double(gpu, ptrs[1], ptrs[1], side)
        with pytest.raises(DeviceError):
            gpu.end_capture()
    else:
        graph = gpu.end_capture()
        gpu.launch_graph(graph)
        assert read(gpu, ptrs[0]) == 7
        gpu.destroy_graph(graph)
        gpu.synchronize()
    gc.collect()
    assert watch() is None
    gpu.destroy_event(event)


def test_memory_may_be_allocated_in_a_capture(gpu: GpuBackend) -> None:
    gpu.begin_capture()
    ptr = gpu.alloc(16)
    gpu.memset_async(ptr, 0, 16)
    gpu.launch_graph(gpu.end_capture())
    assert read(gpu, ptr) == 0


def test_bad_arguments_are_refused_while_capturing_and_not_at_replay(gpu: GpuBackend, ptrs: list[int]) -> None:
    gpu.begin_capture()
    with pytest.raises(ValueError, match="toy: x"):
        double(gpu, 0, ptrs[1])
    with pytest.raises(InvalidPointer):
        gpu.memset_async(ptrs[0], 0, 17)
    gpu.launch_graph(gpu.end_capture())
    assert [read(gpu, ptr) for ptr in ptrs] == [1, 1, 1, 1]


@host_only
def test_kernels_out_of_bounds_are_refused_while_capturing(gpu: GpuBackend, ptrs: list[int]) -> None:
    gpu.begin_capture()
    with pytest.raises(InvalidPointer):
        double(gpu, ptrs[0] + 4, ptrs[1])
    gpu.launch_graph(gpu.end_capture())
    assert [read(gpu, ptr) for ptr in ptrs] == [1, 1, 1, 1]


def test_an_event_destroyed_in_a_capture_leaves_its_edge(gpu: GpuBackend, ptrs: list[int]) -> None:
    side, fork, join = gpu.create_stream(), gpu.create_event(), gpu.create_event()
    gpu.begin_capture()
    gpu.record_event(fork)
    gpu.stream_wait_event(side, fork)
    gpu.destroy_event(fork)
    double(gpu, ptrs[0], ptrs[0], side)
    gpu.record_event(join, side)
    gpu.stream_wait_event(0, join)
    gpu.destroy_event(join)
    gpu.launch_graph(gpu.end_capture())
    assert read(gpu, ptrs[0]) == 2


def test_traces_list_what_is_captured_and_not_what_is_replayed(gpu: GpuBackend, ptrs: list[int]) -> None:
    with gpu.launch_trace() as trace:
        gpu.begin_capture()
        double(gpu, ptrs[0], ptrs[1])
        graph = gpu.end_capture()
        gpu.launch_graph(graph)
        gpu.launch_graph(graph)
    assert [record.name for record in trace] == ["toy_f32"]
