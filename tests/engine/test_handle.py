# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles: what a result is made of, and tokens to threads as they come."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metrale.engine.handle import RequestHandle
from metrale.engine.request import FinishReason, Generated, Request
from metrale.engine.wakeup import ThreadWakeup
from metrale.errors import SequenceError
from metrale.model import BeamParams, Hypothesis
from tests.engine.clock import FakeClock
from tests.engine.handles import EOS, make, run, waiters
from tests.engine.patience import PATIENCE, until
from tests.hammering import eager_switching

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
    assert handle.result() == Generated([7, 8], "eos", -2.75, [-0.5, -0.25, -2.0], 4, -2.75 / 4, eos_id=EOS)
    assert list(handle) == [7, 8]


@pytest.mark.parametrize(("last", "reason"), [(EOS, "eos"), (9, "length")])
@pytest.mark.parametrize("prefix", [(), (4, 5)])
def test_what_a_search_found(last: int, reason: FinishReason, prefix: tuple[int, ...]) -> None:
    """The best is the result; what was given, the language first, is not part of it."""
    handle = make(beams=BeamParams(2), prefix_tokens=prefix, logprobs=True)
    given = [80, *prefix]
    best = Hypothesis([*given, 7, 8, last], -0.5, [*(0.0 for _ in given), -1.0, -0.5, -0.25])
    other = Hypothesis([*given, EOS], -0.75, [*(0.0 for _ in given), -2.0])
    assert handle.push_hypotheses([best, other]) == reason
    assert not handle.done, "the engine has the last word"
    assert handle.first_token_at is not None
    handle.finish(reason)
    tokens = [7, 8] if reason == "eos" else [7, 8, last]
    count = 3 if prefix else 4
    ended = EOS if reason == "eos" else None
    expected = Generated(tokens, reason, -1.75, [-1.0, -0.5, -0.25], count, -0.5, [best, other], eos_id=ended)
    assert handle.result() == expected
    assert list(handle) == handle.tokens == tokens
    with pytest.raises(SequenceError, match="push_hypotheses: the request has ended"):
        handle.push_hypotheses([best])


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
    for token, give in ((7, handle.push), (8, handle.add), (9, handle.push)):
        until(lambda: waiters(handle) == 1)
        give(token)
        assert turn.acquire(timeout=PATIENCE)
        assert seen[-1] == token
    until(lambda: waiters(handle) == 1)
    handle.finish("length")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert seen == [7, 8, 9]


def test_who_comes_to_wait_while_a_token_is_added_sees_it() -> None:
    """`add` looks for waiters without the lock: the token is there before it looks, and the waiter before it does."""
    handle = make()

    class Late(list[Any]):
        def append(self, waiter: Any) -> None:
            super().append(waiter)
            handle._tokens.append(7)  # by somebody who had looked before

    handle._token_waiters = Late()
    assert not handle._register(ThreadWakeup(), 0)
    assert waiters(handle) == 0
    assert handle._register(ThreadWakeup(), 2)


@eager_switching()
def test_every_iterator_sees_every_token_in_order() -> None:
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
            assert (handle.add if index % 3 else handle.push)(token) is None
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

    request = Request([5], max_new_tokens=100, eos_ids=frozenset({EOS}))
    assert asyncio.run(read(Racing(request, meanwhile))) == tokens
    iterator = iter(Racing(request, meanwhile))
    assert [next(iterator) for _ in tokens] == tokens
    if ends:
        assert next(iterator, None) is None
