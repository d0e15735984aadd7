# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small programs with one wait that matters: with it every order gives the right value, without it a wrong one shows.

Each program takes a backend and whether to wait, and returns what it saw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.host import HostBackend
from gpu_runtime.streams import LEGACY_STREAM, PER_THREAD_STREAM
from tests.gpu_runtime.toy import REGISTRY, launch, values

SEEDS = range(40)
N = 16
"""Bytes of every block."""


@dataclass(frozen=True)
class Litmus:
    """A program, what it sees when it waits, and whether deferring all work is enough to see something else."""

    program: Callable[[GpuBackend, bool], Any]
    right: Any
    deferred_shows: bool


LITMUS: dict[str, Litmus] = {}


def litmus(right: Any, *, deferred_shows: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(program: Callable[[GpuBackend, bool], Any]) -> Callable[[GpuBackend, bool], Any]:
        LITMUS[program.__name__] = Litmus(program, right, deferred_shows)
        return program

    return register


def block(gpu: GpuBackend, value: int = 0) -> int:
    ptr = gpu.alloc(N)
    gpu.memset(ptr, value, N)
    return ptr


def value(gpu: GpuBackend, ptr: int, stream: int = 0) -> int:
    """Return what a block holds after the work on one stream."""
    out = np.empty(N, np.uint8)
    gpu.copy_d2h_on_stream(ptr, out, stream)
    (found,) = set(out.tolist())
    return int(found)


def after(gpu: GpuBackend, later: int, earlier: int, waits: bool) -> None:
    """Let what comes next on ``later`` come after what is on ``earlier``."""
    if waits:
        event = gpu.create_event()
        gpu.record_event(event, earlier)
        gpu.stream_wait_event(later, event)
        gpu.destroy_event(event)


def handover(gpu: GpuBackend, producer: int, consumer: int, waits: bool) -> int:
    x, y = block(gpu), block(gpu)
    gpu.memset_async(x, 1, N, producer)
    after(gpu, consumer, producer, waits)
    gpu.copy_d2d_async(x, y, N, consumer)
    return value(gpu, y, consumer)


@litmus(1)
def producer_and_consumer(gpu: GpuBackend, waits: bool) -> int:
    return handover(gpu, gpu.create_stream(), gpu.create_stream(), waits)


@litmus(1)
def a_stream_and_the_default_stream(gpu: GpuBackend, waits: bool) -> int:
    return handover(gpu, gpu.create_stream(), 0, waits)


@litmus(1)
def the_legacy_stream_orders_nothing_by_itself(gpu: GpuBackend, waits: bool) -> int:
    """Every stream here is non-blocking."""
    return handover(gpu, LEGACY_STREAM, gpu.create_stream(), waits)


@litmus(1)
def nor_is_anything_ordered_before_the_legacy_stream(gpu: GpuBackend, waits: bool) -> int:
    return handover(gpu, 0, LEGACY_STREAM, waits)


@litmus(1)
def the_stream_of_the_thread(gpu: GpuBackend, waits: bool) -> int:
    return handover(gpu, PER_THREAD_STREAM, 0, waits)


@litmus(1)
def an_event_of_another_thread(gpu: GpuBackend, waits: bool) -> int:
    """On that thread's own stream, which ends with it, though its work does not."""
    x, y, event = block(gpu), block(gpu), gpu.create_event()

    def produce() -> None:
        gpu.memset_async(x, 1, N, PER_THREAD_STREAM)
        gpu.record_event(event, PER_THREAD_STREAM)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join()
    if waits:
        gpu.stream_wait_event(0, event)
    gpu.copy_d2d_async(x, y, N)
    return value(gpu, y)


@litmus(1)
def write_after_read(gpu: GpuBackend, waits: bool) -> int:
    """What the host waits for first is the stream that writes."""
    reader, writer = gpu.create_stream(), gpu.create_stream()
    x, y = block(gpu, 1), block(gpu)
    gpu.copy_d2d_async(x, y, N, reader)
    after(gpu, writer, reader, waits)
    gpu.memset_async(x, 2, N, writer)
    gpu.synchronize(writer)
    return value(gpu, y, reader)


@litmus(1, deferred_shows=False)
def write_after_read_with_the_reader_waited_for(gpu: GpuBackend, waits: bool) -> int:
    """Only a stream that runs ahead of what the host waits for shows this."""
    reader, writer = gpu.create_stream(), gpu.create_stream()
    x, y = block(gpu, 1), block(gpu)
    gpu.copy_d2d_async(x, y, N, reader)
    after(gpu, writer, reader, waits)
    gpu.memset_async(x, 2, N, writer)
    return value(gpu, y, reader)


@litmus(2, deferred_shows=False)
def write_after_write(gpu: GpuBackend, waits: bool) -> int:
    first, second = gpu.create_stream(), gpu.create_stream()
    x = block(gpu)
    gpu.memset_async(x, 1, N, first)
    after(gpu, second, first, waits)
    gpu.memset_async(x, 2, N, second)
    gpu.synchronize(first)
    gpu.synchronize(second)
    return value(gpu, x)


@litmus(1)
def a_staging_buffer_filled_again(gpu: GpuBackend, waits: bool) -> int:
    """Before the copy from it has run."""
    memory, stream, x = gpu.alloc_host_pinned(N), gpu.create_stream(), block(gpu)
    memory.array[:] = 1
    gpu.copy_h2d_async(memory.array, x, stream)
    if waits:
        event = gpu.create_event()
        gpu.record_event(event, stream)
        gpu.event_synchronize(event)
    memory.array[:] = 2
    found = value(gpu, x, stream)
    gpu.free_host_pinned(memory)
    return found


@litmus(2, deferred_shows=False)
def a_staging_buffer_filled_too_late(gpu: GpuBackend, waits: bool) -> int:
    """After the copy was enqueued: the fault is that of a stream which is as fast as it can be."""
    stream, x, buffer = gpu.create_stream(), block(gpu), np.ones(N, np.uint8)
    if waits:
        buffer[:] = 2
    gpu.copy_h2d_async(buffer, x, stream)
    buffer[:] = 2
    return value(gpu, x, stream)


@litmus(1)
def a_result_read_before_its_event(gpu: GpuBackend, waits: bool) -> int:
    stream, x, out = gpu.create_stream(), block(gpu, 1), np.zeros(N, np.uint8)
    event = gpu.create_event()
    gpu.copy_d2h_async(x, out, stream)
    gpu.record_event(event, stream)
    if waits:
        gpu.event_synchronize(event)
    return int(out[0])


@litmus(1)
def a_result_read_as_soon_as_its_event_is_queried(gpu: GpuBackend, waits: bool) -> int:
    """A query that says no is no reason to read; one that says yes is."""
    stream, x, out = gpu.create_stream(), block(gpu, 1), np.zeros(N, np.uint8)
    event = gpu.create_event()
    gpu.copy_d2h_async(x, out, stream)
    gpu.record_event(event, stream)
    if not gpu.event_query(event) and waits:
        gpu.event_synchronize(event)
    return int(out[0])


@litmus(2)
def an_event_recorded_again(gpu: GpuBackend, waits: bool) -> int:
    """A wait is for the latest record before it, and stays with that."""
    producer, consumer, event = gpu.create_stream(), gpu.create_stream(), gpu.create_event()
    x, y = block(gpu), block(gpu)
    gpu.memset_async(x, 1, N, producer)
    gpu.record_event(event, producer)
    if not waits:
        gpu.stream_wait_event(consumer, event)
    gpu.memset_async(x, 2, N, producer)
    gpu.record_event(event, producer)
    if waits:
        gpu.stream_wait_event(consumer, event)
    gpu.copy_d2d_async(x, y, N, consumer)
    return value(gpu, y, consumer)


@litmus(1)
def an_event_recorded_on_another_stream_later(gpu: GpuBackend, waits: bool) -> int:
    """It no longer stands for the first one."""
    producer, other, consumer = (gpu.create_stream() for _ in range(3))
    x, y, event = block(gpu), block(gpu), gpu.create_event()
    gpu.memset_async(x, 1, N, producer)
    gpu.record_event(event, producer)
    if waits:
        gpu.stream_wait_event(consumer, event)
    gpu.record_event(event, other)
    gpu.stream_wait_event(consumer, event)
    gpu.copy_d2d_async(x, y, N, consumer)
    return value(gpu, y, consumer)


@litmus(1)
def an_event_recorded_before_anything(gpu: GpuBackend, waits: bool) -> int:
    """It stands for nothing, like one that was never recorded."""
    producer, consumer = gpu.create_stream(), gpu.create_stream()
    x, y, event, never = block(gpu), block(gpu), gpu.create_event(), gpu.create_event()
    gpu.record_event(event, producer)
    gpu.stream_wait_event(consumer, never)
    gpu.memset_async(x, 1, N, producer)
    if waits:
        gpu.record_event(event, producer)
    gpu.stream_wait_event(consumer, event)
    gpu.copy_d2d_async(x, y, N, consumer)
    return value(gpu, y, consumer)


@litmus((1, 1))
def a_diamond(gpu: GpuBackend, waits: bool) -> tuple[int, int]:
    """One stream forks into two others, and joins one of them or both."""
    first, left, right = (gpu.create_stream() for _ in range(3))
    x, y, z, out, other = (block(gpu) for _ in range(5))
    gpu.memset_async(x, 1, N, first)
    for side, target, joined in ((left, y, True), (right, z, waits)):
        after(gpu, side, first, True)
        gpu.copy_d2d_async(x, target, N, side)
        after(gpu, first, side, joined)
    gpu.copy_d2d_async(y, out, N, first)
    gpu.copy_d2d_async(z, other, N, first)
    gpu.synchronize(first)
    return value(gpu, out), value(gpu, other)


@litmus(2)
def a_wait_handed_on(gpu: GpuBackend, waits: bool) -> int:
    """The third stream waits for the second one, and so for the first, if that one was waited for."""
    first, second, third = (gpu.create_stream() for _ in range(3))
    x, y = block(gpu), block(gpu)
    gpu.memset_async(x, 2, N, first)
    after(gpu, second, first, waits)
    after(gpu, third, second, True)
    gpu.copy_d2d_async(x, y, N, third)
    return value(gpu, y, third)


@litmus(1)
def a_blocking_copy_beside_a_stream(gpu: GpuBackend, waits: bool) -> int:
    """It waits for the default stream alone."""
    stream, x, y = gpu.create_stream(), block(gpu, 1), block(gpu)
    gpu.copy_d2d_async(x, y, N, stream)
    if waits:
        gpu.synchronize(stream)
    gpu.copy_h2d(np.full(N, 2, np.uint8), x)
    return value(gpu, y, stream)


@litmus(8.0)
def kernels_and_products(gpu: GpuBackend, waits: bool) -> float:
    """``y = 2 x`` and ``z = y . x`` of four elements, twice: the second time, the product is prepared already."""
    one, two = gpu.create_stream(), gpu.create_stream()
    x, y, z = block(gpu), block(gpu), block(gpu)
    out = np.empty(1, np.float32)
    for turn in range(2):
        gpu.copy_h2d_async_retained(np.full(4, turn, np.float32), x, one)
        launch(gpu, values(x, y), one)
        after(gpu, two, one, waits or not turn)
        gpu.gemm(y, x, z, 1, 1, 4, dtype="f32", stream=two)
        after(gpu, one, two, True)
    gpu.copy_d2h_on_stream(z, out, two)
    return float(out[0])


@litmus(3)
def a_graph_between_two_streams(gpu: GpuBackend, waits: bool) -> int:
    """The graph hands on what the first stream wrote, and the second stream reads that."""
    first, second = gpu.create_stream(), gpu.create_stream()
    x, y, z = block(gpu), block(gpu), block(gpu)
    gpu.begin_capture()
    gpu.copy_d2d_async(x, y, N)
    graph = gpu.end_capture()
    gpu.memset_async(x, 3, N, first)
    after(gpu, 0, first, waits)
    gpu.launch_graph(graph)
    after(gpu, second, 0, True)
    gpu.copy_d2d_async(y, z, N, second)
    return value(gpu, z, second)


@litmus(1, deferred_shows=False)
def two_branches_of_a_graph(gpu: GpuBackend, waits: bool) -> int:
    side, x, y = gpu.create_stream(), block(gpu), block(gpu)
    gpu.begin_capture()
    after(gpu, side, 0, True)
    gpu.memset_async(x, 1, N)
    after(gpu, side, 0, waits)
    gpu.copy_d2d_async(x, y, N, side)
    after(gpu, 0, side, True)
    gpu.launch_graph(gpu.end_capture())
    return value(gpu, y)


@litmus((0, 3), deferred_shows=False)
def one_graph_after_the_other(gpu: GpuBackend, waits: bool) -> tuple[int, int]:
    """Launches of one graph come one after the other; those of two graphs on two streams do not."""
    one, two, x = gpu.create_stream(), gpu.create_stream(), block(gpu)
    buffer = np.zeros(2, np.uint8)

    def captured() -> int:
        gpu.begin_capture()
        gpu.copy_d2h_async(x, buffer[:1])
        gpu.memset_async(x, 3, 1)
        gpu.copy_d2h_async(x, buffer[1:])
        gpu.memset_async(x, 0, 1)
        return gpu.end_capture()

    graphs = [captured(), captured()]
    gpu.launch_graph(graphs[0], one)
    gpu.launch_graph(graphs[0 if waits else 1], two)
    gpu.synchronize(one)
    gpu.synchronize(two)
    return int(buffer[0]), int(buffer[1])


def seen(name: str, waits: bool, order: Any, seed: int = 0, *, check: bool = False) -> Any:
    with HostBackend(ops=REGISTRY, memory_limit=1 << 16, order=order, seed=seed, check=check) as gpu:
        found = LITMUS[name].program(gpu, waits)
        gpu.sweep_unreleased()
        return found


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", LITMUS)
def test_with_the_wait_every_order_is_right(name: str, check: bool) -> None:
    found = {seen(name, True, order, check=check) for order in ("in_order", "deferred")}
    found |= {seen(name, True, "adversarial", seed, check=check) for seed in SEEDS}
    assert found == {LITMUS[name].right}


@pytest.mark.parametrize("name", LITMUS)
def test_without_the_wait_some_seeds_are_right_and_some_are_not(name: str) -> None:
    found = {seen(name, False, "adversarial", seed) for seed in SEEDS}
    assert LITMUS[name].right in found
    assert len(found) > 1


@pytest.mark.parametrize("name", [name for name, one in LITMUS.items() if one.deferred_shows])
def test_without_the_wait_deferred_work_is_wrong(name: str) -> None:
    assert seen(name, False, "deferred") != LITMUS[name].right
