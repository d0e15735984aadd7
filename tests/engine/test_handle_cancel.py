# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles: cancellation at every moment, callbacks, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metrale.engine.handle import RequestHandle
from tests.engine.handles import EOS, make, run
from tests.engine.patience import PATIENCE
from tests.hammering import eager_switching

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


@eager_switching()
def test_cancel_against_finish() -> None:
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
