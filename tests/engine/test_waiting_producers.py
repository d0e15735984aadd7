# SPDX-License-Identifier: MIT OR Apache-2.0
"""The waiting queue's bound: who waits for room, in threads and event loops, and how that ends."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from metrale.engine.errors import EngineClosed, EngineError, QueueFull
from metrale.engine.handle import RequestHandle
from metrale.engine.waiting import WaitingQueue
from metrale.errors import MetraleError
from tests.engine.patience import PATIENCE, until
from tests.engine.queues import Maker, drain, full
from tests.hammering import eager_switching


@pytest.fixture
def make() -> Maker:
    return Maker()


# The bound.


def test_no_room_and_no_wish_to_wait(make: Maker) -> None:
    queue = full(make, 3)
    with pytest.raises(QueueFull, match="the queue is full: 3 of 3 wait"):
        queue.put(make(), block=False)
    for timeout in (0, -1, 0.001):
        with pytest.raises(QueueFull, match="none left in time"):
            queue.put(make(), timeout=timeout)
    assert (len(queue), queue.blocked, len(queue._producers)) == (3, 0, 0)
    queue.pop()
    queue.put(make(), block=False)
    assert issubclass(QueueFull, EngineError)
    assert issubclass(EngineClosed, EngineError)
    assert issubclass(EngineError, MetraleError)


@pytest.mark.parametrize("take", ["pop", "remove", "expired"])
def test_a_blocked_producer_comes_in_when_one_leaves(make: Maker, take: str) -> None:
    queue = WaitingQueue(1)
    there, handle = make(timeout=1.0), make()
    queue.put(there)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(queue.put, handle)
        until(lambda: queue.blocked == 1)
        assert len(queue) == 1
        if take == "pop":
            assert queue.pop() is there
        elif take == "remove":
            assert queue.remove(there)
        else:
            assert queue.expired(make.clock.now + 2) == [there]
        put.result(PATIENCE)
    assert (len(queue), queue.blocked) == (1, 0)
    assert drain(queue) == [handle]


def test_blocked_producers_come_in_by_the_queues_own_order(make: Maker) -> None:
    """And a newcomer does not slip past them."""
    queue = full(make)
    handles = [make(priority) for priority in (0, 3, 0, 3)]
    with ThreadPoolExecutor(4) as pool:
        puts = []
        for count, handle in enumerate(handles, 1):
            puts.append(pool.submit(queue.put, handle))
            until(lambda count=count: queue.blocked == count)  # type: ignore[misc]
        queue.pop()
        with pytest.raises(QueueFull):
            queue.put(make(9), block=False)
        assert drain(queue) == [handles[1], handles[3], handles[0], handles[2]]
        for put in puts:
            put.result(PATIENCE)


def test_a_request_that_comes_back_keeps_producers_out(make: Maker) -> None:
    queue = full(make, 2)
    taken = queue.pop()
    assert taken is not None
    queue.put(make())
    queue.requeue(taken)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(queue.put, make())
        until(lambda: queue.blocked == 1)
        queue.pop()
        assert (len(queue), queue.blocked) == (2, 1)
        queue.pop()
        put.result(PATIENCE)
    assert len(queue) == 2


def test_arrivals_are_announced(make: Maker) -> None:
    calls: list[int] = []
    queue = WaitingQueue(1, on_arrival=lambda: calls.append(len(queue)))
    queue.put(make())
    assert calls == [1]
    with pytest.raises(QueueFull):
        queue.put(make(), block=False)
    assert calls == [1]
    queue.pop()
    queue.put(make())
    assert calls == [1, 1]


# Blocked producers whose requests end before they come in.


def test_the_deadline_of_a_blocked_request(make: Maker) -> None:
    """Its producer waits no longer than the request may."""
    queue, handle = full(make), make(timeout=3.0)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(queue.put, handle)
        until(lambda: queue.blocked == 1)
        assert queue.expired(make.clock.now + 2) == []
        assert queue.expired(make.clock.now + 3) == [handle]
        put.result(PATIENCE)
    assert (len(queue), queue.blocked, len(queue._producers)) == (1, 0, 0)
    assert handle not in drain(queue)


def test_a_deadline_counts_on_when_a_blocked_request_comes_in(make: Maker) -> None:
    queue, handle = full(make), make(timeout=3.0)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(queue.put, handle)
        until(lambda: queue.blocked == 1)
        queue.pop()
        put.result(PATIENCE)
    assert queue.peek() is handle
    assert queue.expired(make.clock.now + 2) == []
    assert queue.expired(make.clock.now + 3) == [handle]
    assert len(queue) == 0


def test_a_blocked_request_is_removed(make: Maker) -> None:
    queue, handle = full(make), make(timeout=3.0)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(queue.put, handle)
        until(lambda: queue.blocked == 1)
        assert queue.remove(handle)
        put.result(PATIENCE)
    assert (len(queue), queue.blocked, len(queue._producers)) == (1, 0, 0)
    assert queue.expired(make.clock.now + 3) == []


# The end.


def test_a_closed_queue_takes_nothing_and_gives_what_it_has(make: Maker) -> None:
    queue, handle = WaitingQueue(3), make()
    queue.put(handle)
    assert not queue.closed
    queue.close()
    queue.close()
    assert queue.closed
    for block, timeout in ((True, None), (False, None), (True, 1.0)):
        with pytest.raises(EngineClosed):
            queue.put(make(), block=block, timeout=timeout)
    with pytest.raises(EngineClosed):
        asyncio.run(queue.aput(make()))
    assert drain(queue) == [handle]


def test_closing_wakes_every_blocked_producer(make: Maker) -> None:
    queue = full(make)
    handles = [make(timeout=5.0) for _ in range(16)]

    async def two(first: RequestHandle, second: RequestHandle) -> tuple[Any, ...]:
        return await asyncio.gather(queue.aput(first), queue.aput(second), return_exceptions=True)

    with ThreadPoolExecutor(16) as pool:
        puts: list[Future[Any]] = [pool.submit(queue.put, handle) for handle in handles[:12]]
        loops = [pool.submit(asyncio.run, two(*handles[12:14])), pool.submit(asyncio.run, two(*handles[14:]))]
        until(lambda: queue.blocked == 16)
        queue.close()
        for put in puts:
            with pytest.raises(EngineClosed, match="while the request waited"):
                put.result(PATIENCE)
        for loop in loops:
            assert [type(error) for error in loop.result(PATIENCE)] == [EngineClosed, EngineClosed]
    assert (len(queue), queue.blocked, len(queue._producers)) == (1, 0, 0)
    assert queue.expired(make.clock.now + 10) == []


# Event loops.


def test_thousands_of_blocked_tasks_need_no_thread(make: Maker) -> None:
    queue, handles = WaitingQueue(1), [make() for _ in range(2000)]

    async def main() -> list[RequestHandle]:
        threads = threading.active_count()
        tasks = [asyncio.create_task(queue.aput(handle)) for handle in handles]
        await asyncio.sleep(0)
        assert (len(queue), queue.blocked) == (1, 1999)
        assert threading.active_count() == threads
        taken = await asyncio.get_running_loop().run_in_executor(None, drain, queue)
        await asyncio.gather(*tasks)
        return taken

    assert asyncio.run(main()) == handles


def test_a_blocked_task_does_not_block_the_loop(make: Maker) -> None:
    queue, handle = full(make), make()

    async def main() -> None:
        task = asyncio.create_task(queue.aput(handle))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        queue.pop()
        await task

    asyncio.run(main())
    assert drain(queue) == [handle]


def test_a_task_cancelled_while_it_is_blocked_leaves_nothing(make: Maker) -> None:
    queue, handle = full(make), make(timeout=5.0)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.aput(handle), 0.001)

    asyncio.run(main())
    assert (len(queue), queue.blocked, len(queue._producers)) == (1, 0, 0)
    assert not handle.cancel_requested
    assert handle not in drain(queue)
    assert queue.expired(make.clock.now + 10) == []


def test_a_task_cancelled_just_after_it_was_let_in_cancels_its_request(make: Maker) -> None:
    """Nobody will ever hold that handle, so nobody else could."""
    queue, handle = full(make), make()

    async def main() -> None:
        task = asyncio.create_task(queue.aput(handle))
        await asyncio.sleep(0)
        queue.pop()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert handle.cancel_requested
    assert drain(queue) == [handle], "the worker finds it, and ends it"


def test_an_abandoned_put_is_closed_while_the_lock_is_held(make: Maker) -> None:
    """The garbage collector closes coroutines wherever it happens to run, also inside the queue's own lock."""
    queue, handle = full(make), make()

    async def main() -> None:
        put = queue.aput(handle)
        put.send(None)
        with queue._lock:
            put.close()

    asyncio.run(main())
    assert handle.cancel_requested
    assert queue.remove(handle), "as the worker does with what is cancelled; the loop that is closed by now is no harm"
    assert (len(queue), queue.blocked) == (1, 0)


