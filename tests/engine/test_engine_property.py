# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random arrivals, lengths, priorities, cancellations, evictions and orders of the device: every request yields what it
yields alone, and nothing is left behind.

`python -m tests.engine FIRST LAST` runs more seeds than these.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.draws import draws, made
from tests.engine.crowd import Crowd
from tests.engine.simulation import Simulation

SEEDS = range(40)
ALWAYS = 14

LEAST = {
    "length": 100,
    "eos": 25,
    "cancelled": 20,
    "error": 7,
    "no memory": 8,
    "beams length": 25,
    "beams eos": 5,
    "beams cancelled": 3,
    "beams no memory": 5,
    "beams error": 1,
    "prefix length": 50,
    "prefix eos": 15,
    "adapter length": 30,
    "adapter eos": 5,
    "too wide": 2,
    "stopped": 1,
    "mixed steps": 13,
    "preemptions": 10,
    "resumed": 7,
    "queue full": 200,
    "timeout": 3,
    "strangers": 17,
}
"""How often all seeds must make things happen, and a part of them in proportion. They do so twice as often, or more."""

outcome = functools.cache(lambda folder, seed: Simulation(folder, seed).run())


@pytest.mark.parametrize("seed", draws(SEEDS, ALWAYS))
def test_every_request_yields_what_it_yields_alone(tiny_folder: Path, seed: int) -> None:
    outcome(tiny_folder, seed)


def test_the_seeds_reach_everything(tiny_folder: Path, pytestconfig: pytest.Config) -> None:
    seeds = made(pytestconfig, SEEDS, ALWAYS)
    total: Counter[str] = sum((outcome(tiny_folder, seed) for seed in seeds), Counter())
    part = len(seeds) / len(SEEDS)
    assert {event: total[event] for event, least in LEAST.items() if total[event] < int(least * part)} == {}


def test_a_seed_is_one_run(tiny_folder: Path) -> None:
    """Otherwise a seed that fails says little."""
    assert Simulation(tiny_folder, 7).run() == outcome(tiny_folder, 7)


@pytest.mark.parametrize("seed", draws(range(6), 1))
def test_a_crowd_of_threads_and_loops(tiny_folder: Path, seed: int) -> None:
    assert Crowd(tiny_folder, seed).run()["length"] > 0
