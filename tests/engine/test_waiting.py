# SPDX-License-Identifier: MIT OR Apache-2.0
"""The waiting queue: its order, and taking out."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from metrale.engine.errors import QueueFull
from metrale.engine.handle import RequestHandle
from metrale.engine.request import Request
from metrale.engine.waiting import AGING_SECONDS, WaitingQueue
from metrale.errors import InvalidInput
from tests.engine.queues import Maker, drain


@pytest.fixture
def make() -> Maker:
    return Maker()


# Order.


def test_first_come_first_served(make: Maker) -> None:
    """Also those of one moment: a coarse clock says nothing about their order."""
    queue, handles = WaitingQueue(100), [make() for _ in range(20)]
    for handle in handles:
        queue.put(handle)
    assert len(queue) == 20
    assert queue.peek() is handles[0]
    assert drain(queue) == handles
    assert (len(queue), queue.peek(), queue.pop()) == (0, None, None)


def test_the_time_of_submission_decides_not_that_of_arrival(make: Maker) -> None:
    queue = WaitingQueue(10)
    early = make()
    make.clock.now += 1
    late = make()
    queue.put(late)
    queue.put(early)
    assert drain(queue) == [early, late]


def test_larger_priorities_first(make: Maker) -> None:
    queue, handles = WaitingQueue(100), [make(priority) for priority in (0, 5, -3, 5, 1, 0)]
    for handle in handles:
        queue.put(handle)
    assert drain(queue) == [handles[index] for index in (1, 3, 4, 0, 5, 2)]


@pytest.mark.parametrize("aging", [0.5, AGING_SECONDS, 60.0])
@pytest.mark.parametrize("priority", [1, 7])
def test_a_steady_stream_of_high_priorities_holds_nobody_back_for_ever(
    make: Maker, aging: float, priority: int
) -> None:
    """One request of priority p comes and goes each tenth of a gain; the one of 0 is next after p gains."""
    queue, low = WaitingQueue(10, aging=aging), make()
    queue.put(low)
    ticks, taken = 0, None
    while taken is not low and ticks < 1000:
        ticks += 1
        make.clock.now += aging / 10
        queue.put(make(priority))
        taken = queue.pop()
    assert ticks in (10 * priority, 10 * priority + 1), "what comes at that very moment is a matter of rounding"


def test_the_order_is_that_of_the_effective_priorities(make: Maker) -> None:
    """Against the definition: at every moment, the largest priority plus waiting time over aging, then the oldest."""
    rng, queue, inside = random.Random(1), WaitingQueue(1000, aging=2.0), list[RequestHandle]()
    for _ in range(2000):
        make.clock.now += rng.choice([0.0, 0.25, 0.5])  # sums of these are exact, so ties are ties
        if inside and rng.random() < 0.45:

            def effective(handle: RequestHandle) -> float:
                return handle.request.priority + (make.clock.now - handle.submitted_at) / 2.0

            expected = max(inside, key=lambda handle: (effective(handle), -handle.request.prompt_tokens[0]))
            assert queue.pop() is expected
            inside.remove(expected)
        else:
            inside.append(make(rng.randrange(-2, 3)))
            queue.put(inside[-1])
    assert len(queue) == len(inside) > 50


@pytest.mark.parametrize("priority", [(1 << 31) - 1, -(1 << 31) + 1])
def test_the_largest_priorities_keep_their_order_of_arrival(make: Maker, priority: int) -> None:
    queue, handles = WaitingQueue(100), []
    for _ in range(20):
        make.clock.now += 1e-3
        handles.append(make(priority))
        queue.put(handles[-1])
    assert drain(queue) == handles


def test_what_comes_back_stands_where_it_stood(make: Maker) -> None:
    """Beyond the bound, and when the queue is closed: the worker must not wait for itself."""
    queue, handles = WaitingQueue(4), [make(), make(1), make(), make()]
    for handle in handles:
        queue.put(handle)
    first, second = queue.pop(), queue.pop()
    assert (first, second) == (handles[1], handles[0])
    queue.put(make())
    queue.put(make())
    queue.close()
    for taken in (second, first):
        assert taken is not None
        queue.requeue(taken)
    assert len(queue) == 6
    assert drain(queue)[:4] == [handles[1], handles[0], handles[2], handles[3]]


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_coming_back_again_and_again(make: Maker, timeout: float | None) -> None:
    """A place that is taken twice leaves dead entries with equal keys, which are not to be compared any further."""
    queue, handles = WaitingQueue(10), [make(timeout=timeout) for _ in range(3)]
    for handle in handles:
        queue.put(handle)
    for round_ in range(50):
        handle = handles[round_ % 3]
        assert queue.remove(handle)
        queue.requeue(handle)
        popped = queue.pop()
        assert popped is not None
        queue.requeue(popped)
    assert drain(queue) == handles


# Taking out.


def test_remove(make: Maker) -> None:
    queue, handles = WaitingQueue(10), [make() for _ in range(4)]
    for handle in handles:
        queue.put(handle)
    assert queue.remove(handles[0])
    assert queue.remove(handles[2])
    assert not queue.remove(handles[2])
    assert not queue.remove(make())
    assert len(queue) == 2
    assert drain(queue) == [handles[1], handles[3]]
    assert not queue.remove(handles[1])


def test_expired(make: Maker) -> None:
    queue = WaitingQueue(10)
    never, late, soon, high = make(), make(timeout=9.0), make(timeout=3.0), make(priority=5, timeout=3.0)
    for handle in (never, late, soon, high):
        queue.put(handle)
    now = make.clock.now
    assert queue.expired(now + 2.99) == []
    assert set(queue.expired(now + 3.0)) == {soon, high}, "a deadline that is now has come"
    assert queue.expired(now + 3.0) == []
    assert len(queue) == 2
    assert queue.pop() is never
    assert queue.pop() is late
    assert queue.expired(now + 100) == [], "what was taken is the worker's business"
    queue.requeue(late)
    assert queue.expired(now + 100) == [late]
    assert len(queue) == 0


def test_what_left_is_not_kept(make: Maker) -> None:
    """Neither the entries, for requests with deadlines far away, nor the handles themselves."""
    queue = WaitingQueue(100)
    kept = make(timeout=1e6)
    queue.put(kept)
    gone = []
    gc.disable()
    try:
        for _ in range(1000):
            handle = make(timeout=1e6)
            gone.append(weakref.ref(handle))
            queue.put(handle)
            queue.remove(handle)
        del handle
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()
    for heap in (queue._waiting, queue._deadlines, queue._blocked):
        assert len(heap._entries) < 50
    assert drain(queue) == [kept]


@pytest.mark.more
def test_a_hundred_thousand_requests(make: Maker) -> None:
    """Each put and pop costs some microseconds; anything linear in the length would take minutes here."""
    rng, queue = random.Random(2), WaitingQueue(100_000)
    handles = [make(rng.randrange(8), 1e6) for _ in range(1000)]
    request = Request([3], eos_ids=frozenset({2}), timeout=1e6)
    handles += [RequestHandle(request, clock=make.clock) for _ in range(99_000)]
    for handle in handles:
        queue.put(handle)
    with pytest.raises(QueueFull):
        queue.put(make(), block=False)
    for handle in handles[:1000]:
        queue.remove(handle)
        queue.expired(make.clock.now)
        queue.put(make(), block=False)
    assert len(drain(queue)) == 100_000


@pytest.mark.parametrize(
    ("bound", "aging"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("inf")), (1, float("nan"))]
)
def test_wrong_arguments(bound: int, aging: float) -> None:
    with pytest.raises(InvalidInput):
        WaitingQueue(bound, aging=aging)
