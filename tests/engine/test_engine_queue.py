# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who goes first, who is late, and who has to wait outside."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from metrale.engine import Engine, QueueFull, Request, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.clock import FakeClock
from tests.engine.conftest import RunSolo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, ask, serving, stopped

pytestmark = host_only


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=2, **LIMITS)


class Ends:
    """The order in which requests end. A callback comes after the end that a consumer hears of."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def watch(self, name: str, handle: RequestHandle) -> RequestHandle:
        handle.add_done_callback(lambda _: self.names.append(name))
        return handle

    def wait(self, count: int) -> list[str]:
        """Return the names when there are so many."""
        until(lambda: len(self.names) == count)
        return self.names


def submit_busy(engine: Engine, gate: Gate, **options: int) -> RequestHandle:
    """Submit a request that stops the engine's thread at its first token, and wait until it does."""
    handle = engine.submit(ask(on_token=gate, **options))
    gate.reach()
    return handle


# priorities


def test_the_first_come_is_the_first_served(model: NllbModel) -> None:
    ends = Ends()
    with serving(model, max_lanes=1) as engine, Gate() as gate:
        submit_busy(engine, gate)
        for name in "abcd":
            ends.watch(name, engine.submit(ask(max_new_tokens=3)))
        gate.open()
        assert ends.wait(4) == list("abcd")


@pytest.mark.parametrize("interval", [1, 4])
def test_a_higher_priority_overtakes_and_pushes_out(model: NllbModel, solo: RunSolo, interval: int) -> None:
    """Who has to give way comes back, before those of its priority that came later, and yields what it yields alone."""
    ends = Ends()
    requests = [ask(5, max_new_tokens=24), ask(6, max_new_tokens=6), ask(7, max_new_tokens=6, priority=1)]
    with serving(model, max_lanes=1, prefill_interval=interval) as engine, Gate(at=2) as gate:
        low = ends.watch("low", engine.submit(ask(5, max_new_tokens=24, on_token=gate)))
        gate.reach()
        other, high = (
            ends.watch(name, engine.submit(one)) for name, one in zip(("other", "high"), requests[1:], strict=True)
        )
        gate.open()
        for request, handle in zip(requests, (low, other, high), strict=True):
            solo(request).check(handle)
        stats = engine.stats()
    assert ends.names == ["high", "low", "other"]
    assert stats.preemptions == 1
    assert stats.swapped_in_bytes == stats.swapped_out_bytes > 0


@pytest.mark.parametrize(("urgent", "stay"), [(1, "abd"), (2, "ad"), (3, "d"), (4, "")])
def test_those_who_stand_last_give_way(make_tiny: MakeModel, urgent: int, stay: str) -> None:
    """By their priorities, and of equal ones who came last."""
    model, ends = make_tiny(max_batch=4, **LIMITS), Ends()
    with serving(model, prefill_interval=1) as engine, Gate(at=2) as gate:
        with stopped(engine):
            for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2)):
                request = ask(max_new_tokens=24, priority=priority, on_token=gate if name == "d" else None)
                ends.watch(name, engine.submit(request))
        gate.reach()
        for _ in range(urgent):
            ends.watch("!", engine.submit(ask(max_new_tokens=24, priority=3)))
        gate.open()
        assert sorted(ends.wait(4 + urgent)[:4]) == sorted("!" * urgent + stay)
        assert engine.stats().preemptions == urgent


def test_who_waited_long_gives_way_to_nobody(model: NllbModel) -> None:
    """With two seconds for one priority, ten of them count more than the priority of a newcomer."""
    clock, ends = FakeClock(), Ends()
    with serving(model, max_lanes=1, clock=clock, aging=2.0, prefill_interval=1) as engine, Gate() as gate:
        submit_busy(engine, gate, priority=100)
        ends.watch("old", engine.submit(ask(max_new_tokens=24)))
        clock.now += 10
        for priority in (4, 6):
            ends.watch(f"new {priority}", engine.submit(ask(max_new_tokens=4, priority=priority)))
        gate.open()
        assert ends.wait(3) == ["new 6", "old", "new 4"]
        assert engine.stats().preemptions == 0, "new 4 comes while old runs"


