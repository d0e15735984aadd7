# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles: tokens to threads and tasks as they come, results, cancellation at every moment, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metrale.engine.handle import RequestHandle
from metrale.engine.request import FinishReason, Generated, Request
from metrale.errors import SequenceError
from tests.engine.clock import FakeClock
from tests.engine.patience import PATIENCE, until

EOS = 2


def make(*, clock: Callable[[], float] | None = None, **options: Any) -> RequestHandle:
    on_cancel = options.pop("on_cancel", None)
    request = Request([5], **{"eos_ids": frozenset({EOS}), "max_new_tokens": 100, **options})
    return RequestHandle(request, clock=clock or FakeClock(), on_cancel=on_cancel)


def run(handle: RequestHandle, tokens: list[int], reason: FinishReason = "eos") -> None:
    """Do as the engine does."""
    for token in tokens:
        assert handle.push(token) is None
    handle.finish(reason)


def waiters(handle: RequestHandle) -> int:
    return len(handle._token_waiters) + len(handle._end_waiters)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# What a result is made of.


def test_tokens_and_result() -> None:
    handle = make(logprobs=True)
    assert not handle.done
    assert handle.finish_reason is None
    assert handle.push(7, -0.5) is None
    assert handle.push(8, -0.25) is None
    assert handle.push(EOS, -2.0) == "eos"
    assert not handle.done, "the engine has the last word"
    assert handle.finish("eos")
    assert handle.done
    assert handle.finish_reason == "eos"
    assert handle.result() == Generated([7, 8], "eos", -2.75, [-0.5, -0.25, -2.0], 4)
    assert list(handle) == [7, 8]


def test_without_logprobs_there_is_none() -> None:
    handle = make()
    handle.push(7, -0.5)
    handle.finish("length")
    result = handle.result()
    assert math.isnan(result.logprob)
    assert result.logprobs is None


@pytest.mark.parametrize("most", [2, 3, 7])
def test_the_length_counts_the_language_token(most: int) -> None:
    handle = make(max_new_tokens=most)
    assert [handle.push(7) for _ in range(most - 1)] == [None] * (most - 2) + ["length"]
    handle.finish("length")
    assert handle.result().length == handle.length == most
    assert handle.result().ids == [7] * (most - 1)


def test_eos_at_the_limit_is_eos() -> None:
    handle = make(max_new_tokens=3)
    assert handle.push(7) is None
    assert handle.push(EOS) == "eos"
    handle.finish("eos")
    assert (handle.result().ids, handle.result().length) == ([7], 3)


def test_results_are_copies() -> None:
    handle = make(logprobs=True)
    run(handle, [7])
    first = handle.result()
    first.ids.append(9)
    assert handle.result().ids == [7]


def test_an_error_comes_with_the_tokens_before_it() -> None:
    handle = make()
    handle.push(7)
    handle.finish("error", "the device is lost")
    result = handle.result()
    assert (result.ids, result.finish_reason, result.error) == ([7], "error", "the device is lost")
    assert list(handle) == [7]


def test_the_first_end_counts() -> None:
    handle = make()
    assert handle.finish("timeout")
    assert not handle.finish("error", "later")
    assert (handle.finish_reason, handle.result().error) == ("timeout", None)
    with pytest.raises(SequenceError, match="timeout"):
        handle.push(7)
    assert handle.result().ids == []


def test_times_are_the_clocks() -> None:
    clock = FakeClock(50.0)
    handle = make(clock=clock, timeout=2.5)
    assert (handle.submitted_at, handle.deadline, handle.first_token_at) == (50.0, 52.5, None)
    clock.now = 51.0
    handle.push(7)
    clock.now = 52.0
    handle.push(8)
    handle.finish("length")
    assert (handle.first_token_at, handle.finished_at) == (51.0, 52.0)
    assert make(clock=clock).deadline is None


# Threads.