# Many threads.


@eager_switching()
def test_many_producers_and_one_consumer(make: Maker) -> None:
    """Every handle that came in goes out exactly once; every put ends, one way or another."""
    queue, rng = WaitingQueue(3), random.Random(3)
    plans = [[(rng.randrange(3), rng.random()) for _ in range(60)] for _ in range(8)]
    entered: list[RequestHandle] = []
    refused: list[RequestHandle] = []

    def produce(plan: list[tuple[int, float]]) -> None:
        for priority, chance in plan:
            handle = make(priority)
            try:
                if chance < 0.1:
                    queue.put(handle, block=False)
                elif chance < 0.2:
                    queue.put(handle, timeout=0.0001)
                else:
                    queue.put(handle)
            except QueueFull:
                refused.append(handle)
            else:
                entered.append(handle)

    async def produce_all(plan: list[tuple[int, float]]) -> None:
        async def one(priority: int, chance: float) -> None:
            handle = make(priority)
            try:
                await asyncio.wait_for(queue.aput(handle), 0.0005 if chance < 0.2 else None)
            except TimeoutError:
                refused.append(handle)
            else:
                entered.append(handle)

        await asyncio.gather(*(one(*step) for step in plan))

    taken: list[RequestHandle] = []
    with ThreadPoolExecutor(8) as pool:
        producers = [pool.submit(produce, plan) for plan in plans[:5]]
        producers += [pool.submit(asyncio.run, produce_all(plan)) for plan in plans[5:]]
        while not all(producer.done() for producer in producers):
            handle = queue.pop()
            if handle is not None:
                taken.append(handle)
                if rng.random() < 0.1:
                    queue.requeue(taken.pop())
        for producer in producers:
            producer.result()
    taken += drain(queue)
    cancelled = {handle for handle in taken if handle.cancel_requested}
    assert len(entered) + len(refused) == 8 * 60
    assert len(taken) == len(set(taken))
    assert set(taken) - cancelled == set(entered)
    assert cancelled <= set(refused)
    assert (len(queue), queue.blocked, len(queue._producers)) == (0, 0, 0)


@eager_switching()
def test_closing_amid_many_producers(make: Maker) -> None:
    for _ in range(20):
        queue = WaitingQueue(2)

        def produce(queue: WaitingQueue = queue) -> int:
            for count in range(10_000):
                try:
                    queue.put(make())
                except EngineClosed:
                    return count
            raise AssertionError("it was never closed")

        with ThreadPoolExecutor(6) as pool:
            producers = [pool.submit(produce) for _ in range(6)]
            taken = 0
            while taken < 20:
                taken += queue.pop() is not None
            queue.close()
            entered = sum(producer.result(PATIENCE) for producer in producers)
        assert taken + len(drain(queue)) == entered