@pytest.mark.parametrize(("interval", "steps"), [(1, 8), (2, 4), (4, 2)])
def test_newcomers_join_together(make_tiny: MakeModel, interval: int, steps: int) -> None:
    """One comes at each of the first eight tokens of a request; they join it at every so many steps."""
    model = make_tiny(max_batch=9, **LIMITS)
    handles: list[RequestHandle] = []

    def submit_one(token: int) -> None:
        if len(handles) < 8:
            handles.append(engine.submit(ask(max_new_tokens=24)))

    with serving(model, lag=0, prefill_interval=interval) as engine:
        engine.submit(ask(max_new_tokens=24, on_token=submit_one)).result(PATIENCE)
        assert engine.stats().mixed_steps == steps


@pytest.mark.parametrize(("most", "steps"), [(1, 4), (5, 3), (11, 2), (19, 2), (20, 1)])
def test_a_step_prefills_so_many_tokens(make_tiny: MakeModel, most: int, steps: int) -> None:
    """Sources of 6, 4, 1 and 9 tokens, in order; one that is longer than that has a step to itself."""
    model = make_tiny(max_batch=4, **LIMITS)
    with serving(model, lag=0, max_prefill_tokens=most, prefill_interval=1) as engine:
        with stopped(engine):
            handles = [engine.submit(ask(*range(4, 4 + n), max_new_tokens=2)) for n in (6, 4, 1, 9)]
        for handle in handles:
            handle.result(PATIENCE)
        assert engine.stats().steps == 1 + steps


def test_who_joins_is_not_pushed_out_before_it_has_run(model: NllbModel) -> None:
    """While lanes are opened, a callback submits what comes before all of them."""
    clock, urgent, calls = FakeClock(10.0), [], 0

    with serving(model, clock=clock, aging=2.0, prefill_interval=1) as engine, Gate(at=2) as gate:

        def submit_urgent(token: int) -> None:
            nonlocal calls
            calls += 1
            gate(token)
            if calls == 3:
                urgent.append(engine.submit(ask(priority=100)))

        first = engine.submit(ask(priority=5, on_token=submit_urgent))
        gate.reach()
        clock.now = 0.0
        joins = engine.submit(ask(priority=3))
        clock.now = 10.0
        pushes = engine.submit(ask(priority=6))  # the first one, which is read up to date for that
        gate.open()
        for handle in (first, joins, pushes):
            assert handle.result(PATIENCE).error is None
        assert urgent[0].result(PATIENCE).error is None
        assert calls == 11


# deadlines


def test_a_request_that_waits_too_long(model: NllbModel) -> None:
    clock = FakeClock()
    with serving(model, max_lanes=1, clock=clock) as engine, Gate() as gate:
        busy = submit_busy(engine, gate)
        late, patient = engine.submit(ask(timeout=5)), engine.submit(ask(timeout=6))
        clock.now += 5
        gate.open()
        result = late.result(PATIENCE)
        assert (result.ids, result.finish_reason, result.length) == ([], "timeout", 1)
        assert busy.result(PATIENCE).finish_reason == patient.result(PATIENCE).finish_reason == "length"
        assert engine.stats().finished["timeout"] == 1


def test_a_request_that_runs_too_long_keeps_its_tokens(model: NllbModel, solo: RunSolo) -> None:
    clock = FakeClock()
    alone = solo(ask(max_new_tokens=24)).ids

    def age(token: int) -> None:
        clock.now += 1

    with serving(model, clock=clock) as engine:
        other = engine.submit(ask(9, max_new_tokens=24))
        result = engine.submit(ask(max_new_tokens=24, timeout=5, on_token=age)).result(PATIENCE)
        solo(ask(9, max_new_tokens=24)).check(other)
    assert result.finish_reason == "timeout"
    assert result.ids == alone[:5]


def test_a_deadline_is_met_while_nothing_can_run(model: NllbModel) -> None:
    """Nobody calls the engine then: it looks by itself."""
    seqs = [model.alloc_sequence() for _ in range(2)]
    clock = FakeClock()
    with serving(model, clock=clock) as engine:
        handle = engine.submit(ask(timeout=5))
        clock.now += 5
        assert handle.result(PATIENCE).finish_reason == "timeout"
    for seq in seqs:
        model.free_sequence(seq)


# back-pressure


