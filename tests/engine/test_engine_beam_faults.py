# SPDX-License-Identifier: MIT OR Apache-2.0
"""What goes wrong with a search ends that search, or those of one step: others come to what they do alone, lanes and KV
are free again, and who comes later is served."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError, OutOfMemory
from gpu_runtime.faults import FailCall
from metrale.engine import Engine, Request, RequestHandle
from metrale.engine.worker import NO_CHOICE, NO_MEMORY, NOT_FINITE
from metrale.model import BeamParams, Hypothesis, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.engine.clock import FakeClock
from tests.engine.conftest import RunSolo, RunSought
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.searches import Sought, seek
from tests.engine.serving import LIMITS, FailOnce, ask, serving, stopped

pytestmark = [host_only, pytest.mark.usefixtures("by_rows")]

Jobs = Sequence[Solo | Sought]


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=8, **LIMITS)


@pytest.fixture(scope="module")
def searches(sought: RunSought) -> list[Sought]:
    """Four searches that take some steps."""
    return [sought(seek(5 + i, 6, beams=2 + i % 2, max_new_tokens=9 + i)) for i in range(4)]


@pytest.fixture(scope="module")
def others(solo: RunSolo) -> list[Solo]:
    """Requests without beams, some of them sampled."""
    drawn = [
        ask(20 + i, max_new_tokens=9 + i % 4, sampling=SamplingParams(temperature=i % 2, seed=i)) for i in range(8)
    ]
    return [one for one in map(solo, drawn) if one.clear][:4]


@contextmanager
def still_serving(engine: Engine, jobs: Jobs) -> Iterator[None]:
    """Check at the end that every lane is free, and that the engine serves others as if nothing had been."""
    yield
    for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
        one.check(handle)


def run_all(engine: Engine, jobs: Jobs) -> list[RequestHandle]:
    """Submit requests that are all there when the engine looks, and wait for them."""
    with stopped(engine):
        handles = [engine.submit(one.request) for one in jobs]
    for handle in handles:
        handle.result(PATIENCE)
    return handles


def errors_of(handles: Sequence[RequestHandle], jobs: Jobs) -> dict[int, str]:
    """Return the errors by the place of their requests, after checking what all the others came to."""
    errors = {}
    for place, (one, handle) in enumerate(zip(jobs, handles, strict=True)):
        result = handle.result(PATIENCE)
        if result.finish_reason == "error":
            errors[place] = str(result.error)
            assert result.ids == one.tokens[: len(result.ids)]
            assert result.hypotheses is None
        else:
            one.check_result(result)
    return errors


# what only one search meets


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_search_with_logits_that_are_not_finite(
    model: NllbModel, searches: list[Sought], others: list[Solo], value: float, lag: int
) -> None:
    """Keys and values of all its beams are spoilt after some steps."""
    bad = searches[1].request.prompt_tokens
    select, steps = model.select_beams_to_feed, 0

    def spoil(rows: Any, seqs: Sequence[SequenceState], *rest: Any) -> None:
        nonlocal steps
        select(rows, seqs, *rest)
        for lane in engine._worker._lanes:
            if lane.handle.request.prompt_tokens == bad and lane.seq in seqs:
                steps += 1
                if steps == 4:
                    model.gpu.copy_h2d(np.full(8, value, np.float32), model._table.span(lane.seq).target())

    jobs: Jobs = [*searches[:2], *others[:2]]
    with serving(model, lag=lag) as engine, still_serving(engine, searches):
        with mock.patch.object(model, "select_beams_to_feed", spoil):
            handles = run_all(engine, jobs)
        assert errors_of(handles, jobs) == {1: NOT_FINITE}
        assert 4 <= steps <= 5 + lag
        stats = engine.stats()
        told = [handle for handle in handles if handle.finish_reason != "error"]
        assert stats.generated_tokens == sum(handle.length - 1 for handle in told) + 1, "and that of `stopped`"
        assert stats.time_to_first_token.count == len(told) + 1


@pytest.mark.parametrize("lag", [0, 2])
def test_a_search_that_may_choose_nothing(model: NllbModel, searches: list[Sought], lag: int) -> None:
    nothing = seek(sampling=SamplingParams(suppress_tokens=tuple(range(97))))
    with serving(model, lag=lag) as engine, still_serving(engine, searches):
        result = engine.submit(nothing).result(PATIENCE)
        assert (result.ids, result.finish_reason, result.error) == ([], "error", NO_CHOICE)
        assert engine.stats().generated_tokens == 0


def test_a_search_that_found_nothing(model: NllbModel, searches: list[Sought], others: list[Solo]) -> None:
    """It ended well, but no hypothesis is real."""
    jobs: Jobs = [*searches[:2], *others[:2]]
    take = model.take_beams

    def found(seq: SequenceState) -> list[Hypothesis]:
        lane = next(lane for lane in engine._worker._lanes if lane.seq is seq)
        return [] if lane.handle.request.prompt_tokens == jobs[1].request.prompt_tokens else take(seq)

    with serving(model) as engine, still_serving(engine, jobs[:1]), mock.patch.object(model, "take_beams", found):
        assert errors_of(run_all(engine, jobs), jobs) == {1: NO_CHOICE}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beams": BeamParams(4), "eos_ids": range(90)}, "InvalidInput: eos_ids: expected at most 63 with 4 beams"),
        ({"beams": BeamParams(2, length_penalty=1000.0)}, "InvalidInput: length_penalty: "),
        ({"sampling": SamplingParams(bad_words=((5,) * 3000,))}, "InvalidInput: bad_words: "),
    ],
)
def test_a_search_that_only_the_model_refuses(
    model: NllbModel, searches: list[Sought], others: list[Solo], options: dict[str, Any], text: str
) -> None:
    """When it is told how to search; its row of that step is nobody's."""
    with serving(model) as engine, still_serving(engine, searches):
        with stopped(engine):
            handles = [engine.submit(one.request) for one in (searches[0], others[0])]
            bad = engine.submit(ask(**{"beams": BeamParams(2), **options}))
            handles += [engine.submit(one.request) for one in (searches[1], others[1])]
        assert str(bad.result(PATIENCE).error).startswith(text)
        jobs: Jobs = [searches[0], others[0], searches[1], others[1]]
        assert errors_of(handles, jobs) == {}


