# SPDX-License-Identifier: MIT OR Apache-2.0
"""Callbacks run on the engine's thread, and do there whatever their authors like."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from metrale.engine import EngineClosed, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, until
from tests.engine.serving import LIMITS, ask, serving, stopped

pytestmark = host_only


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=4, **LIMITS)


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine"), KeyboardInterrupt("mine")], ids=repr)
@pytest.mark.parametrize("at", [1, 3, 11])
def test_what_on_token_raises_ends_its_request_alone(
    model: NllbModel, solo: RunSolo, pool: list[Solo], error: BaseException, at: int
) -> None:
    tokens: list[int] = []

    def fail(token: int) -> None:
        tokens.append(token)
        if len(tokens) == at:
            raise error

    with serving(model) as engine:
        handles = [engine.submit(one.request) for one in pool[:6]]
        result = engine.submit(ask(max_new_tokens=12, on_token=fail)).result(PATIENCE)
        for one, handle in zip(pool, handles, strict=False):
            one.check(handle)
    assert (result.finish_reason, result.error) == ("error", f"on_token raised {type(error).__name__}: mine")
    assert result.ids == tokens == solo(ask(max_new_tokens=12)).ids[:at]


def test_what_a_done_callback_raises_is_logged(
    model: NllbModel, pool: list[Solo], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(handle: RequestHandle) -> None:
        raise SystemExit("mine")

    with caplog.at_level(logging.ERROR), serving(model) as engine:
        with stopped(engine):
            handles = [engine.submit(one.request) for one in pool[:6]]
            handles[2].add_done_callback(fail)
        for one, handle in zip(pool, handles, strict=False):
            one.check(handle)
    assert [record.message.split("<")[0] for record in caplog.records] == ["a done callback of "]


def test_callbacks_submit(model: NllbModel, solo: RunSolo) -> None:
    """One request begets the next, in the middle and at its end, ten generations long."""
    requests = [ask(5 + index, max_new_tokens=6) for index in range(10)]
    handles: dict[int, RequestHandle] = {}
    threads = set()

    def submit(number: int) -> None:
        threads.add(threading.current_thread().name)
        if number == len(requests) or number in handles:
            return
        handles[number] = engine.submit(replace(requests[number], on_token=lambda _: submit(number + 1)))
        handles[number].add_done_callback(lambda _: submit(number + 1))

    with serving(model, max_lanes=2) as engine:
        with stopped(engine):
            submit(0)
        until(lambda: len(handles) == len(requests))
        for number, request in enumerate(requests):
            solo(request).check(handles[number])
    assert threads == {"metrale engine", threading.current_thread().name}


def test_callbacks_cancel_themselves_and_others(model: NllbModel, solo: RunSolo) -> None:
    """Cancelled on the engine's thread: who runs, who waits, and the one whose callback it is."""
    long = ask(max_new_tokens=24)
    handles: list[RequestHandle] = []
    calls = 0

    def cancel_all_but_the_last(token: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            assert [handle.cancel() for handle in handles[:-1]] == [True] * 7

    with serving(model, max_lanes=3) as engine:
        with stopped(engine):
            handles.append(engine.submit(replace(long, on_token=cancel_all_but_the_last)))
            handles.extend(engine.submit(long) for _ in range(7))
        for handle in handles[:-1]:
            result = handle.result(PATIENCE)
            assert result.finish_reason == "cancelled"
            assert result.ids == solo(long).ids[: len(result.ids)]
        assert len(handles[0].result().ids) == 4
        assert [len(handle.result().ids) for handle in handles[3:-1]] == [0] * 4
        solo(long).check(handles[-1])


def test_a_chain_of_ends(model: NllbModel) -> None:
    """Each request that ends cancels the next one, those that wait included."""
    ends: list[int] = []
    with serving(model, max_lanes=2) as engine:
        with stopped(engine):
            handles = [engine.submit(ask(max_new_tokens=24)) for _ in range(8)]

            def end(number: int) -> None:
                ends.append(number)
                if number + 1 < len(handles):
                    handles[number + 1].cancel()

            for number, handle in enumerate(handles):
                handle.add_done_callback(lambda _, number=number: end(number))  # type: ignore[misc]
        for handle in handles:
            handle.result(PATIENCE)
        until(lambda: len(ends) == len(handles))
        assert sorted(ends) == list(range(8))
        assert engine.stats().finished["cancelled"] >= 6


def test_a_callback_that_closes_and_submits(model: NllbModel) -> None:
    """A request that comes after the close is refused, on the engine's thread as elsewhere."""
    seen: list[Any] = []

    def close_and_submit(handle: RequestHandle) -> None:
        engine.close(drain=False)
        try:
            engine.submit(ask())
        except EngineClosed as error:
            seen.append(error)

    with serving(model, max_lanes=1) as engine:
        with stopped(engine):
            first = engine.submit(ask(max_new_tokens=3))
            first.add_done_callback(close_and_submit)
            other = engine.submit(ask())
        assert first.result(PATIENCE).finish_reason == "length"
        assert other.result(PATIENCE).finish_reason == "cancelled"
    assert len(seen) == 1


def test_a_callback_that_cancels_at_the_end_of_everything(model: NllbModel) -> None:
    """While the engine ends all requests, callbacks cancel and wait for those that have ended already."""
    results: list[str] = []
    with serving(model, max_lanes=2) as engine:
        with stopped(engine):
            handles = [engine.submit(ask(max_new_tokens=24)) for _ in range(6)]

            def look(handle: RequestHandle) -> None:
                for other in handles:
                    other.cancel()
                results.append(handle.result(0).finish_reason)

            for handle in handles:
                handle.add_done_callback(look)
            engine._worker.stop(drain=False)
        for handle in handles:
            handle.result(PATIENCE)
    assert results == ["cancelled"] * 6


@pytest.mark.parametrize("wait", [lambda handle: handle.result(), list], ids=["result", "iteration"])
def test_waiting_for_a_request_in_a_callback_is_refused(model: NllbModel, wait: Callable[..., object]) -> None:
    """Nobody would let it go on. Of a request that has ended, both return at once."""
    others: list[RequestHandle] = []

    def on_token(token: int) -> None:
        wait(others[0])

    with serving(model) as engine:
        others.append(engine.submit(ask()))
        others[0].result(PATIENCE)
        assert engine.submit(ask(on_token=on_token)).result(PATIENCE).error is None
        with model.exclusive():  # it cannot begin before its handle is in the list
            others[0] = engine.submit(ask(on_token=on_token))
        assert "EngineError: a callback waits" in str(others[0].result(PATIENCE).error)


class Unreadable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_ends_its_request_alone(model: NllbModel) -> None:
    def fail(token: int) -> None:
        raise Unreadable

    with serving(model) as engine:
        other = engine.submit(ask())
        assert engine.submit(ask(on_token=fail)).result(PATIENCE).error == (
            "on_token raised Unreadable (without a readable text)"
        )
        assert other.result(PATIENCE).error is None
        assert engine.submit(ask()).result(PATIENCE).error is None