def test_tokens_come_one_by_one_to_a_waiting_thread() -> None:
    handle, seen = make(), []
    turn = threading.Semaphore(0)

    def consume() -> None:
        for token in handle:
            seen.append(token)
            turn.release()

    thread = threading.Thread(target=consume)
    thread.start()
    for token in (7, 8, 9):
        until(lambda: waiters(handle) == 1)
        handle.push(token)
        assert turn.acquire(timeout=PATIENCE)
        assert seen[-1] == token
    until(lambda: waiters(handle) == 1)
    handle.finish("length")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert seen == [7, 8, 9]


def test_every_iterator_sees_every_token_in_order(eager_switching: None) -> None:
    """Thirty-two threads, half of them late, beside a producer that does not wait for any."""
    handle, tokens = make(max_new_tokens=10**6), [3 + i % 1000 for i in range(3000)]
    halfway = threading.Event()

    def consume(number: int) -> list[int]:
        if number % 2:
            assert halfway.wait(PATIENCE)
        return list(handle)

    with ThreadPoolExecutor(34) as pool:
        lists = [pool.submit(consume, number) for number in range(32)]
        result = pool.submit(handle.result, PATIENCE)
        for index, token in enumerate(tokens):
            assert handle.push(token) is None
            if index == len(tokens) // 2:
                halfway.set()
        handle.finish("length")
        assert all(future.result(PATIENCE) == tokens for future in lists)
        assert result.result().ids == tokens
    assert waiters(handle) == 0


def test_an_iterator_that_ended_stays_ended() -> None:
    handle = make()
    run(handle, [7])
    iterator = iter(handle)
    assert (next(iterator), next(iterator, None), next(iterator, None)) == (7, None, None)
    assert list(handle) == [7], "another one begins at the beginning"


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error"])
def test_iteration_ends_however_the_request_does(reason: FinishReason) -> None:
    handle = make()
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(list, handle)
        handle.push(7)
        until(lambda: waiters(handle) == 1)
        handle.finish(reason, "why" if reason == "error" else None)
        assert tokens.result(PATIENCE) == [7]
    assert handle.result().finish_reason == reason


def test_result_waits_only_so_long() -> None:
    handle = make()
    for timeout in (0, -1, 0.001):
        with pytest.raises(TimeoutError, match="has not ended"):
            handle.result(timeout)
    assert waiters(handle) == 0, "waits that ended early must not add up"
    handle.finish("length")
    assert handle.result(0).finish_reason == "length"


def test_a_timeout_beyond_what_the_system_can_wait_is_no_error() -> None:
    handle = make()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(handle.result, 1e30)
        until(lambda: waiters(handle) == 1)
        handle.finish("length")
        assert result.result(PATIENCE).finish_reason == "length"


def test_tokens_do_not_wake_who_waits_for_the_end() -> None:
    handle = make()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(handle.result)
        until(lambda: waiters(handle) == 1)
        [waiter] = handle._end_waiters
        handle.push(7)
        assert handle._end_waiters == [waiter]
        assert not result.done()
        handle.finish("length")
        result.result(PATIENCE)


class Racing(RequestHandle):
    """A handle on which things happen just after a consumer has looked, and before it waits."""

    def __init__(self, request: Request, meanwhile: Callable[[RequestHandle], object]) -> None:
        super().__init__(request)
        self.meanwhile: Callable[[RequestHandle], object] | None = meanwhile

    def _from(self, position: int) -> Any:
        found = super()._from(position)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile(self)
        return found


@pytest.mark.parametrize(("tokens", "ends"), [([], True), ([7], False), ([7], True), ([7, 8], True)])
def test_what_comes_between_the_look_and_the_wait_is_not_missed(tokens: list[int], ends: bool) -> None:
    def meanwhile(handle: RequestHandle) -> None:
        for token in tokens:
            handle.push(token)
        if ends:
            handle.finish("eos")

    async def read(handle: RequestHandle) -> list[int]:
        reader = aiter(handle)
        found = [await asyncio.wait_for(anext(reader), PATIENCE) for _ in tokens]
        if ends:
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(reader), PATIENCE)
        return found

    request = Request([5], eos_ids=frozenset({EOS}))
    assert asyncio.run(read(Racing(request, meanwhile))) == tokens
    iterator = iter(Racing(request, meanwhile))
    assert [next(iterator) for _ in tokens] == tokens
    if ends:
        assert next(iterator, None) is None


