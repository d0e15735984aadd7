# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever fails, the engine lives on: the requests that it hits end with "error", and the others come to what they do
alone. Nothing is left behind, and who comes later is served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import CALLS, Budget, FailCall
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.host import product_calls
from metrale.engine import Engine, RequestHandle, admission
from metrale.engine.worker import NO_CHOICE, NOT_FINITE
from metrale.model import GREEDY, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.draws import made
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate
from tests.engine.serving import LIMITS, POSITION_BYTES, FailOnce, ask, promising, serving, stopped

pytestmark = host_only

USED = ("launch", "gemm", "copy_h2d", "copy_d2h", "record_event")
"""The calls that an engine's work is made of."""

SOURCES = "packed_attention_f32"
"""A launch of the encoder: only a prefill makes it."""


@pytest.fixture(scope="module")
def faults() -> dict[str, FailCall]:
    """What fails a call of each kind; not armed."""
    return {name: FailCall(name, nth=None) for name in CALLS}


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=4, **LIMITS)


@pytest.fixture
def cramped(make_tiny: MakeModel, faults: dict[str, FailCall]) -> Iterator[NllbModel]:
    """A model that fails on demand, with KV for one of the `long` requests, and for the beginnings of two others."""
    with mock.patch.object(admission, "_SPARE", 2):
        gpu = open_host(faults=tuple(faults.values()))
        yield make_tiny(gpu, max_batch=4, kv_bytes=(17 + 2 * 6) * POSITION_BYTES, **LIMITS)


@pytest.fixture(scope="module")
def long(solo: RunSolo) -> list[Solo]:
    """Requests that outgrow what they get in the cramped model, every other one sampled."""
    drawn = [
        ask(5 + i, max_new_tokens=14, sampling=SamplingParams(temperature=i % 2, no_repeat_ngram_size=2, seed=i))
        for i in range(8)
    ]
    return [one for one in map(solo, drawn) if one.clear][:5]


def broken(text: str = "broken") -> Any:
    """Return what raises a DeviceError in place of a method."""
    return mock.Mock(side_effect=DeviceError(text))


def errors_of(handles: list[RequestHandle], pool: list[Solo], text: str) -> list[Solo]:
    """Return the requests that ended with "error", after checking what they and all the others came to."""
    hit = []
    for one, handle in zip(pool, handles, strict=True):
        result = handle.result(PATIENCE)
        if result.finish_reason == "error":
            assert text in str(result.error)
            assert result.ids == one.ids[: len(result.ids)]
            hit.append(one)
        else:
            one.check(handle)
    return hit


@contextmanager
def still_serving(engine: Engine, later: list[Solo]) -> Iterator[None]:
    """Check at the end that the engine serves others as if nothing had been."""
    yield
    for one, handle in [(one, engine.submit(one.request)) for one in later]:
        one.check(handle)


# a device that fails


@pytest.mark.parametrize("what", [None, SOURCES, "sample_f32_greedy"])
def test_a_step_that_fails_is_made_again_in_parts(make_tiny: MakeModel, solo: RunSolo, what: str | None) -> None:
    """Two lanes decode and two are prefilled beside them; a launch of either part fails, or that of the choice.

    Every lane has a row of its own then as well.
    """
    fault = FailCall("launch", what, nth=None)
    model = make_tiny(open_host(faults=(fault,)), max_batch=4, **LIMITS)
    requests = [ask(5 + index, max_new_tokens=20) for index in range(4)]
    with serving(model, prefill_interval=1) as engine, Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(replace(one, on_token=gate)) for one in requests[:2]]
        gate.reach()  # the second token of the first
        handles += [engine.submit(one) for one in requests[2:]]
        seen = fault.seen
        fault.arm()
        gate.open()
        for request, handle in zip(requests, handles, strict=True):
            solo(request).check(handle)
        assert fault.seen > seen
        stats = engine.stats()
    assert (stats.mixed_steps, stats.finished["error"]) == (1, 0)


@pytest.mark.parametrize("kind", USED)
def test_any_call_fails_once(
    cramped: NllbModel,
    long: list[Solo],
    pool: list[Solo],
    faults: dict[str, FailCall],
    kind: str,
    pytestconfig: pytest.Config,
) -> None:
    """At random moments, during forwards, choices, and moves out of the KV and back.

    Forwards and choices are made again, so only a move can cost a request its life.
    """
    fault, rng, hit = faults[kind], random.Random(kind), 0
    calls: dict[str, int] = {}
    moments = [None, *(rng.random() for _ in made(pytestconfig, range(5), 2))]
    for moment in moments:
        with serving(cramped, prefill_interval=1) as engine, still_serving(engine, pool[:3]):
            with stopped(engine):
                handles = [engine.submit(one.request) for one in long]
                before = {name: one.seen for name, one in faults.items()}
                if moment is not None:
                    fault.arm(int(moment * calls[kind]))
            lost = errors_of(handles, long, f"{kind}: ")
            seen = {name: one.seen - before[name] for name, one in faults.items()}
            fault.arm(None)
            calls = calls or seen
            assert engine.stats().preemptions > 0
        assert len(lost) <= (moment is not None)
        hit += len(lost)
    assert {name for name, count in calls.items() if count} == set(USED)
    assert hit == 0 or kind not in ("launch", "gemm")


