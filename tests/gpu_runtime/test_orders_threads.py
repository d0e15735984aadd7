# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several threads that enqueue and wait, under the orders that run work later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_runtime.host import HostBackend
from gpu_runtime.streams import PER_THREAD_STREAM
from tests.gpu_runtime.checked import filled, launch, opened
from tests.gpu_runtime.ordered import LATER, ORDERS
from tests.hammering import eager_switching, hammer

every_order = pytest.mark.parametrize(("order", "seed"), ORDERS[:6])
later_orders = pytest.mark.parametrize(("order", "seed"), LATER[:5])

THREADS = 6
PATIENCE = 10.0
"""Seconds after which a thread that waits for another one is taken to wait for ever."""


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    with eager_switching():
        yield


@pytest.mark.parametrize("check", [False, True])
@every_order
def test_each_thread_waits_for_its_own_work(order: Any, seed: int, check: bool) -> None:
    """On two streams of its own, with frees in between, which make all threads' work run."""
    with HostBackend(memory_limit=1 << 16, order=order, seed=seed, check=check) as gpu:

        def work(index: int) -> None:
            streams, event = (gpu.create_stream(), PER_THREAD_STREAM), gpu.create_event()
            out = bytearray(8)
            for turn in range(12):
                x, y = gpu.alloc(8), gpu.alloc(8)
                gpu.memset_async(x, 10 * index + turn, 8, streams[0])
                gpu.record_event(event, streams[0])
                gpu.stream_wait_event(streams[1], event)
                gpu.copy_d2d_async(x, y, 8, streams[1])
                gpu.copy_d2h_async(y, out, streams[1])
                gpu.record_event(event, streams[1])
                if turn % 3 == 0:
                    gpu.free(x)
                gpu.event_synchronize(event)
                assert gpu.event_query(event)
                assert out == bytes([10 * index + turn] * 8)
                if turn % 3:
                    gpu.free(x)
                gpu.free(y)
            gpu.destroy_stream(streams[0])

        hammer(work, THREADS)
        assert gpu.live_alloc_count() == 0


@every_order
def test_one_stream_for_all_threads(order: Any, seed: int) -> None:
    """A wait returns when the caller's work has run, whoever has run it."""
    done: list[int] = []
    with opened(lambda *, add, **_: done.append(add), order=order, seed=seed) as gpu:
        x = filled(gpu)

        def work(index: int) -> None:
            for turn in range(10):
                number = 100 * index + turn
                launch(gpu, x=x, add=number)
                gpu.synchronize()
                assert number in done

        hammer(work, THREADS)
        assert len(done) == len(set(done)) == 10 * THREADS
        gpu.free(x)


@every_order
def test_a_ring_of_threads_that_wait_for_each_other(order: Any, seed: int) -> None:
    """Each thread's stream waits for the event that its neighbour last recorded, if any, and then for its own work."""
    done: list[int] = []
    with opened(lambda *, add, **_: done.append(add), order=order, seed=seed) as gpu:
        x, events = filled(gpu), [gpu.create_event() for _ in range(THREADS)]

        def work(index: int) -> None:
            stream = gpu.create_stream()
            for turn in range(10):
                gpu.stream_wait_event(stream, events[index - 1])
                launch(gpu, stream, x=x, add=turn)
                gpu.record_event(events[index], stream)
                if turn % 2:
                    gpu.event_synchronize(events[index - 2])
                gpu.synchronize(stream)

        hammer(work, THREADS)
        assert sorted(done) == sorted(list(range(10)) * THREADS)
        gpu.free(x)


@later_orders
def test_a_thread_may_enqueue_while_another_ones_work_runs(order: Any, seed: int) -> None:
    """And whoever waits for the work that runs waits until it has ended."""
    inside, leave = threading.Event(), threading.Event()
    done: list[int] = []

    def work(*, add: int, **_: Any) -> None:
        if add == 1:
            inside.set()
            assert leave.wait(PATIENCE)
        done.append(add)

    with opened(work, order=order, seed=seed) as gpu, ThreadPoolExecutor(3) as pool:
        x, event, other = filled(gpu), gpu.create_event(), gpu.create_stream()

        def first() -> None:
            launch(gpu, x=x, add=1)
            gpu.synchronize()

        running = pool.submit(first)
        assert inside.wait(PATIENCE)
        gpu.record_event(event)
        gpu.stream_wait_event(other, event)
        launch(gpu, other, x=x, add=2)
        assert not gpu.event_query(event)
        waits = [pool.submit(gpu.event_synchronize, event), pool.submit(gpu.synchronize, other)]
        assert done == []
        assert not any(one.done() for one in (running, *waits))
        leave.set()
        for one in (running, *waits):
            one.result(PATIENCE)
        assert done == [1, 2]
        gpu.free(x)


@later_orders
def test_enqueueing_beside_a_close_is_refused_or_runs(order: Any, seed: int) -> None:
    done: list[int] = []
    gpu = opened(lambda *, add, **_: done.append(add), order=order, seed=seed)
    x = filled(gpu)
    enqueued: list[int] = []

    def work(index: int) -> None:
        if not index:
            return gpu.close()
        for turn in range(50):
            try:
                launch(gpu, x=x, add=100 * index + turn)
            except RuntimeError:  # it is closed, or the block is gone
                return None
            enqueued.append(100 * index + turn)
        return None

    hammer(work, THREADS)
    assert set(enqueued) <= set(done)
