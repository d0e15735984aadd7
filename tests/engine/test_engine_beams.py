# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests that are searched with beams, beside others: each finds what it finds alone, and it is counted."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from metrale.engine import Request
from metrale.model import BeamParams, SamplingParams
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo, RunSought
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate
from tests.engine.searches import Sought, draw_search, seek
from tests.engine.serving import EOS, LIMITS, PaddingHost, ask, serving, stopped

pytestmark = [host_only, pytest.mark.usefixtures("by_rows")]


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=6, **LIMITS)


@pytest.fixture(scope="module")
def searches(sought: RunSought) -> list[Sought]:
    """Twelve searches of any kind."""
    rng = random.Random(8)
    found = [sought(draw_search(rng, 4)) for _ in range(12)]
    assert {one.reason for one in found} == {"eos", "length"}
    return found


# what a search finds


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_searches_among_others(model: NllbModel, searches: list[Sought], pool: list[Solo], lag: int) -> None:
    jobs: list[Solo | Sought] = [*searches, *pool[:12]]
    random.Random(lag).shuffle(jobs)
    with serving(model, lag=lag, prefill_interval=2) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
            one.check(handle)
        stats = engine.stats()
    assert stats.mixed_steps > 3
    assert stats.preemptions == 0


def test_the_result_of_a_search(model: NllbModel, sought: RunSought) -> None:
    request = seek(5, 6, beams=4, eos_ids=EOS, logprobs=True)
    request = replace(request, beams=BeamParams(4, num_return_sequences=3))
    with serving(model) as engine:
        handle = engine.submit(request)
        result = handle.result(PATIENCE)
        sought(request).check_result(result)
    assert result.hypotheses is not None
    best = result.hypotheses[0]
    assert len(result.hypotheses) == 3
    assert [one.score for one in result.hypotheses] == sorted((one.score for one in result.hypotheses), reverse=True)
    assert best.ids[0] == request.tgt_lang_id
    assert result.logprobs == best.logprobs[1:]
    assert result.logprob == pytest.approx(sum(best.logprobs))
    assert result.score == pytest.approx(result.logprob / result.length), "a length penalty of 1"
    result.hypotheses.clear()
    assert len(handle.result().hypotheses or ()) == 3, "each result is a copy"


def test_a_search_says_its_log_probabilities_only_if_asked(model: NllbModel) -> None:
    with serving(model) as engine:
        result = engine.submit(seek()).result(PATIENCE)
    assert result.logprobs is None
    assert math.isnan(result.logprob)
    assert result.score < 0


def test_one_beam_is_greedy(model: NllbModel, pool: list[Solo]) -> None:
    greedy = [one for one in pool if one.request.sampling.temperature == 0][:6]
    with serving(model) as engine:
        handles = [engine.submit(replace(one.request, beams=BeamParams(1))) for one in greedy]
        for one, handle in zip(greedy, handles, strict=True):
            one.check(handle)
            assert handle.result().hypotheses is None


def test_the_score_without_beams(model: NllbModel) -> None:
    """That of transformers, with a length penalty of 1."""
    with serving(model) as engine:
        scored, bare = (engine.submit(ask(logprobs=asked)).result(PATIENCE) for asked in (True, False))
    assert scored.score == scored.logprob / scored.length
    assert scored.length == 12
    assert math.isnan(bare.score)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(min_new_tokens=8), "eos_ids": EOS},
        {"sampling": SamplingParams(min_new_tokens=8)},
        {"sampling": SamplingParams(min_new_tokens=8, eos_ids=(7, 14))},
        {"sampling": SamplingParams(min_new_tokens=8, eos_ids=(7, 14)), "eos_ids": EOS},
        {"sampling": SamplingParams(forced_eos_id=2), "eos_ids": frozenset({2})},
        {"sampling": SamplingParams(forced_eos_id=50)},
        {"sampling": SamplingParams(bad_words=((21,), (26, 71), (71, 26)), no_repeat_ngram_size=2)},
        {"sampling": SamplingParams(top_k=1, top_p=0.1, seed=4)},
        {"prefix_tokens": (9, 10)},
        {"prefix_tokens": (2,), "eos_ids": EOS, "max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": None},
        {"max_new_tokens": None, "prefix_tokens": (9, 10)},
    ],
    ids=str,
)
def test_what_is_asked_of_a_search(model: NllbModel, sought: RunSought, options: dict[str, Any]) -> None:
    request = seek(5, 6, **options)
    one = sought(request)
    assert len(one.chosen) + one.request.counted_from <= one.request.most_tokens
    if options.get("max_new_tokens", 0) is None:
        assert one.request.most_tokens == 24 - (3 if "prefix_tokens" in options else 0)
    with serving(model) as engine:
        one.check(engine.submit(request))