# Cancellation.


def test_cancel_asks_once_and_never_ends_the_request_itself() -> None:
    asked: list[RequestHandle] = []
    handle = make(on_cancel=asked.append)
    assert not handle.cancel_requested
    assert handle.cancel()
    assert handle.cancel(), "it still runs"
    assert handle.cancel_requested
    assert asked == [handle]
    assert not handle.done
    assert handle.push(7) is None, "a token that was under way"
    handle.finish("cancelled")
    assert not handle.cancel()
    assert handle.result().ids == [7]


@pytest.mark.parametrize("moment", ["before", "first", "between", "last", "after"])
def test_cancel_at_every_moment(moment: str) -> None:
    """An engine that looks at the flag before each token ends with what had come by then."""
    handle = make(max_new_tokens=4)
    before = {"before": 0, "first": 1, "between": 2, "last": 3, "after": 3}[moment]
    for index in range(3):
        if index == before:
            assert handle.cancel()
        if handle.cancel_requested:
            handle.finish("cancelled")
            break
        reason = handle.push(7)
        if reason is not None:
            if moment == "last":
                assert handle.cancel()
            handle.finish(reason)
    assert handle.cancel() is False
    assert handle.result().ids == [7] * before
    assert handle.finish_reason == ("length" if before == 3 else "cancelled")


def test_cancel_from_on_token() -> None:
    """The callback runs on the engine's thread, which must not wait for itself."""

    def cancel(token: int) -> None:
        handle.cancel()

    handle = make(on_token=cancel)
    handle.push(7)
    assert handle.call_on_token(7) is None
    assert handle.cancel_requested


def test_cancel_while_this_thread_holds_the_lock() -> None:
    """As in a signal handler that interrupts an iteration."""
    handle = make()
    with handle._lock:
        assert handle.cancel()


def test_cancel_against_finish(eager_switching: None) -> None:
    """However they meet: the callback runs at most once, and True is only said of a request that was not done."""
    for _ in range(200):
        asked: list[RequestHandle] = []
        handle = make(on_cancel=asked.append)
        barrier = threading.Barrier(3)

        def cancel(handle: RequestHandle = handle, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return handle.cancel()

        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(cancel) for _ in range(2)]
            barrier.wait()
            handle.finish("length")
            told = [answer.result() for answer in answers]
        assert len(asked) <= 2
        assert not asked or any(told)
        assert handle.finish_reason == "length"
        assert handle.cancel() is False


# Callbacks.


def test_on_token_gets_what_the_consumer_gets() -> None:
    seen: list[int] = []
    handle = make(on_token=seen.append)
    for token in (7, 8, EOS):
        handle.push(token)
        assert handle.call_on_token(token) is None
    assert seen == [7, 8]
    assert make().call_on_token(7) is None


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit("no"), KeyboardInterrupt("no"), asyncio.CancelledError("no")]
)
def test_what_on_token_raises_becomes_a_text(error: BaseException) -> None:
    def raises(token: int) -> None:
        raise error

    assert make(on_token=raises).call_on_token(7) == f"on_token raised {type(error).__name__}: no"


def test_done_callbacks_are_called_once_and_in_order() -> None:
    handle, calls = make(), []
    handle.add_done_callback(lambda one: calls.append(("first", one.done, threading.get_ident())))
    handle.add_done_callback(lambda one: calls.append(("second", one.done, threading.get_ident())))
    assert calls == []
    thread = threading.Thread(target=handle.finish, args=("eos",))
    thread.start()
    there = thread.ident
    thread.join(PATIENCE)
    assert calls == [("first", True, there), ("second", True, there)]
    handle.add_done_callback(lambda one: calls.append(("late", one.done, threading.get_ident())))
    assert calls[2:] == [("late", True, threading.get_ident())]
    handle.finish("error")
    assert len(calls) == 3


