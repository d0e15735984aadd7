# SPDX-License-Identifier: MIT OR Apache-2.0
"""An engine ends: closed by anybody, from anywhere, more than once, or by nobody at all."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from metrale.engine import Engine, EngineClosed, EngineError, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, ask, held, serving

pytestmark = host_only


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=2, **LIMITS)


def run_threads(*calls: Any) -> None:
    """Run calls at once, in a thread each."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for future in [threads.submit(call) for call in calls]:
            future.result(PATIENCE)


# close


@pytest.mark.parametrize("drain", [True, False])
def test_close_is_heard_between_a_turn_and_the_rest_after_it(model: NllbModel, drain: bool) -> None:
    """The call that ends a rest may come when there is none: the next turn takes it, and no other one comes."""
    engine = Engine(model)
    worker = engine._worker
    turn = worker._turn
    calls: list[None] = []

    def closed_as_it_begins() -> bool:
        if not calls:
            worker.stop(drain=drain)
        calls.append(None)
        return turn()

    with mock.patch.object(worker, "_turn", closed_as_it_begins):
        worker.wake()
        engine._thread.join(5)
    ended = not engine._thread.is_alive()
    worker.wake()
    engine.close()
    assert ended
    assert calls


def test_close_lets_everything_end(model: NllbModel, solo: RunSolo) -> None:
    before = held(model)
    engine = Engine(model)
    handles = {index: engine.submit(ask(5 + index, max_new_tokens=24)) for index in range(6)}
    engine.close()
    for index, handle in handles.items():
        assert handle.done
        solo(ask(5 + index, max_new_tokens=24)).check(handle)
    assert held(model) == before
    assert not engine._thread.is_alive()


def test_close_without_drain_cancels(model: NllbModel, solo: RunSolo) -> None:
    """What runs keeps the tokens that it has; what waits has none."""
    alone = solo(ask(max_new_tokens=24)).ids
    with serving(model, max_lanes=1) as engine, Gate(at=3) as gate:
        running = engine.submit(ask(max_new_tokens=24, on_token=gate))
        gate.reach()
        waiting = engine.submit(ask())
        closing = threading.Thread(target=engine.close, kwargs={"drain": False})
        closing.start()
        until(lambda: engine._worker._stopping is not None)
        gate.open()
        closing.join(PATIENCE)
        results = [running.result(0), waiting.result(0)]
        assert engine.stats().finished["cancelled"] == 2
    assert [result.finish_reason for result in results] == ["cancelled"] * 2
    assert 3 <= len(results[0].ids) < 23
    assert results[0].ids == alone[: len(results[0].ids)]
    assert results[1].ids == []


def test_close_cancels_when_its_time_is_over(model: NllbModel) -> None:
    with serving(model) as engine, Gate() as gate:
        handle = engine.submit(ask(on_token=gate))
        gate.reach()
        closing = threading.Thread(target=engine.close, kwargs={"timeout": 0.001})
        closing.start()
        until(lambda: engine._worker._stopping is not None)
        gate.open()
        closing.join(PATIENCE)
        assert handle.result(0).finish_reason == "cancelled"


def test_closing_again_and_from_many_threads(model: NllbModel) -> None:
    with serving(model) as engine:
        handle = engine.submit(ask(max_new_tokens=24))
        run_threads(*[engine.close] * 8)
        assert handle.done
        engine.close()
        engine.close(drain=False)
    assert handle.result(0).finish_reason == "length"


def test_a_closed_engine_takes_nothing_and_still_tells(model: NllbModel) -> None:
    engine = Engine(model)
    engine.submit(ask())
    engine.close()
    for options in ({}, {"max_new_tokens": 1}):
        with pytest.raises(EngineClosed):
            engine.submit(ask(**options))
    with pytest.raises(EngineClosed):
        asyncio.run(engine.asubmit(ask()))
    assert engine.stats().finished["length"] == engine.stats().submitted == 1
    assert "metrale_steps_total" in engine.prometheus()


