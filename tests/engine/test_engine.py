# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine gives every request what it comes to alone, in whatever company, and says what it did."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import metrale
from metrale.engine import Engine, EngineStats, Request, RequestHandle
from metrale.errors import InvalidInput, NotSupported
from metrale.model import SamplingParams
from metrale.nllb.model import NllbModel
from tests.backends import Device, host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo, log_softmax
from tests.engine.patience import PATIENCE, Gate
from tests.engine.serving import LIMITS, PaddingHost, ask, draw_request, promising, serving, stopped
from tests.nllb.decoding import DEMO, GOLDEN, Case, company, forced
from tests.nllb.decoding import LIMITS as DEMO_LIMITS

pytestmark = host_only


@pytest.fixture(scope="module")
def demo(device: Device) -> Iterator[NllbModel]:
    """The demo model in float32 with 8 lanes."""
    with device.open() as gpu, metrale.load(DEMO, gpu, "float32", max_batch=8, **DEMO_LIMITS) as model:
        yield model


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=4, **LIMITS)


def translation(case: Case, **options: Any) -> Request:
    most = DEMO_LIMITS["max_new_tokens"]
    return Request(case.tokens, case.source, case.target, most, eos_ids=frozenset({2}), **options)


def decoder_ids(handle: RequestHandle, case: Case) -> list[int]:
    result = handle.result(PATIENCE)
    assert result.finish_reason == "eos"
    return [2, case.target, *result.ids, 2]


# what comes out


def test_golden_ids_of_more_requests_than_lanes(demo: NllbModel) -> None:
    """All cases, languages mixed, in an order of chance; the results are in the order of the handles."""
    cases = random.Random(0).sample(GOLDEN, len(GOLDEN))
    with serving(demo) as engine:
        handles = [engine.submit(translation(case)) for case in cases]
        assert [decoder_ids(handle, case) for handle, case in zip(handles, cases, strict=True)] == [
            case.ids for case in cases
        ]


def test_tokens_come_while_the_request_runs(model: NllbModel, solo: RunSolo) -> None:
    with serving(model) as engine, Gate(at=3) as gate:
        request = ask(on_token=gate)
        handle = engine.submit(request)
        gate.reach()
        tokens = iter(handle)
        assert [next(tokens) for _ in range(3)] == solo(request).ids[:3]
        assert not handle.done
        gate.open()
        assert list(tokens) == solo(request).ids[3:]
        solo(request).check(handle)


def test_tasks_of_an_event_loop(model: NllbModel, pool: list[Solo]) -> None:
    """Tasks submit, iterate and wait, more of them than the queue takes."""

    async def use(engine: Engine, one: Solo) -> None:
        handle = await engine.asubmit(one.request)
        assert [token async for token in handle] == one.tokens
        assert (await handle).finish_reason == one.reason
        one.check(handle)

    async def use_all(engine: Engine) -> None:
        await asyncio.gather(*(use(engine, one) for one in pool))

    with serving(model, max_queue=3) as engine:
        asyncio.run(use_all(engine))


def test_an_engine_of_an_event_loop(model: NllbModel, solo: RunSolo) -> None:
    """The loop goes on while the engine comes to its end."""

    async def use() -> list[RequestHandle]:
        turns = 0
        async with Engine(model) as engine:
            handles = [await engine.asubmit(ask(5 + index, max_new_tokens=24)) for index in range(6)]
            closing = asyncio.create_task(engine.aclose())
            while not closing.done():
                await asyncio.sleep(0)
                turns += 1
        assert turns > 10
        assert engine.closed
        return handles

    for index, handle in enumerate(asyncio.run(use())):
        assert handle.done
        solo(ask(5 + index, max_new_tokens=24)).check(handle)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_length(model: NllbModel, solo: RunSolo, lag: int) -> None:
    """A request for n tokens gets the language token and the first n - 1 of those that a longer one gets."""
    longest = solo(ask(max_new_tokens=6))
    with serving(model, lag=lag) as engine:
        for most in (1, 2, 3, 4, 5, 6):
            result = engine.submit(ask(max_new_tokens=most)).result(PATIENCE)
            assert (result.ids, result.finish_reason) == (longest.ids[: most - 1], "length")
            assert result.length == most


def test_a_request_for_the_language_alone_ends_at_once(model: NllbModel) -> None:
    """Also while nobody serves."""
    with serving(model, max_lanes=1, max_queue=1) as engine, Gate() as gate:
        engine.submit(ask(on_token=gate))
        gate.reach()
        engine.submit(ask())
        handle = engine.submit(ask(max_new_tokens=1, logprobs=True), block=False)
        assert handle.done
        assert list(handle) == []
        assert (handle.result().logprob, handle.result().logprobs) == (0, [])


def test_what_a_request_does_not_say_is_the_models(make_tiny: MakeModel, solo: RunSolo) -> None:
    """Its limit of tokens, the ids that end, and the languages that it was loaded with."""
    model = make_tiny(max_batch=2, source=80, target=81, **LIMITS)
    said = Request([5, 6], 80, 81, 24, eos_ids=frozenset({2}))
    with serving(model) as engine:
        solo(said).check(engine.submit(Request([5, 6])))
        solo(said).check(engine.submit(said))
        solo(replace(said, tgt_lang_id=83)).check(engine.submit(Request([5, 6], tgt_lang_id=83)))