def test_a_done_callback_that_raises_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    handle = make()
    calls: list[RequestHandle] = []

    def raises(one: RequestHandle) -> None:
        raise SystemExit("no")

    handle.add_done_callback(raises)
    handle.add_done_callback(calls.append)
    with caplog.at_level(logging.ERROR, logger="metrale.engine.handle"):
        assert handle.finish("eos")
    assert calls == [handle]
    [record] = caplog.records
    assert "done callback" in record.getMessage()
    assert record.exc_info is not None


def test_a_done_callback_may_use_the_handle() -> None:
    handle = make()
    results: list[Any] = []

    def look(one: RequestHandle) -> None:
        results.extend([one.result(0).ids, list(one), one.cancel()])
        one.add_done_callback(lambda again: results.append(again.done))

    handle.add_done_callback(look)
    run(handle, [7])
    assert results == [[7], [7], False, True]


# Event loops.


def test_async_tokens_and_result() -> None:
    handle = make()

    async def main() -> tuple[list[int], Generated, Generated]:
        loop = asyncio.get_running_loop()
        produced = loop.run_in_executor(None, run, handle, [7, 8, 9])
        tokens = [token async for token in handle]
        await produced
        return tokens, await handle, await handle.aresult()

    tokens, one, other = asyncio.run(main())
    assert tokens == one.ids == other.ids == [7, 8, 9]


def test_a_thousand_tasks_need_no_thread() -> None:
    handles = [make() for _ in range(500)]

    async def consume(handle: RequestHandle) -> tuple[list[int], list[int]]:
        return [token async for token in handle], (await handle).ids

    def produce() -> None:
        for index, handle in enumerate(handles):
            run(handle, [7, index + 3])

    async def main() -> list[tuple[list[int], list[int]]]:
        threads = threading.active_count()
        tasks = [asyncio.create_task(consume(handle)) for handle in handles]
        await asyncio.sleep(0)
        assert all(waiters(handle) == 1 for handle in handles)
        assert threading.active_count() == threads
        producer = threading.Thread(target=produce)
        producer.start()
        results = await asyncio.gather(*tasks)
        producer.join(PATIENCE)
        return results

    assert asyncio.run(main()) == [([7, index + 3], [7, index + 3]) for index in range(500)]


def test_several_waiters_of_each_kind_in_two_loops_and_threads(eager_switching: None) -> None:
    handle, tokens = make(max_new_tokens=10**6), list(range(3, 503))

    async def consume() -> list[int]:
        return [token async for token in handle]

    async def main() -> tuple[Any, ...]:
        return await asyncio.gather(consume(), consume(), handle.aresult(), consume(), handle.aresult())

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(asyncio.run, main()) for _ in range(2)]
        threads = [pool.submit(list, handle) for _ in range(2)]
        until(lambda: waiters(handle) == 12)
        run(handle, tokens)
        for loop in loops:
            one, two, result, three, other = loop.result(PATIENCE)
            assert one == two == three == result.ids == other.ids == tokens
        assert all(thread.result(PATIENCE) == tokens for thread in threads)
    assert waiters(handle) == 0


def test_a_cancelled_task_leaves_no_waiter_and_no_token_is_lost() -> None:
    handle = make()
    complaints: list[dict[str, Any]] = []

    async def main() -> list[int]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        tokens = aiter(handle)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(tokens), 0.001)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle.aresult(), 0.001)
        assert waiters(handle) == 0
        assert not handle.cancel_requested, "whoever stops waiting has not cancelled the request"
        task = asyncio.ensure_future(anext(tokens))
        await asyncio.sleep(0)
        handle.push(7)
        task.cancel()  # after the token came, before the task saw it
        with pytest.raises(asyncio.CancelledError):
            await task
        run(handle, [8])
        return [token async for token in tokens]

    assert asyncio.run(main()) == [7, 8]
    assert complaints == [], "the wake-up came to a task that was gone"