def test_whose_own_part_fails_is_lost_alone(model: NllbModel, solo: RunSolo) -> None:
    """The others of its step keep the rows that they would have without it."""
    requests = [ask(5 + index, max_new_tokens=12) for index in range(4)]
    bad = replace(requests[2], adapter_slot=7)
    with serving(model, prefill_interval=1) as engine, Gate(at=2) as gate, promising(model):
        first = engine.submit(replace(requests[0], on_token=gate))
        gate.reach()
        handles = [engine.submit(one) for one in (bad, requests[1], requests[3])]
        gate.open()
        assert str(handles[0].result(PATIENCE).error).startswith("InvalidInput: adapter_slot")
        for request, handle in zip((requests[0], requests[1], requests[3]), (first, *handles[1:]), strict=True):
            solo(request).check(handle)
        assert engine.stats().prompt_tokens == 3, "a prompt that was refused is not counted"


def test_prefills_that_always_fail(model: NllbModel, pool: list[Solo]) -> None:
    """Who runs already runs on."""
    long = next(one for one in pool if len(one.ids) > 12)
    with serving(model, prefill_interval=1) as engine, still_serving(engine, pool[:4]), Gate(at=2) as gate:
        running = engine.submit(replace(long.request, on_token=gate))
        gate.reach()
        with mock.patch.object(model._passes, "_prefill", broken()):
            handles = [engine.submit(one.request) for one in pool]
            gate.open()
            assert errors_of(handles, pool, "DeviceError: broken") == pool
        long.check(running)


def test_steps_that_always_fail(model: NllbModel, pool: list[Solo]) -> None:
    """Prefills work: each request gets its first token, which is all that some need."""
    with serving(model) as engine, still_serving(engine, pool[:4]):
        with mock.patch.object(model._passes, "decode", broken()):
            handles = [engine.submit(one.request) for one in pool]
            lost = errors_of(handles, pool, "DeviceError: broken")
        assert lost == [one for one in pool if len(one.ids) > 1]
        assert engine.stats().decoded_rows == 0
        assert all(handle.result().ids == one.tokens[:1] for one, handle in zip(pool, handles, strict=True))


def test_choices_that_always_fail(model: NllbModel, pool: list[Solo]) -> None:
    with serving(model) as engine, still_serving(engine, pool[:4]):
        with mock.patch.object(model, "sample_batch_to_feed", broken()):
            handles = [engine.submit(one.request) for one in pool]
            assert errors_of(handles, pool, "DeviceError: broken") == pool
        assert engine.stats().generated_tokens == 0


def test_a_request_whose_way_of_choosing_is_refused_is_lost_alone(model: NllbModel, pool: list[Solo]) -> None:
    begin = model.begin_sampling
    unlucky = next(one for one in pool if one.request.sampling.temperature > 0 and len(one.ids) > 3)

    def refuse(seq: SequenceState, params: SamplingParams) -> None:
        if params == unlucky.request.sampling:
            raise DeviceError("not this one")
        begin(seq, params)

    with serving(model) as engine, mock.patch.object(model, "begin_sampling", refuse):
        handles = [engine.submit(one.request) for one in pool]
        assert errors_of(handles, pool, "DeviceError: not this one") == [unlucky]


