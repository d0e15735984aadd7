# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sampling through the engine: what `SamplingParams` says, whatever else the engine does meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from metrale.engine import Engine, Request
from metrale.model import GREEDY, SamplingParams
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.draws import draws
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate
from tests.engine.serving import EOS, LIMITS, ask, serving, stopped

pytestmark = host_only

WORDS = tuple((first, (7 * first + step) % 97) for first in range(97) for step in range(3))
"""After each id, three that may not follow."""

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 4.0},
    "top-k": {"temperature": 3.0, "top_k": 5},
    "top-k 1": {"temperature": 3.0, "top_k": 1},
    "top-k of more than there are": {"temperature": 1.0, "top_k": 1000},
    "top-p": {"temperature": 3.0, "top_p": 0.5},
    "min-p": {"temperature": 3.0, "min_p": 0.2},
    "all three": {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "penalty": {"repetition_penalty": 1.5},
    "bonus": {"repetition_penalty": 0.7},
    "1-grams": {"no_repeat_ngram_size": 1},
    "2-grams": {"no_repeat_ngram_size": 2},
    "3-grams": {"no_repeat_ngram_size": 3, "temperature": 0.5},
    "bad words": {"bad_words": WORDS},
    "bans": {"suppress_tokens": (21, 26, 71, 81)},
    "bans, warm": {"suppress_tokens": tuple(range(0, 97, 2)), "temperature": 1.0},
    "everything": {
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": (21, 26),
        "bad_words": WORDS,
        "min_new_tokens": 6,
    },
}
"""Parameters by what they are to show, but for the seed."""

HISTORIC = ("penalty", "2-grams", "everything", "temperature", "bans, warm", "bad words")
"""Kinds that need one thing each after a move: history, n-grams, all of it, the position, bans, words."""


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=4, **LIMITS)


def of_kind(solo: RunSolo, kind: str, count: int, **options: Any) -> list[Solo]:
    """Return requests of a kind, each with a prompt and a seed of its own, that come to the same in any company."""
    rng = random.Random(kind)
    found: list[Solo] = []
    while len(found) < count:
        sampling = SamplingParams(**KINDS[kind], seed=rng.getrandbits(64))
        prompt = [rng.randrange(4, 80) for _ in range(rng.randint(1, 8))]
        one = solo(ask(*prompt, sampling=sampling, **options))
        if one.clear:
            found.append(one)
    return found


@pytest.fixture(scope="module")
def mixed(solo: RunSolo) -> list[Solo]:
    """A request of every kind."""
    return [one for kind in KINDS for one in of_kind(solo, kind, 1, max_new_tokens=9)]


def ids_of(engine: Engine, request: Request) -> list[int]:
    return engine.submit(request).result(PATIENCE).ids


# what the parameters say


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_that_numpy_chooses(model: NllbModel, solo: RunSolo, kind: str) -> None:
    """Of logits from single calls, in float64. Some of them are not what a greedy request gets, or it shows nothing."""
    jobs = of_kind(solo, kind, 4, eos_ids=EOS if kind == "everything" else ())
    with serving(model) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
            one.check(handle)
    greedy = [solo(replace(one.request, sampling=GREEDY)).ids for one in jobs]
    assert ([one.ids for one in jobs] == greedy) == (kind == "top-k 1")


def test_a_temperature_of_zero_is_greedy_whatever_else_is_given(model: NllbModel, solo: RunSolo) -> None:
    sampling = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5, seed=9)
    with serving(model) as engine:
        assert ids_of(engine, ask(sampling=sampling)) == solo(ask()).ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_is_withheld_until_there_are_enough(model: NllbModel, solo: RunSolo, temperature: float) -> None:
    """Parameters without EOS ids of their own mean the request's."""
    jobs = []
    for seed in range(7):
        free = solo(ask(5 + seed, max_new_tokens=16, sampling=SamplingParams(temperature=temperature, seed=seed)))
        sampling = SamplingParams(temperature=temperature, seed=seed, min_new_tokens=10)
        jobs.append(solo(replace(free.request, eos_ids=frozenset({free.ids[2], free.ids[5]}), sampling=sampling)))
    jobs = [one for one in jobs if one.clear]
    assert len(jobs) > 3
    with serving(model) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
            one.check(handle)
            assert handle.result().length >= 10 + (handle.result().finish_reason == "eos")
    without = [solo(replace(one.request, sampling=replace(one.request.sampling, min_new_tokens=0))) for one in jobs]
    assert all(len(one.ids) <= 3 for one in without), "they would have ended at once"