def test_closing_wakes_those_who_wait_outside(model: NllbModel) -> None:
    with serving(model, max_lanes=1, max_queue=1) as engine, Gate() as gate:
        engine.submit(ask(on_token=gate))
        gate.reach()
        inside = engine.submit(ask())
        with ThreadPoolExecutor() as threads:
            blocked = [threads.submit(engine.submit, ask()), threads.submit(asyncio.run, engine.asubmit(ask()))]
            until(lambda: engine._queue.blocked == 2)
            closing = threads.submit(engine.close)
            for one in blocked:
                with pytest.raises(EngineClosed):
                    one.result(PATIENCE)
            gate.open()
            closing.result(PATIENCE)
        assert inside.result(0).finish_reason == "length"
        assert engine.stats().submitted == 2


def test_leaving_the_context_by_an_exception_cancels(model: NllbModel) -> None:
    handles: list[RequestHandle] = []

    def fail() -> None:
        with Engine(model, max_lanes=1) as engine:
            handles.extend(engine.submit(ask(max_new_tokens=24)) for _ in range(50))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert handles[-1].result(0).finish_reason == "cancelled"


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("where", ["on_token", "done callback"])
def test_closing_from_a_callback(model: NllbModel, where: str, drain: bool) -> None:
    """It returns at once, and the thread ends after it."""
    with serving(model, max_lanes=1) as engine, Gate() as gate:
        closed = threading.Event()

        def close(_: object) -> None:
            engine.close(drain=drain)
            closed.set()

        engine.submit(ask(on_token=gate))
        gate.reach()
        first = engine.submit(ask(on_token=close if where == "on_token" else None))
        if where == "done callback":
            first.add_done_callback(close)
        other = engine.submit(ask())
        gate.open()
        assert closed.wait(PATIENCE)
        engine._thread.join(PATIENCE)
        assert not engine._thread.is_alive()
        kept = drain or where == "done callback"
        assert first.result(0).finish_reason == ("length" if kept else "cancelled")
        assert other.result(0).finish_reason == ("length" if drain else "cancelled")


# nobody closes it


def test_the_thread_ends_with_the_last_reference(model: NllbModel) -> None:
    before = held(model)
    engine = Engine(model)
    thread, handle = engine._thread, engine.submit(ask(max_new_tokens=24))
    list(handle)
    with Gate() as gate:
        running = engine.submit(ask(on_token=gate))
        gate.reach()
        del engine
        gate.open()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert handle.result(0).finish_reason == "length", "a handle says what it has to say without its engine"
    assert running.result(0).finish_reason == "cancelled"
    assert held(model) == before


def test_an_engine_may_be_collected_by_a_thread_that_has_the_model(model: NllbModel) -> None:
    """The engine's thread needs the model to come to its end: whoever collects the engine must not wait for it."""
    engine = Engine(model)
    engine.me = engine  # type: ignore[attr-defined]
    gone, thread = weakref.ref(engine), engine._thread
    handle = engine.submit(ask(max_new_tokens=24))
    del engine

    def collect() -> None:
        with model.exclusive():
            gc.collect()
            assert gone() is None

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(PATIENCE)
    assert not collecting.is_alive()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert handle.done


def test_without_a_thread_there_is_no_engine_and_nothing_is_left(model: NllbModel) -> None:
    before = held(model)
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
        pytest.raises(RuntimeError, match="can't start"),
    ):
        Engine(model)
    assert held(model) == before


def test_a_fork_has_no_engine(model: NllbModel) -> None:
    """The child is told so, also when it closes the engine; the parent's goes on."""
    with serving(model) as engine, Gate() as gate:
        handle = engine.submit(ask(on_token=gate))
        gate.reach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: of a fork beside threads
            child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))  # ends a child that hangs
            code = 1
            try:
                engine.close()
                engine.submit(ask())
            except EngineError as error:
                code = 0 if "another process" in str(error) else 2
            finally:
                os._exit(code)
        gate.open()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert handle.result(PATIENCE).finish_reason == "length"
        assert engine.submit(ask()).result(PATIENCE).finish_reason == "length"
