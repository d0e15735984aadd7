# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many requests in one `generate_beams` call: each gets what it gets alone, to the bit.

`python -m tests.nllb FIRST LAST` runs more seeds than these.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metrale import BeamReq
from metrale.nllb.model import NllbModel
from tests.draws import draws, made
from tests.nllb import beam_mixes
from tests.nllb.adapters import Shelf
from tests.nllb.by_rows import device_by_rows
from tests.nllb.searching import alone, nothing_left, same

SEEDS = range(24)
ALWAYS = 8
LEAST = {"requests": 90, "at their limit": 60, "with fewer results than asked for": 3}
"""How often all seeds must make things happen, and a part of them in proportion."""

Outcome = Callable[[int], Counter[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NllbModel]]:
    with beam_mixes.opened(tmp_path_factory.mktemp("mixes")) as models:
        yield models


@pytest.fixture(scope="module")
def outcome(models: list[NllbModel]) -> Outcome:
    return functools.cache(lambda seed: beam_mixes.check(models, seed))


@pytest.mark.parametrize("seed", draws(SEEDS, ALWAYS))
def test_every_request_finds_what_it_finds_alone(outcome: Outcome, seed: int) -> None:
    outcome(seed)


def test_the_seeds_reach_everything(outcome: Outcome, pytestconfig: pytest.Config) -> None:
    seeds = made(pytestconfig, SEEDS, ALWAYS)
    total: Counter[str] = sum(map(outcome, seeds), Counter())
    part = len(seeds) / len(SEEDS)
    assert {event: total[event] for event, least in LEAST.items() if total[event] < int(least * part)} == {}
    reqs = [req for seed in SEEDS for req in beam_mixes.draw(seed)]
    widths = Counter(req.num_beams for req in reqs)
    assert {*range(1, 9), 16} == set(widths)
    assert all(sum(req.num_beams > 1 and bool(getattr(req, name)) for req in reqs) >= 5 for name in OPTIONS)
    assert {req.adapter_slot for req in reqs} == {-1, 0, 1, 2}


OPTIONS = ("prefix_tokens", "suppress_tokens", "bad_words_ids", "forced_eos_id", "min_new", "no_repeat_ngram_size")


def test_more_requests_than_lanes_queue(models: list[NllbModel]) -> None:
    """64 with four beams each, of which five fit at a time."""
    reqs = [
        BeamReq([5 + i % 60, 7, 9][: 1 + i % 3], 80, 60 + i % 37, num_beams=4, max_new=3 + i % 8, eos_ids=(2, i % 97))
        for i in range(64)
    ]
    with nothing_left(models[2]):
        together = models[2].generate_beams(reqs)
    for req, found in zip(reqs, together, strict=True):
        assert same(found, alone(models[0], req))


def test_two_hundred_tokens_beside_short_requests(tmp_path_factory: pytest.TempPathFactory) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("long"), encoder_layers=1, decoder_layers=1)
    long = BeamReq([5, 6], 80, 81, num_beams=3, max_new=200, min_new=200, no_repeat_ngram_size=3)
    short = [BeamReq([9, i], 80, 82, num_beams=2, max_new=9, eos_ids=(i, 11)) for i in range(20, 32)]
    with device_by_rows() as gpu, shelf.load(gpu, max_batch=8, max_new_tokens=200) as model:
        together = model.generate_beams([short[0], long, *short[1:]])
        [best] = together[1]
        assert len(best.ids) == 200
        for req, found in zip([short[0], long, *short[1:]], together, strict=True):
            assert same(found, alone(model, req))


@pytest.mark.parametrize("early", [False, True, "never"])
def test_64_beams_of_a_vocabulary_that_is_smaller_than_twice_as_many(
    tmp_path_factory: pytest.TempPathFactory, early: Any
) -> None:
    """A row has 97 candidates, where a selection asks for 128, or with three ends for 256."""
    shelf = Shelf(tmp_path_factory.mktemp("wide"), encoder_layers=1, decoder_layers=1)
    wide: dict[str, Any] = {"num_beams": 64, "num_return_sequences": 64, "early_stopping": early}
    reqs = [
        BeamReq([5, 6], 80, 81, max_new=5, eos_ids=(2, 9, 11), **wide),
        BeamReq([7], 82, 83, max_new=4, num_beams=3),
        BeamReq([8, 9, 10], 84, 85, max_new=3, **wide),
    ]
    with device_by_rows() as gpu, shelf.load(gpu, max_batch=70) as model:
        together = model.generate_beams(reqs)
        assert len({tuple(one.ids) for one in together[2]}) == len(together[2]) == 64
        for req, found in zip(reqs, together, strict=True):
            assert same(found, alone(model, req))
            assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