def test_eos_alone_is_no_bad_word(model: NllbModel, sought: RunSought, solo: RunSolo) -> None:
    """Neither for a search nor for who chooses one token after the other, as in transformers."""
    ended = 0
    with serving(model) as engine:
        for seed in range(6):
            free = solo(ask(5 + seed))
            ending = free.ids[3]
            sampling = SamplingParams(bad_words=((ending,), (free.ids[1], 90)))
            one = solo(replace(free.request, eos_ids=frozenset({ending}), sampling=sampling))
            if one.clear:
                one.check(engine.submit(one.request))
                ended += one.reason == "eos"
            request = replace(one.request, beams=BeamParams(2))
            sought(request).check(engine.submit(request))
    assert ended > 2


def test_a_search_for_the_language_token_alone(model: NllbModel) -> None:
    with serving(model) as engine:
        handle = engine.submit(seek(max_new_tokens=1))
        assert handle.done
        result = handle.result()
        assert engine.stats().steps == 0
    assert (result.ids, result.finish_reason, result.length, result.hypotheses) == ([], "length", 1, None)


# prefixes


def test_prefixes_without_beams(model: NllbModel, solo: RunSolo) -> None:
    """The ids that NumPy chooses; what is given does not count."""
    rng, jobs = random.Random(2), list[Solo]()
    while len(jobs) < 16:
        prefix = [rng.randrange(4, 80) for _ in range(rng.randint(1, 5))]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            repetition_penalty=rng.choice((1.0, 1.4)),
            no_repeat_ngram_size=rng.choice((0, 2)),
            min_new_tokens=rng.choice((0, 3)),
            forced_eos_id=rng.choice((None, 2)),
            seed=rng.getrandbits(32),
        )
        most = rng.choice((1, 2, 6, 24 - 1 - len(prefix)))
        one = solo(ask(rng.randrange(4, 80), prefix_tokens=prefix, sampling=sampling, max_new_tokens=most, eos_ids=EOS))
        if one.clear:
            jobs.append(one)
    with serving(model, prefill_interval=1) as engine:
        handles = [engine.submit(replace(one.request, logprobs=True)) for one in jobs]
        for one, handle in zip(jobs, handles, strict=True):
            one.check(handle)
            assert len(handle.result().logprobs or ()) == handle.result().length == len(one.ids)
        stats = engine.stats()
    assert stats.generated_tokens == sum(len(one.ids) for one in jobs)
    assert stats.prompt_tokens == len(jobs)


@pytest.mark.parametrize("beams", [1, 3])
def test_the_longest_prefix(model: NllbModel, solo: RunSolo, sought: RunSought, beams: int) -> None:
    """With the language, and one token after it, it is as long as the model's targets may be."""
    request = ask(5, prefix_tokens=range(10, 32), max_new_tokens=None, beams=BeamParams(beams))
    with serving(model) as engine:
        handle = engine.submit(request)
        assert handle.request.most_tokens == 1
        result = handle.result(PATIENCE)
    if beams == 1:
        solo(handle.request).check_result(result)
    else:
        sought(request).check_result(result)
    assert len(result.ids) == result.length == 1


# its tokens come together, at the end


def test_the_tokens_of_a_search_come_together(model: NllbModel, sought: RunSought) -> None:
    told: list[int] = []
    request = seek(5, 6, max_new_tokens=16)
    with serving(model) as engine, Gate(at=8) as gate:
        with stopped(engine):
            handle = engine.submit(replace(request, on_token=told.append))
            engine.submit(ask(7, max_new_tokens=16, on_token=gate))
        gate.reach()  # both have taken eight steps
        assert (handle.tokens, told, handle.first_token_at, handle.done) == ([], [], None, False)
        gate.open()
        ids = list(handle)
        sought(request).check(handle)
        assert ids == told == handle.result().ids
        assert handle.first_token_at is not None
        assert handle.finished_at is not None
        assert handle.admitted_at is not None
        assert handle.admitted_at < handle.first_token_at <= handle.finished_at