@pytest.mark.parametrize("call", ["begin_beams", "take_beams"])
def test_a_call_that_fails_for_one_search(
    model: NllbModel, searches: list[Sought], others: list[Solo], call: str
) -> None:
    """The first that asks; each is asked for twice in vain before it is given up, but for its result."""
    real: Callable[..., Any] = getattr(model, call)
    unlucky: list[SequenceState] = []

    def refuse(seq: SequenceState, *args: Any) -> Any:
        unlucky[:] = unlucky or [seq]
        if seq is unlucky[0]:
            raise DeviceError("not this one")
        return real(seq, *args)

    jobs: Jobs = [*searches[:2], *others[:2]]
    with serving(model) as engine, still_serving(engine, searches):
        with mock.patch.object(model, call, refuse):
            handles = run_all(engine, jobs)
        assert list(errors_of(handles, jobs).values()) == ["DeviceError: not this one"]


def test_telling_how_to_search_is_tried_again(model: NllbModel, searches: list[Sought]) -> None:
    with serving(model) as engine, mock.patch.object(model, "begin_beams", FailOnce(model.begin_beams, 1, "once")):
        assert errors_of(run_all(engine, searches), searches) == {}


def test_what_a_callback_raises_ends_its_search_alone(
    model: NllbModel, searches: list[Sought], others: list[Solo]
) -> None:
    """Its tokens are there already when the callback gets the first of them."""
    told: list[int] = []

    def raising(token: int) -> None:
        told.append(token)
        if len(told) == 3:
            raise RuntimeError("mischief")

    jobs: Jobs = [*searches[:2], *others[:2]]
    with serving(model) as engine, still_serving(engine, searches):
        with stopped(engine):
            bad = engine.submit(replace(searches[2].request, on_token=raising))
            handles = [engine.submit(one.request) for one in jobs]
        result = bad.result(PATIENCE)
        assert errors_of(handles, jobs) == {}
    assert (result.finish_reason, result.error) == ("error", "on_token raised RuntimeError: mischief")
    assert result.ids == searches[2].tokens
    assert told == result.ids[:3]


def test_a_done_callback_finds_the_room(model: NllbModel, searches: list[Sought]) -> None:
    """Whoever hears of a search's end finds its lanes and its KV free."""
    found: list[tuple[int, Any]] = []
    with serving(model) as engine:
        with stopped(engine):
            handle = engine.submit(searches[0].request)
            handle.add_done_callback(lambda _: found.append((engine.stats().now.running, model.kv_usage())))
        searches[0].check(handle)
        until(lambda: bool(found))
    assert found == [(0, (0, model.kv_usage()[1]))]


# admission