def test_a_request_that_fails_twice_in_one_step_fails_once(
    model: NllbModel, pool: list[Solo], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither can it say how it chooses, nor can anybody of its step choose."""
    with serving(model) as engine, still_serving(engine, pool[:4]):
        with (
            mock.patch.object(model, "begin_sampling", broken("begin")),
            mock.patch.object(model, "sample_batch_to_feed", broken("choose")),
        ):
            handles = [engine.submit(one.request) for one in pool[:8]]
            assert errors_of(handles, pool[:8], "DeviceError: ") == pool[:8]
        expected = ["begin" if one.request.sampling != GREEDY else "choose" for one in pool[:8]]
        assert [handle.result().error for handle in handles] == [f"DeviceError: {one}" for one in expected]
    assert caplog.messages == []


def test_waiting_for_a_step_fails(model: NllbModel, pool: list[Solo]) -> None:
    """The device says so when the tokens are read: all of the steps in flight are lost, and those who wait are not."""
    jobs = pool[:12]
    with serving(model, lag=2) as engine, still_serving(engine, pool[12:16]):
        with stopped(engine):
            handles = [engine.submit(one.request) for one in jobs]
            patch = mock.patch.object(model, "event_synchronize", FailOnce(model.event_synchronize, 3, "lost"))
            patch.start()
        lost = errors_of(handles, jobs, "DeviceError: lost")
        patch.stop()
    assert 0 < len(lost) <= 4


@pytest.mark.parametrize("order", ["in_order", "deferred"])
def test_work_that_fails_on_the_device(make_tiny: MakeModel, pool: list[Solo], order: Any) -> None:
    """A product raises as it runs: at the call, or, where work is deferred, when the tokens are waited for."""
    rng, hit = random.Random(order), 0
    model = make_tiny(open_host(order=order), max_batch=4, **LIMITS)
    jobs = pool[:8]
    for _ in range(6):
        fail_once = FailOnce(gemm_reference, rng.randrange(1, 400), "a product")
        with serving(model) as engine, still_serving(engine, pool[8:10]):
            with stopped(engine):
                handles = [engine.submit(one.request) for one in jobs]
                patch = mock.patch.object(product_calls, "gemm_reference", fail_once)
                patch.start()
            hit += len(errors_of(handles, jobs, "DeviceError: a product"))
            patch.stop()
    assert hit == 0 if order == "in_order" else hit > 0


@pytest.mark.parametrize("call", ["save_sequence_state", "restore_sequence_state"])
def test_a_move_that_fails_costs_one_request(cramped: NllbModel, long: list[Solo], pool: list[Solo], call: str) -> None:
    with serving(cramped) as engine, still_serving(engine, pool[:3]):
        with mock.patch.object(cramped, call, FailOnce(getattr(cramped, call), 2, "moved badly")):
            handles = [engine.submit(one.request) for one in long]
            [lost] = errors_of(handles, long, "DeviceError: moved badly")
        assert handles[long.index(lost)].result().ids, "it keeps what it had"


def test_the_engine_allocates_nothing_on_the_device(make_tiny: MakeModel, pool: list[Solo]) -> None:
    budget = Budget(1 << 40)
    model = make_tiny(open_host(faults=(budget,)), max_batch=4, **LIMITS)
    budget.limit = model.gpu.live_bytes()
    with serving(model) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in pool[:8]]:
            one.check(handle)


# logits that cannot be used


@pytest.mark.parametrize(("value", "by"), [(np.nan, 1), (np.inf, 1), (np.nan, 0)])
def test_one_request_with_logits_that_are_not_finite(model: NllbModel, solo: RunSolo, value: float, by: int) -> None:
    """Its keys and values are spoilt while it runs beside others, in a callback of its own or of another. Slot and KV
    are then used by somebody else."""
    requests = [ask(5 + index, max_new_tokens=16) for index in range(6)]
    tokens: list[int] = []
    with serving(model) as engine:

        def spoil(token: int) -> None:
            tokens.append(token)
            if len(tokens) == 4:
                [seq] = [one.seq for one in engine._worker._lanes if one.handle.request.prompt_tokens == (6,)]
                span = model._table.span(seq)
                model.gpu.copy_h2d(np.full(8, value, np.float32), span.target())

        with stopped(engine):
            handles = [
                engine.submit(replace(one, on_token=spoil) if i == by else one) for i, one in enumerate(requests)
            ]
        result = handles[1].result(PATIENCE)
        assert (result.finish_reason, result.error) == ("error", NOT_FINITE)
        assert result.ids == solo(requests[1]).ids[: len(result.ids)]
        assert by == 0 or result.ids == tokens
        assert len(result.ids) in (4, 5), "a step may have been in flight"
        for i in (0, 2, 3, 4, 5):
            solo(requests[i]).check(handles[i])
        assert engine.stats().generated_tokens == sum(handle.length - 1 for handle in handles) + 1


def test_one_request_that_may_choose_nothing(model: NllbModel, pool: list[Solo]) -> None:
    nothing = ask(sampling=SamplingParams(suppress_tokens=tuple(range(97))))
    with serving(model) as engine:
        handles = [engine.submit(one.request) for one in pool[:6]]
        result = engine.submit(nothing).result(PATIENCE)
        assert (result.ids, result.finish_reason, result.error) == ([], "error", NO_CHOICE)
        for one, handle in zip(pool, handles, strict=False):
            one.check(handle)
        assert engine.stats().generated_tokens == sum(handle.length - 1 for handle in handles)