def test_searches_in_an_event_loop(model: NllbModel, searches: list[Sought]) -> None:
    async def read(one: Sought) -> None:
        handle = await engine.asubmit(one.request)
        assert [token async for token in handle] == one.tokens
        one.check_result(await handle)

    async def read_all() -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(read(one) for one in searches))

    with serving(model, max_queue=2) as engine:
        asyncio.run(read_all())


# what it counts as


@pytest.mark.parametrize("lag", [0, 2])
def test_a_search_is_counted(make_tiny: MakeModel, sought: RunSought, lag: int) -> None:
    """Three beams take steps of four rows; the first step is the prefill's, of one row for all."""
    model, request = make_tiny(PaddingHost(), max_batch=6, **LIMITS), seek(5, 6)
    with serving(model, lag=lag) as engine:
        sought(request).check(engine.submit(request))
        stats, text = engine.stats(), engine.prometheus()
    assert (stats.steps, stats.mixed_steps) == (11, 0), "the language is given"
    assert (stats.decoded_rows, stats.padded_rows) == (10 * 3, 10 * 1)
    assert (stats.generated_tokens, stats.prompt_tokens) == (11, 2)
    assert stats.time_to_first_token.count == stats.request_latency.count == stats.queue_wait.count == 1
    assert stats.finished["length"] == 1
    assert "metrale_decoded_rows_total 30" in text.splitlines()
    assert "metrale_generated_tokens_total 11" in text.splitlines()


def test_the_counts_of_searches_and_others_add_up(model: NllbModel, searches: list[Sought], pool: list[Solo]) -> None:
    """Without lag, rows are those that were needed: of a search, until its result was known."""
    jobs: list[Solo | Sought] = [*searches, *pool[:10]]
    with serving(model, lag=0) as engine:
        handles = [engine.submit(one.request) for one in jobs]
        for one, handle in zip(jobs, handles, strict=True):
            one.check(handle)
        stats = engine.stats()
    given = [handle.request.counted_from for handle in handles]
    assert stats.generated_tokens == sum(handle.length for handle in handles) - sum(given)
    assert stats.time_to_first_token.count == stats.queue_wait.count == len(jobs)
    assert sum(stats.finished.values()) == len(jobs)
    tokens = [handle for handle in handles if handle.request.beams is None]
    least = sum(handle.length - handle.request.counted_from - 1 for handle in tokens)
    most = least
    for one in searches:
        longest = max(len(found.ids) for found in one.found) - 1 - len(one.request.prefix_tokens)
        least += one.request.width * (longest - 1)
        most += one.request.width * (one.request.most_tokens - one.request.counted_from - 1)
    assert least <= stats.decoded_rows < most
    assert (stats.now.running, stats.now.waiting, stats.now.kv_used_bytes) == (0, 0, 0)


def test_the_lanes_of_a_search_are_counted(model: NllbModel) -> None:
    """And its KV: one source, and a target for each beam."""
    with serving(model) as engine, Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(seek(5, 6, 7)), engine.submit(ask(on_token=gate))]
        gate.reach()
        now = engine.stats().now
        assert (now.running, now.max_lanes, now.waiting) == (3 + 1, 6, 0)
        assert now.kv_used_bytes == (5 + 3 * 12 + 5 + 12) * 3 * 2 * 32 * 4
        assert "metrale_lanes_running 4" in engine.prometheus().splitlines()
        gate.open()
        for handle in handles:
            assert handle.result(PATIENCE).finish_reason == "length"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_search_that_ends_early_is_not_read_again(model: NllbModel, sought: RunSought, lag: int) -> None:
    """Steps in flight say once more that it has ended."""
    requests = itertools.islice(
        (one for one in (seek(5 + i, eos_ids=EOS, max_new_tokens=24) for i in range(20)) if _ends_early(sought, one)), 4
    )
    with serving(model, lag=lag) as engine:
        for request, handle in [(one, engine.submit(one)) for one in requests]:
            sought(request).check(handle)
        assert sum(engine.stats().finished.values()) == 4


def _ends_early(sought: RunSought, request: Request) -> bool:
    return max(len(one.ids) for one in sought(request).found) < request.most_tokens - 4