def test_an_allocation_that_fails_ends_its_search(model: NllbModel, searches: list[Sought]) -> None:
    """By a fault of the device; only for want of room a request waits."""
    with serving(model) as engine, still_serving(engine, searches):
        with mock.patch.object(model, "alloc_beams", FailOnce(model.alloc_beams, 1, "no")):
            handles = run_all(engine, searches)
        assert list(errors_of(handles, searches).values()) == ["DeviceError: no"]


def test_out_of_memory_with_nothing_else_in_it(model: NllbModel, searches: list[Sought]) -> None:
    """Nobody can make room, so it does not wait; those behind it are served."""
    full = mock.patch.object(model, "alloc_beams", side_effect=OutOfMemory("full", requested=1, live=0, limit=0))
    with serving(model) as engine, still_serving(engine, searches):
        with full:
            result = engine.submit(searches[0].request).result(PATIENCE)
        assert (result.finish_reason, result.error) == ("error", NO_MEMORY)


# what all searches of a step meet


def test_selections_that_always_fail(model: NllbModel, searches: list[Sought], others: list[Solo]) -> None:
    """A second one would be another step of the search. Who is not searched goes on."""
    jobs: Jobs = [*searches[:2], *others[:3]]
    with serving(model) as engine, still_serving(engine, searches):
        with mock.patch.object(model, "select_beams_to_feed", side_effect=DeviceError("broken")):
            handles = run_all(engine, jobs)
        assert errors_of(handles, jobs) == {0: "DeviceError: broken", 1: "DeviceError: broken"}


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_selection_that_fails_once(model: NllbModel, searches: list[Sought], others: list[Solo], at: int) -> None:
    jobs: Jobs = [*searches[:2], *others[:3]]
    with serving(model) as engine, still_serving(engine, searches):
        with mock.patch.object(model, "select_beams_to_feed", FailOnce(model.select_beams_to_feed, at, "once")):
            handles = run_all(engine, jobs)
        assert errors_of(handles, jobs) == {0: "DeviceError: once", 1: "DeviceError: once"}


def test_choices_that_always_fail_beside_searches(model: NllbModel, searches: list[Sought], others: list[Solo]) -> None:
    jobs: Jobs = [*searches[:2], *others[:3]]
    with serving(model) as engine, still_serving(engine, searches):
        with mock.patch.object(model, "sample_batch_to_feed", side_effect=DeviceError("broken")):
            handles = [engine.submit(one.request) for one in jobs]
            lost = errors_of(handles, jobs)
        assert lost == dict.fromkeys((2, 3, 4), "DeviceError: broken")


@pytest.mark.parametrize("what", [None, "packed_attention_f32", "embed_f32", "beam_candidates_f32", "beam_select_f32"])
def test_a_step_with_searches_that_fails_is_made_again_in_parts(
    make_tiny: MakeModel, sought: RunSought, solo: RunSolo, what: str | None
) -> None:
    """Of a search and two others decode, while a search and another are prefilled beside them; one launch fails.

    That of a forward costs nobody anything; that of a selection costs the searches of its step their lives.
    """
    fault = FailCall("launch", what, nth=None)
    model = make_tiny(open_host(faults=(fault,)), max_batch=8, **LIMITS)
    first: Jobs = [sought(seek(5, 6, max_new_tokens=16)), *(solo(ask(7 + i, max_new_tokens=20)) for i in range(2))]
    second: Jobs = [sought(seek(6, beams=2)), solo(ask(30))]
    with serving(model, prefill_interval=1) as engine, still_serving(engine, first), Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(first[0].request), engine.submit(replace(first[1].request, on_token=gate))]
            handles.append(engine.submit(first[2].request))
        gate.reach()
        handles += [engine.submit(one.request) for one in second]
        seen = fault.seen
        fault.arm()
        gate.open()
        lost = errors_of(handles, [*first, *second])
        assert fault.seen > seen
        assert set(lost) == ({0, 3} if str(what).startswith("beam") else set())


