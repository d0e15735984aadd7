# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles in event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metrale.engine.handle import RequestHandle
from metrale.engine.request import Generated
from tests.engine.handles import make, run, waiters
from tests.engine.patience import PATIENCE, until
from tests.hammering import eager_switching


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


@eager_switching()
def test_several_waiters_of_each_kind_in_two_loops_and_threads() -> None:
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