def test_any_of_several_eos_ids_ends_a_request(model: NllbModel, solo: RunSolo) -> None:
    free = solo(ask(max_new_tokens=24))
    at = next(index for index, token in enumerate(free.ids) if index > 2 and token not in free.ids[:index])
    with serving(model) as engine:
        result = engine.submit(ask(max_new_tokens=24, eos_ids={free.ids[at], 96, 2})).result(PATIENCE)
    assert (result.ids, result.finish_reason, result.length) == (free.ids[:at], "eos", at + 2)


def test_on_token_gets_what_the_consumer_gets(model: NllbModel, pool: list[Solo]) -> None:
    seen: list[list[int]] = [[] for _ in pool]
    with serving(model) as engine:
        requests = [replace(one.request, on_token=seen[index].append) for index, one in enumerate(pool)]
        for one, handle in zip(pool, [engine.submit(request) for request in requests], strict=True):
            one.check(handle)
    assert seen == [one.tokens for one in pool]


# log-probabilities


def test_logprobs_are_the_log_softmax_of_the_logits(demo: NllbModel) -> None:
    """Those of the same ids in single calls, in requests that have company of some that do not ask for any.

    A logit differs by `company` of the largest one from that in single calls, and its log-softmax by twice that; the
    sum of 8,240 exponentials in float32 adds some 1e-6.
    """
    cases = GOLDEN[:12]
    with serving(demo) as engine:
        handles = [engine.submit(translation(case, logprobs=index % 3 > 0)) for index, case in enumerate(cases)]
        results = [handle.result(PATIENCE) for handle in handles]
    for index, (case, result) in enumerate(zip(cases, results, strict=True)):
        if index % 3 == 0:
            assert result.logprobs is None
            assert math.isnan(result.logprob)
            continue
        rows = forced(demo, case)
        expected = [log_softmax(row)[token] for row, token in zip(rows, case.ids[2:], strict=True)]
        tolerance = 2 * company(demo) * float(np.abs(rows).max()) + 5e-6
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=tolerance)
        assert result.logprob == sum(result.logprobs)
        assert result.length == 1 + len(result.logprobs)


def test_logprobs_are_of_the_unprocessed_logits(model: NllbModel, pool: list[Solo]) -> None:
    """Whatever penalty, temperature and top-k made of them. The tolerance is as above, of logits below 20."""
    with serving(model) as engine:
        for one, handle in [(one, engine.submit(replace(one.request, logprobs=True))) for one in pool]:
            one.check(handle)
            np.testing.assert_allclose(np.array(handle.result().logprobs), one.logprobs, rtol=0, atol=1e-4)


