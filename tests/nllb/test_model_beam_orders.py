# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever order a device runs the work in, within what streams and events allow: searches find the same.

As `tests.nllb.test_model_orders` has it for everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import metrale
from metrale import BeamReq, Hypothesis
from metrale.nllb.model import NllbModel
from tests.draws import draws
from tests.nllb.beam_programs import BeamProgram, assert_search_as_alone
from tests.nllb.by_rows import Unhurried
from tests.nllb.lanes import LIMITS, assert_as_alone
from tests.nllb.searching import alone
from tests.reference.tiny import write_tiny

PROGRAMS = range(3)
ORDERS: list[tuple[str, int]] = [("deferred", 0), *(("adversarial", seed) for seed in range(6))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer a side, so that much can be tried in little time."""
    return write_tiny(tmp_path_factory.mktemp("orders") / "model", 5, encoder_layers=1, decoder_layers=1)


@contextmanager
def opened(folder: Path, order: str, seed: int) -> Iterator[NllbModel]:
    with Unhurried(order=order, seed=seed) as gpu, metrale.load(folder, gpu, "float32", **LIMITS) as model:
        yield model


REQS = [
    BeamReq([5, 6], 80, 81, num_beams=3, max_new=6, num_return_sequences=2, eos_ids=(2, 11, 12, 13)),
    BeamReq([7], 82, 83, num_beams=1, max_new=5, suppress_tokens=(9, 10)),
    *(
        BeamReq([20 + i, 8], 60 + i, 90 - i, num_beams=1 + i % 4, max_new=3 + i % 6, no_repeat_ngram_size=1)
        for i in range(7)
    ),
    BeamReq([8, 9, 10], 84, 85, num_beams=2, max_new=5, prefix_tokens=(40, 41)),
]


@pytest.mark.parametrize(("order", "seed"), draws(ORDERS, 2))
def test_whole_searches_in_any_order(folder: Path, order: str, seed: int) -> None:
    """The host is a step ahead of the device; requests come and go as there is room. Each finds what it finds alone."""
    with opened(folder, "in_order", seed) as model:
        expected = model.generate_beams(REQS)
        lone = [alone(model, req) for req in REQS]
    assert ids_of(expected) == ids_of(lone)
    with opened(folder, order, seed) as model:
        for _ in range(2):
            assert repr(model.generate_beams(REQS)) == repr(expected)


def ids_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[one.ids for one in hypotheses] for hypotheses in found]


def run(folder: Path, program: int, order: str, seed: int) -> BeamProgram:
    with opened(folder, order, seed) as model:
        made = BeamProgram(model, program)
        made.run()
    return made


@pytest.fixture(scope="module")
def in_order(folder: Path) -> Callable[[int], BeamProgram]:
    """A function that returns a program which has run in the order of its calls."""
    return functools.cache(lambda program: run(folder, program, "in_order", 0))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("order", "seed"), draws(ORDERS, 2))
def test_the_same_bits_in_any_order(
    folder: Path, in_order: Callable[[int], BeamProgram], program: int, order: str, seed: int
) -> None:
    expected, made = in_order(program), run(folder, program, order, seed)
    assert [search.taken for search in made.searches] == [search.taken for search in expected.searches]
    for number, (one, other) in enumerate(zip(made.results, expected.results, strict=True)):
        assert one.tobytes() == other.tobytes(), f"result {number}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_everything_is_what_it_is_alone(folder: Path, in_order: Callable[[int], BeamProgram], program: int) -> None:
    """Else a program that hands one's row to another would be wrong in every order alike."""
    made = in_order(program)
    assert sum(search.taken is not None for search in made.searches) >= 6
    with opened(folder, "in_order", 0) as model:
        for lane in made.lanes:
            assert_as_alone(model, lane, made.results)
        for search in made.searches:
            assert_search_as_alone(model, search, made.results)