def test_least_tokens_mean_nothing_where_no_id_ends(model: NllbModel, solo: RunSolo) -> None:
    with serving(model) as engine:
        assert ids_of(engine, ask(sampling=SamplingParams(min_new_tokens=5))) == solo(ask()).ids


def test_eos_ids_of_the_parameters_are_the_ones_that_are_withheld(model: NllbModel, solo: RunSolo) -> None:
    """And not those of the request, which may end it."""
    ended = 0
    with serving(model) as engine:
        for seed in range(7):
            free = solo(ask(5 + seed, max_new_tokens=16, sampling=SamplingParams(temperature=1.0, seed=seed)))
            sampling = replace(free.request.sampling, eos_ids=(free.ids[0],), min_new_tokens=6)
            forced = solo(replace(free.request, sampling=sampling))
            one = solo(replace(forced.request, eos_ids=frozenset({forced.ids[2]})))
            if one.clear:
                handle = engine.submit(one.request)
                one.check(handle)
                assert free.ids[0] not in handle.result().ids[:5]
                ended += handle.result().finish_reason == "eos"
    assert ended > 3


def test_seeds(model: NllbModel) -> None:
    """The same seed is the same text, whenever; others differ, those that differ in their upper half alone as well."""
    sampling = SamplingParams(temperature=1.0)
    seeds = [0, 1, 2, 1 << 31, 1 << 32, 1 << 33, 1 << 63, (1 << 64) - 1]
    requests = [ask(sampling=replace(sampling, seed=seed)) for seed in seeds]
    with serving(model) as engine:
        first = [engine.submit(request) for request in requests]
        again = [engine.submit(request) for request in reversed(requests)]
        texts = [tuple(handle.result(PATIENCE).ids) for handle in first]
        assert [tuple(handle.result(PATIENCE).ids) for handle in reversed(again)] == texts
    assert len(set(texts)) == len(seeds)
    with serving(model, max_lanes=1) as engine:
        assert tuple(ids_of(engine, requests[3])) == texts[3]


# what they do not depend on


@pytest.mark.parametrize("seed", draws(range(6), 2))
def test_company_arrival_lanes_and_lag_change_nothing(model: NllbModel, mixed: list[Solo], seed: int) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(len(mixed)), len(mixed))
    options = {"max_lanes": rng.randint(1, 4), "lag": seed % 4, "prefill_interval": rng.randint(1, 4)}
    with serving(model, **options) as engine:
        with stopped(engine):
            handles = {index: engine.submit(mixed[index].request) for index in order[: rng.randint(1, len(mixed))]}
        for index in order[len(handles) :]:
            handles[index] = engine.submit(replace(mixed[index].request, priority=rng.choice((0, 2))))
        for index, one in enumerate(mixed):
            one.check(handles[index])


@pytest.mark.parametrize("kind", HISTORIC)
@pytest.mark.parametrize("at", draws([4, 1], 1))
def test_being_moved_out_in_the_middle_changes_nothing(model: NllbModel, solo: RunSolo, kind: str, at: int) -> None:
    """Another request has its slot meanwhile, and samples as well."""
    low, high = of_kind(solo, kind, 2, max_new_tokens=16)
    with serving(model, max_lanes=1, prefill_interval=1) as engine, Gate(at=at) as gate:
        handle = engine.submit(replace(low.request, on_token=gate))
        gate.reach()
        urgent = engine.submit(replace(high.request, priority=1))
        gate.open()
        high.check(urgent)
        low.check(handle)
        assert engine.stats().preemptions == 1


def test_whoever_had_the_slot_before_leaves_nothing(model: NllbModel, mixed: list[Solo], solo: RunSolo) -> None:
    """One slot; between requests of all kinds, one that asks for nothing."""
    plain = solo(ask())
    jobs = [job for one in mixed for job in (one, plain)]
    with serving(model, max_lanes=1) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
            one.check(handle)


def test_restarts_change_nothing(make_tiny: MakeModel, mixed: list[Solo]) -> None:
    """Another engine on the same model, and one on a model of another size."""
    model, other = make_tiny(max_batch=3, **LIMITS), make_tiny(max_batch=7, **LIMITS)
    for one_model, jobs in ((model, mixed), (model, mixed[::-1]), (other, mixed)):
        with serving(one_model) as engine:
            for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
                one.check(handle)