# what it refuses


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 25}, "max_new_tokens"),
        ({"eos_ids": {97}}, "eos_ids"),
        ({"src_lang_id": 97}, "src_lang_id"),
        ({"src_lang_id": 0}, "src_lang_id"),
        ({"tgt_lang_id": 0}, "tgt_lang_id"),
        ({"tgt_lang_id": 1000}, "tgt_lang_id"),
        ({"prompt_tokens": [5, 97]}, "prompt_tokens"),
        ({"prompt_tokens": [5] * 11}, "prompt_tokens"),
        ({"sampling": SamplingParams(suppress_tokens=(1, 97))}, "sampling.suppress_tokens"),
        ({"sampling": SamplingParams(bad_words=((1, 2), (3, 97)))}, "sampling.bad_words"),
        ({"sampling": SamplingParams(eos_ids=(97,))}, "sampling.eos_ids"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_name(model: NllbModel, options: dict[str, Any], name: str) -> None:
    request = replace(ask(), **options)
    with serving(model) as engine:
        with pytest.raises(InvalidInput) as caught:
            engine.submit(request)
        assert caught.value.argument == name
        with pytest.raises(InvalidInput, match=name):
            asyncio.run(engine.asubmit(request))
        assert engine.stats().submitted == 0


@pytest.mark.parametrize(
    ("given", "argument"), [({}, "src_lang_id"), ({"source": 80}, "tgt_lang_id"), ({"target": 81}, "src_lang_id")]
)
def test_a_language_may_be_left_out_only_where_there_is_a_default(
    make_tiny: MakeModel, given: dict[str, int], argument: str
) -> None:
    model = make_tiny(**given)
    with serving(model) as engine:
        with pytest.raises(InvalidInput) as caught:
            engine.submit(Request([5]))
        assert caught.value.argument == argument


def test_what_is_no_request_is_refused(model: NllbModel) -> None:
    with serving(model) as engine, pytest.raises(InvalidInput, match="request: expected a Request"):
        engine.submit([5, 6, 7])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_queue": 0}, "max_queue"),
        ({"max_queue": 1.0}, "max_queue"),
        ({"max_lanes": 5}, "max_lanes"),
        ({"max_lanes": 0}, "max_lanes"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
        ({"prefill_interval": 0}, "prefill_interval"),
        ({"lag": -1}, "lag"),
        ({"lag": True}, "lag"),
        ({"aging": 0}, "aging"),
    ],
)
def test_a_wrong_option_is_refused_by_name(model: NllbModel, options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Engine(model, **options)
    assert caught.value.argument == name


def test_what_is_no_model_is_refused(model: NllbModel) -> None:
    with pytest.raises(InvalidInput, match="model: expected a Model"):
        Engine(model.gpu)  # type: ignore[arg-type]


def test_a_model_without_a_feed_is_refused(model: NllbModel) -> None:
    with (
        mock.patch.object(model, "supports_device_token_feed", return_value=False),
        pytest.raises(NotSupported, match="NllbModel does not support Engine"),
    ):
        Engine(model)


def test_what_only_the_prefill_refuses_ends_that_request_alone(model: NllbModel, pool: list[Solo]) -> None:
    """An adapter that the model takes back, say: the others of the step go on."""
    with serving(model, prefill_interval=1) as engine, promising(model):
        for index in range(0, 12, 3):
            first, second = pool[index : index + 2]
            handles = [engine.submit(one) for one in (first.request, ask(adapter_slot=3), second.request)]
            result = handles[1].result(PATIENCE)
            assert (result.ids, result.finish_reason) == ([], "error")
            assert str(result.error).startswith("InvalidInput: adapter_slot: expected -1")
            first.check(handles[0])
            second.check(handles[2])


# what it says


def test_padded_rows_are_counted(make_tiny: MakeModel) -> None:
    """Three lanes take steps of four rows. They are prefilled together, and then decode four times."""
    model = make_tiny(PaddingHost(), **LIMITS)
    with serving(model) as engine:
        with stopped(engine):
            handles = [engine.submit(ask(4 + index, max_new_tokens=6)) for index in range(3)]
        for handle in handles:
            handle.result(PATIENCE)
        stats = engine.stats()
    assert (stats.steps, stats.mixed_steps) == (1 + 1 + 4, 0)
    assert (stats.decoded_rows, stats.padded_rows) == (4 * 3, 4 * 1)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_counts_add_up(model: NllbModel, lag: int) -> None:
    rng = random.Random(3)
    requests = [draw_request(rng) for _ in range(30)] + [ask(max_new_tokens=1)]
    with serving(model, lag=lag) as engine:
        handles = [engine.submit(request) for request in requests]
        results = [handle.result(PATIENCE) for handle in handles]
        stats = engine.stats()
        assert stats.now.running == stats.now.waiting == stats.now.swapped_out == 0
        assert (stats.now.max_lanes, stats.now.kv_used_bytes) == (4, 0)
        assert stats.now.device_live_bytes == model.gpu.live_bytes()
    assert stats.submitted == len(requests)
    reasons = [result.finish_reason for result in results]
    assert dict(stats.finished) == {reason: reasons.count(reason) for reason in stats.finished}
    assert stats.generated_tokens == sum(result.length - 1 for result in results)
    assert stats.prompt_tokens == sum(len(request.prompt_tokens) for request in requests[:-1])
    assert stats.request_latency.count == len(requests)
    assert stats.time_to_first_token.count == stats.queue_wait.count == len(requests) - 1
    rows = stats.decoded_rows + len(requests) - 1  # every prefill chooses a token, too
    assert rows == stats.generated_tokens if lag == 0 else rows >= stats.generated_tokens
    assert 0 < stats.mixed_steps < stats.steps
    assert stats.padded_rows == stats.preemptions == stats.rejected == 0


def test_what_is_in_the_engine_is_counted(model: NllbModel) -> None:
    with serving(model, max_lanes=2) as engine, Gate() as gate:
        for _ in range(5):
            engine.submit(ask(on_token=gate))
        gate.reach()
        stats = engine.stats()
        assert (stats.now.running, stats.now.max_lanes) in {(1, 2), (2, 2)}
        assert stats.submitted == 5 == stats.now.waiting + stats.now.running + sum(stats.finished.values())
        assert stats.now.kv_used_bytes == stats.now.running * (3 + 2 + 12) * 3 * 2 * 32 * 4


def test_prometheus_reads_what_stats_says(model: NllbModel) -> None:
    with serving(model) as engine:
        for handle in [engine.submit(ask(max_new_tokens=3)) for _ in range(6)]:
            handle.result(PATIENCE)
        text, stats = engine.prometheus({"model": "tiny"}), engine.stats()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r'(metrale_\w+)\{model="tiny"(?:,(\w+="[^"]*"))?\} (\S+)', line) for line in lines]
    samples = {(m[1], m[2]): float(m[3]) for m in matches if m is not None}
    assert len(samples) == len(lines) > 60
    assert samples["metrale_generated_tokens_total", None] == stats.generated_tokens == 12
    assert samples["metrale_requests_finished_total", 'reason="length"'] == 6
    assert samples["metrale_request_latency_seconds_count", None] == 6
    assert samples["metrale_steps_total", None] == stats.steps
    assert isinstance(stats, EngineStats)
