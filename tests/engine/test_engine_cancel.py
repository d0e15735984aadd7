# SPDX-License-Identifier: MIT OR Apache-2.0
"""A request that is cancelled, or whose time is over, ends soon, wherever it is: its tokens stay, its room is free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from metrale.engine import Engine, FinishReason, Generated, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.clock import FakeClock
from tests.engine.conftest import RunSolo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, ask, serving, stopped

pytestmark = host_only

LONG = ask(max_new_tokens=24)


class Stopper:
    """Ends a request in one of the two ways. A request to be ended has the timeout ``seconds``."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.clock = FakeClock()
        self.seconds = 5.0

    @property
    def reason(self) -> FinishReason:
        return "cancelled" if self.how == "cancel" else "timeout"

    def stop(self, handle: RequestHandle) -> None:
        if self.how == "cancel":
            assert handle.cancel()
        else:
            self.clock.now += self.seconds


@pytest.fixture(params=["cancel", "deadline"])
def stopper(request: pytest.FixtureRequest) -> Stopper:
    return Stopper(request.param)


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=2, **LIMITS)


@contextmanager
def one_lane(model: NllbModel, stopper: Stopper, **options: Any) -> Iterator[Engine]:
    """Return an engine with one lane that must be free at the end."""
    with serving(model, max_lanes=1, clock=stopper.clock, **options) as engine:
        yield engine
        assert engine.submit(ask()).result(PATIENCE).finish_reason == "length"
        stats = engine.stats()
        assert stats.submitted == sum(stats.finished.values())
        assert stats.finished[stopper.reason] == 1


def check(result: Generated, stopper: Stopper, solo: RunSolo, least: int, most: int) -> None:
    assert result.finish_reason == stopper.reason
    assert result.error is None
    assert result.ids == solo(LONG).ids[: len(result.ids)]
    assert least <= len(result.ids) <= most
    assert result.length == 1 + len(result.ids)


def test_while_it_waits(model: NllbModel, stopper: Stopper, solo: RunSolo) -> None:
    with one_lane(model, stopper) as engine:
        with stopped(engine):
            handle = engine.submit(replace(LONG, timeout=stopper.seconds))
            stopper.stop(handle)
        check(handle.result(PATIENCE), stopper, solo, 0, 0)
        assert handle.admitted_at is None


def test_while_its_producer_is_blocked(model: NllbModel, stopper: Stopper, solo: RunSolo) -> None:
    """Nobody has its handle then, so a cancellation can only come from the task that submits it."""

    async def submit_and_stop(engine: Engine, gate: Gate) -> None:
        task = asyncio.create_task(engine.asubmit(replace(LONG, timeout=stopper.seconds)))
        while not engine._queue.blocked:
            await asyncio.sleep(0)
        if stopper.how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stopper.clock.now += stopper.seconds
            gate.open()
            check(await (await task).aresult(), stopper, solo, 0, 0)

    with serving(model, max_lanes=1, max_queue=1, clock=stopper.clock) as engine, Gate() as gate:
        running = engine.submit(ask(on_token=gate))
        gate.reach()
        waiting = engine.submit(ask())
        asyncio.run(submit_and_stop(engine, gate))
        gate.open()
        assert running.result(PATIENCE).finish_reason == waiting.result(PATIENCE).finish_reason == "length"
        until(lambda: engine.stats().submitted == sum(engine.stats().finished.values()))
        assert engine.stats().submitted == (2 if stopper.how == "cancel" else 3)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("at", [1, 4])
def test_while_it_runs(model: NllbModel, stopper: Stopper, solo: RunSolo, lag: int, at: int) -> None:
    """Steps in flight are enqueued already; their tokens are taken only while it is not known."""
    with one_lane(model, stopper, lag=lag) as engine, Gate(at=at) as gate:
        handle = engine.submit(replace(LONG, timeout=stopper.seconds, on_token=gate))
        gate.reach()
        stopper.stop(handle)
        gate.open()
        check(handle.result(PATIENCE), stopper, solo, at, at)


def test_while_it_is_moved_out(model: NllbModel, stopper: Stopper, solo: RunSolo) -> None:
    with one_lane(model, stopper) as engine, Gate(at=3) as first, Gate() as second:
        low = engine.submit(replace(LONG, timeout=stopper.seconds, on_token=first))
        first.reach()
        high = engine.submit(ask(9, priority=1, on_token=second))
        first.open()
        second.reach()
        assert engine.stats().now.swapped_out == 1
        stopper.stop(low)
        second.open()
        solo(ask(9)).check(high)
        check(low.result(PATIENCE), stopper, solo, 3, 5)
        stats = engine.stats()
        assert (stats.now.swapped_out, stats.swapped_in_bytes) == (0, 0)


def test_while_nothing_can_run(model: NllbModel, stopper: Stopper, solo: RunSolo) -> None:
    """Others have all slots, so that the engine rests and only looks now and then."""
    seqs = [model.alloc_sequence() for _ in range(2)]
    with serving(model, clock=stopper.clock) as engine:
        handles = [engine.submit(replace(LONG, timeout=stopper.seconds + index)) for index in range(2)]
        with pytest.raises(TimeoutError):
            handles[0].result(0.01)
        stopper.stop(handles[0])
        check(handles[0].result(PATIENCE), stopper, solo, 0, 0)
        assert not handles[1].done
        for seq in seqs:
            model.free_sequence(seq)
        solo(LONG).check(handles[1])
        seqs = [model.alloc_sequence() for _ in range(2)]  # as `serving` found it
    for seq in seqs:
        model.free_sequence(seq)


def test_in_its_last_step(model: NllbModel, stopper: Stopper, solo: RunSolo) -> None:
    """At its last token the end comes first: it ends as it would have."""
    with serving(model, clock=stopper.clock) as engine, Gate(at=23) as gate:
        handle = engine.submit(replace(LONG, timeout=stopper.seconds, on_token=gate))
        gate.reach()
        stopper.stop(handle)
        gate.open()
        solo(LONG).check(handle)
        assert not handle.cancel()


def test_whoever_takes_the_room_of_a_request_with_steps_in_flight(
    model: NllbModel, stopper: Stopper, solo: RunSolo
) -> None:
    """The slot and the KV are given away at once; what the steps in flight still write there does no harm."""
    next_one = ask(8, 9, max_new_tokens=16)
    with one_lane(model, stopper, lag=3, prefill_interval=1) as engine, Gate(at=2) as gate:
        handle = engine.submit(replace(LONG, timeout=stopper.seconds, on_token=gate))
        gate.reach()
        other = engine.submit(next_one)
        stopper.stop(handle)
        gate.open()
        solo(next_one).check(other)


def test_cancelling_many_from_another_thread(model: NllbModel, solo: RunSolo) -> None:
    """While they wait and run: each ends once, with a beginning of its tokens."""
    requests = [ask(5 + index, max_new_tokens=16) for index in range(14)]
    cancelled = (7, 3, 13, 0, 12, 1, 2, 10, 4)
    with serving(model, lag=2) as engine:
        handles = [engine.submit(request) for request in requests]
        for index in cancelled:
            next(iter(handles[index % 5]), None)  # something has come
            handles[index].cancel()
        for index, (request, handle) in enumerate(zip(requests, handles, strict=True)):
            result = handle.result(PATIENCE)
            assert result.ids == solo(request).ids[: len(result.ids)]
            assert result.finish_reason == "length" or index in cancelled
