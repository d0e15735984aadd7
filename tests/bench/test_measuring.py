# SPDX-License-Identifier: MIT OR Apache-2.0
"""Parts of a case that the command measures on a GPU alone; the paths are the host's as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.bench import beams, measuring
from metrale.bench.breakdown import recording
from metrale.bench.cases import Case
from metrale.bench.decode import Batch, Busy
from metrale.bench.floors import H200, Rates, floor_us
from metrale.bench.measuring import Bench, instruments
from metrale.bench.protocol import Lengths
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.bench.timing import open_device
from metrale.nllb.model import NllbModel

SPREAD = {"median", "min", "max", "n"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NllbModel, Bench]]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, SHAPES["tiny"], "float32")
    gpu: GpuBackend
    with (
        open_device("host") as gpu,
        instruments(gpu) as (clock, reader),
        metrale.load(folder, gpu, "float32", max_batch=4, max_source_len=16, max_new_tokens=18) as model,
    ):
        yield model, Bench(clock, reader, Busy(clock, reader), H200, 3)


@pytest.mark.parametrize("new", [1, 2, 3, 16])
def test_steps_of_every_length_stay_in_their_room(new: int, opened: tuple[NllbModel, Bench]) -> None:
    model, bench = opened
    lengths = Lengths(5, new)
    greedy = measuring.device_figures(model, 2, bench, lengths)
    searched = beams.step_times(model, 2, 2, bench.clock, bench.busy, bench.runs, lengths)
    if new < 3:
        assert greedy == searched == {}
        return
    assert set(greedy["device_step_ms"]) == set(greedy["host_enqueue_ms"]) == SPREAD
    assert greedy["device_step_ms"]["n"] == searched["step_device_ms"]["n"] == lengths.device_steps(bench.runs)


def test_a_floor_is_that_of_a_step_half_way(opened: tuple[NllbModel, Bench]) -> None:
    model, _ = opened
    lengths, rates = Lengths(5, 16), Rates(1e9, 1e12)
    with Batch(model, 3, lengths) as batch:
        tokens = batch.choose(batch.prefill())
        for _ in range(8):
            tokens = batch.choose(batch.decode(tokens))
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
    assert measuring.step_floor_us(model, Case(3, 1, lengths), rates) == pytest.approx(floor_us(step.calls, rates))
    alone, searched = (measuring.search_floor_us(model, Case(n, 2, lengths), rates) for n in (1, 2))
    assert searched > alone > measuring.step_floor_us(model, Case(1, 1, lengths), rates)


def test_small_weights_may_stay_in_the_l2() -> None:
    assert measuring.stays_in_l2(50 << 20)
    assert not measuring.stays_in_l2(1 << 30)