def test_a_handle_outlives_the_loop_that_waited_for_it() -> None:
    handle = make()

    loop = asyncio.new_event_loop()
    coroutine = handle._wait_in_loop(0)
    loop.call_soon(coroutine.send, None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert waiters(handle) == 1
    loop.close()
    handle.push(7)
    assert handle.finish("eos")
    coroutine.close()
    assert handle.result().ids == [7]


def test_an_abandoned_wait_is_closed_while_the_lock_is_held() -> None:
    """The garbage collector closes coroutines wherever it happens to run, also inside the handle's own lock."""
    handle = make()

    async def main() -> None:
        coroutine = handle._wait_in_loop(None)
        coroutine.send(None)
        with handle._lock:
            coroutine.close()
        handle.finish("eos")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert waiters(handle) == 0


def test_cancel_from_the_event_loop_and_from_a_task_of_it() -> None:
    asked = threading.Event()
    handle = make(on_cancel=lambda one: asked.set())

    def engine() -> None:
        handle.push(7)
        assert asked.wait(PATIENCE)
        handle.finish("cancelled")

    async def main() -> list[int]:
        produced = asyncio.get_running_loop().run_in_executor(None, engine)
        tokens = []
        async for token in handle:
            tokens.append(token)
            handle.cancel()
        await produced
        return tokens

    assert asyncio.run(main()) == [7]
    assert handle.finish_reason == "cancelled"


def test_a_producer_in_the_loop_itself() -> None:
    handle = make()

    async def main() -> list[int]:
        async def produce() -> None:
            for token in (7, 8):
                handle.push(token)
                await asyncio.sleep(0)
            handle.finish("eos")

        task = asyncio.create_task(produce())
        tokens = [token async for token in handle]
        await task
        return tokens

    assert asyncio.run(main()) == [7, 8]


def test_breaking_out_of_async_for_leaves_nothing_open() -> None:
    handle = make()
    handle.push(7)

    async def main() -> int:
        async for token in handle:
            return token
        raise AssertionError

    assert asyncio.run(main()) == 7
    gc.collect()  # an asynchronous generator would complain here


# What is left.


class Engine:
    """Stands for the engine: something that the handle must not keep."""

    def wake(self, handle: RequestHandle) -> None: ...


def test_a_dropped_handle_goes_at_once() -> None:
    """No cycles: the reference count alone frees it, before and after its end."""
    gc.disable()
    try:
        engine = Engine()
        handle = make(on_cancel=engine.wake)
        ended = make(on_cancel=engine.wake)
        ended.add_done_callback(lambda one: None)
        run(ended, [7])
        assert list(ended) == asyncio.run(_all(ended)) == [7]
        gone = [weakref.ref(handle), weakref.ref(ended)]
        del handle, ended
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


async def _all(handle: RequestHandle) -> list[int]:
    await handle
    return [token async for token in handle]


def test_an_ended_handle_does_not_hold_the_engine() -> None:
    engine = Engine()
    handle = make(on_cancel=engine.wake)
    handle.finish("eos")
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
    assert not handle.cancel()


def test_a_handle_is_small() -> None:
    handle = make(max_new_tokens=10**6)
    for token in range(3, 10_003):
        handle.push(token)
    # Four bytes a token, and what an array grows ahead.
    assert sys.getsizeof(handle._tokens) < 5 * 10_000
    assert len(handle._logprobs) == 0


def test_a_handle_shows_where_it_is() -> None:
    handle = make()
    handle.push(7)
    assert repr(handle) == "<RequestHandle not done, 1 tokens>"
    handle.finish("eos")
    assert repr(handle) == "<RequestHandle eos, 1 tokens>"