def test_any_call_fails_once(make_tiny: MakeModel, searches: list[Sought], others: list[Solo]) -> None:
    """At random moments. What fails in a selection, or as it is waited for, costs searches, others go on."""
    faults = {name: FailCall(name, nth=None) for name in ("launch", "copy_h2d", "copy_d2h", "record_event")}
    model = make_tiny(open_host(faults=tuple(faults.values())), max_batch=8, **LIMITS)
    jobs: Jobs = [*searches[:3], *others[:2]]
    rng, hit = random.Random(1), 0
    calls: dict[str, int] = {}
    for name in [None, *(name for name in faults for _ in range(2))]:
        with serving(model, prefill_interval=1) as engine, still_serving(engine, searches[:1]):
            with stopped(engine):
                handles = [engine.submit(one.request) for one in jobs]
                before = {kind: fault.seen for kind, fault in faults.items()}
                if name is not None:
                    faults[name].arm(rng.randrange(calls[name]))
            lost = errors_of(handles, jobs)
            calls = calls or {kind: fault.seen - before[kind] for kind, fault in faults.items()}
            for fault in faults.values():
                fault.arm(None)
        assert set(lost) <= {0, 1, 2}, "a choice is made again"
        assert all(text.startswith("DeviceError: ") for text in lost.values())
        hit += bool(lost)
    assert 0 < hit < 8


def test_waiting_for_a_step_fails(model: NllbModel, searches: list[Sought], others: list[Solo]) -> None:
    jobs: Jobs = [*searches, *others]
    with serving(model, lag=2) as engine, still_serving(engine, searches):
        with stopped(engine):
            handles = [engine.submit(one.request) for one in jobs]
            patch = mock.patch.object(model, "event_synchronize", FailOnce(model.event_synchronize, 3, "lost"))
            patch.start()
        lost = errors_of(handles, jobs)
        patch.stop()
    assert set(lost.values()) == {"DeviceError: lost"}
    assert 0 in lost
    assert len(lost) < len(jobs)


# who ends before the search does


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_search_that_runs_is_ended(
    model: NllbModel, searches: list[Sought], solo: RunSolo, how: str, lag: int
) -> None:
    clock = FakeClock()
    request = replace(seek(max_new_tokens=24), timeout=5.0 if how == "timeout" else None)
    with (
        serving(model, lag=lag, clock=clock) as engine,
        still_serving(engine, searches),
        Gate(at=5) as gate,
    ):
        with stopped(engine):
            handle = engine.submit(request)
            beside = engine.submit(ask(9, max_new_tokens=20, on_token=gate))
        gate.reach()
        assert engine.stats().now.running == 4
        if how == "cancel":
            assert handle.cancel()
        else:
            clock.now += 5
        gate.open()
        result = handle.result(PATIENCE)
        assert (result.ids, result.hypotheses, result.length) == ([], None, 1)
        assert result.finish_reason == ("cancelled" if how == "cancel" else "timeout")
        solo(ask(9, max_new_tokens=20)).check(beside)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_search_that_waits_is_ended(model: NllbModel, solo: RunSolo, how: str) -> None:
    """It stood in front and held others back, which go on at once."""
    clock = FakeClock()
    request: Request = replace(seek(beams=8), timeout=5.0 if how == "timeout" else None)
    with serving(model, clock=clock, prefill_interval=1) as engine, Gate(at=3) as gate:
        with stopped(engine):
            running = engine.submit(ask(max_new_tokens=24, on_token=gate))
        gate.reach()
        wide, behind = engine.submit(request), engine.submit(ask(9, max_new_tokens=3))
        if how == "cancel":
            wide.cancel()
        else:
            clock.now += 5
        gate.open()
        result = wide.result(PATIENCE)
        assert result.finish_reason == ("cancelled" if how == "cancel" else "timeout")
        assert (result.ids, wide.admitted_at) == ([], None)
        solo(ask(9, max_new_tokens=3)).check(behind)
        assert running.result(PATIENCE).finish_reason == "length"
        assert (behind.finished_at or 0) <= (running.finished_at or 0)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_with_searches(model: NllbModel, searches: list[Sought], drain: bool) -> None:
    """Some run and some wait. Drained, they find what they find alone."""
    with serving(model, lag=2) as engine, Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(one.request) for one in searches]
            engine.submit(ask(9, on_token=gate, priority=1))
        gate.reach()
        engine._queue.close()
        engine._worker.stop(drain=drain)
        gate.open()
        for one, handle in zip(searches, handles, strict=True):
            if drain:
                one.check(handle)
            else:
                assert handle.result(PATIENCE).finish_reason == "cancelled"


def test_a_search_cancels_itself_in_its_callback(model: NllbModel, searches: list[Sought]) -> None:
    """Too late: its end was under way."""
    handles: list[RequestHandle] = []

    def cancel(token: int) -> None:
        handles[0].cancel()

    with serving(model) as engine:
        with stopped(engine):
            handles.append(engine.submit(replace(searches[0].request, on_token=cancel)))
        searches[0].check(handles[0])