def test_a_full_queue(model: NllbModel) -> None:
    with serving(model, max_lanes=1, max_queue=2) as engine, Gate() as gate:
        submit_busy(engine, gate)
        handles = [engine.submit(ask()) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.submit(ask(), block=False)
        with pytest.raises(QueueFull):
            engine.submit(ask(), timeout=0.001)
        with pytest.raises(QueueFull):
            asyncio.run(engine.asubmit(ask(), block=False))
        with ThreadPoolExecutor() as threads:
            blocked = threads.submit(engine.submit, ask(), timeout=PATIENCE)
            until(lambda: engine._queue.blocked == 1)
            assert not blocked.done()
            gate.open()
            handles.append(blocked.result(PATIENCE))
        assert [handle.result(PATIENCE).finish_reason for handle in handles] == ["length"] * 3
        stats = engine.stats()
    assert (stats.rejected, stats.submitted, sum(stats.finished.values())) == (3, 4, 4)


def test_a_full_queue_holds_a_task_back_and_not_its_loop(model: NllbModel) -> None:
    async def main(engine: Engine, gate: Gate) -> None:
        engine.submit(ask())
        task = asyncio.create_task(engine.asubmit(ask()))
        given_up = asyncio.create_task(engine.asubmit(ask()))
        while engine._queue.blocked < 2:  # the loop goes round
            await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        gate.open()
        assert (await (await task)).finish_reason == "length"

    with serving(model, max_lanes=1, max_queue=1) as engine, Gate() as gate:
        submit_busy(engine, gate)
        asyncio.run(main(engine, gate))
        until(lambda: engine.stats().finished["length"] == 3)
        stats = engine.stats()
    assert (stats.submitted, stats.rejected, sum(stats.finished.values())) == (3, 0, 3)


def test_a_task_that_is_cancelled_as_it_is_let_in_counts_as_submitted_and_cancelled(model: NllbModel) -> None:
    """The engine let its request in, and the task was cancelled before it could go on."""

    async def main(engine: Engine, gate: Gate) -> None:
        waiting = engine.submit(ask(max_new_tokens=2))
        task = asyncio.create_task(engine.asubmit(ask()))
        while not engine._queue.blocked:
            await asyncio.sleep(0)
        gate.open()
        waiting.result(PATIENCE)
        until(lambda: not engine._queue.blocked)  # without giving the task its turn
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(model, max_lanes=1, max_queue=1) as engine, Gate() as gate:
        submit_busy(engine, gate)
        asyncio.run(main(engine, gate))
        until(lambda: engine.stats().submitted == sum(engine.stats().finished.values()) == 3)


def test_submitting_on_the_engines_thread_never_waits(model: NllbModel) -> None:
    """There, nobody else would make room."""
    seen: list[str] = []

    def submit(token: int) -> None:
        for _ in range(3):
            try:
                engine.submit(ask(max_new_tokens=2), timeout=PATIENCE)
            except QueueFull:
                seen.append("full")
            else:
                seen.append("in")

    with serving(model, max_lanes=1, max_queue=2) as engine:
        began = time.monotonic()
        assert engine.submit(ask(max_new_tokens=2, on_token=submit)).result(PATIENCE).error is None
        assert time.monotonic() - began < PATIENCE
    assert seen == ["in", "in", "full"]


def test_a_deadline_passes_while_the_producer_is_blocked(model: NllbModel) -> None:
    """`submit` returns as if the request had been let in; it has ended."""
    clock = FakeClock()
    with serving(model, max_lanes=1, max_queue=1, clock=clock) as engine, Gate() as gate:
        submit_busy(engine, gate)
        engine.submit(ask())
        with ThreadPoolExecutor() as threads:
            blocked = threads.submit(engine.submit, ask(timeout=5, max_new_tokens=24))
            until(lambda: engine._queue.blocked == 1)
            clock.now += 5
            gate.open()
            assert blocked.result(PATIENCE).result(PATIENCE).finish_reason == "timeout"
        until(lambda: engine.stats().submitted == sum(engine.stats().finished.values()) == 3)


def test_many_producers_share_the_room(model: NllbModel, solo: RunSolo) -> None:
    """Eight threads and a queue of one: all are served, and the queue never holds more."""
    requests = [ask(5 + index, max_new_tokens=4) for index in range(8)]
    most = 0

    def produce(request: Request) -> RequestHandle:
        nonlocal most
        handle = engine.submit(request)
        most = max(most, len(engine._queue))
        return handle

    with serving(model, max_queue=1) as engine, ThreadPoolExecutor(8) as threads:
        for request, handle in zip(requests, threads.map(produce, requests), strict=True):
            solo(request).check(handle)
    assert most <= 1
