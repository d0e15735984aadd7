# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ranges that a model opens for a profiler: which there are, how they nest, and none where the backend has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.config import Config
from gpu_runtime.cuda import open_cuda
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import Fault
from gpu_runtime.host import HostBackend
from metrale.bench.beams import Searches
from metrale.bench.decode import Batch
from metrale.bench.protocol import Lengths
from metrale.bench.serving import FedBatch, generate
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.nllb.model import NllbModel
from tests.gpu_runtime.recording import RecordedRanges

LENGTHS = Lengths(5, 8)
LAYERS = [f"layer {index}" for index in range(SHAPES["tiny"].layers)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(place, SHAPES["tiny"], "float32")
    return place


class NoAttention(Fault):
    """The decoder's attention cannot be enqueued."""

    def call(self, name: str, what: str) -> None:
        if what.startswith("decode_attention"):
            raise DeviceError("no more")


def ranges_of(
    folder: Path,
    work: Callable[[NllbModel, RecordedRanges], None],
    *,
    step_graphs: bool = False,
    faults: Sequence[Fault] = (),
) -> RecordedRanges:
    """Do work on a model whose backend has ranges, and return them."""
    with HostBackend(faults=faults) as gpu:
        gpu.ranges = ranges = RecordedRanges()
        limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 16, "max_new_tokens": 10}
        with metrale.load(folder, gpu, "float32", step_graphs=step_graphs, **limits) as model:
            work(model, ranges)
    assert ranges.opened == []
    return ranges


def step(*names: str) -> list[tuple[str, ...]]:
    """The ranges of a decode step with these in its pass."""
    return [("decode step",), ("decode step", "decoder pass"), *(("decode step", "decoder pass", one) for one in names)]


def test_a_prefill_and_a_step(folder: Path) -> None:
    def work(model: NllbModel, ranges: RecordedRanges) -> None:
        with FedBatch(model, 2, LENGTHS) as batch:
            batch.prefill()
            batch.sample()
            batch.feed()

    prefill = [
        ("prefill",),
        *(("prefill", "encoder pass", *inner) for inner in ((), *((one,) for one in LAYERS))),
        ("prefill", "encoder pass", "cross keys and values"),
        *(("prefill", "prefix pass", *inner) for inner in ((), ("table",), *((one,) for one in LAYERS), ("head",))),
    ]
    found = ranges_of(folder, work).paths
    assert found == [*prefill, ("sample",), *step("table", *LAYERS, "head"), ("sample",)]


def test_a_replayed_step_shows_no_layers(folder: Path) -> None:
    """Its launches are enqueued when it is captured, the second time that its kind comes, and not again."""

    def work(model: NllbModel, ranges: RecordedRanges) -> None:
        with Batch(model, 4, LENGTHS) as batch:
            tokens = batch.choose(batch.prefill())
            ranges.paths.clear()
            for _ in range(3):
                batch.decode(tokens)

    captured = step("table", *LAYERS, "head")
    assert ranges_of(folder, work, step_graphs=True).paths == [*captured, *captured, *step("table")]


def test_choices_of_other_kinds(folder: Path) -> None:
    def work(model: NllbModel, ranges: RecordedRanges) -> None:
        with Batch(model, 1, LENGTHS) as batch:
            batch.choose(batch.prefill())
        with Searches(model, 1, 2, LENGTHS) as searches:
            searches.begin()

    labels = {path[-1] for path in ranges_of(folder, work).paths if len(path) == 1}
    assert labels == {"prefill", "argmax", "select beams"}


def test_a_step_that_fails_closes_its_ranges(folder: Path) -> None:
    def work(model: NllbModel, ranges: RecordedRanges) -> None:
        with Batch(model, 1, LENGTHS) as batch:
            with pytest.raises(DeviceError, match="no more"):
                batch.prefill()
            assert ranges.paths[-1] == ("prefill", "prefix pass", "layer 0")
            assert ranges.opened == []

    ranges_of(folder, work, faults=[NoAttention()])


def test_without_ranges_a_model_is_as_it_is(folder: Path) -> None:
    with (
        HostBackend() as gpu,
        metrale.load(folder, gpu, "float32", max_batch=4, max_source_len=16, max_new_tokens=10) as model,
    ):
        for part in (model._passes, model._passes._decoder, model._passes._encoder, model._feed, model._logits):
            assert not any(callable(value) and hasattr(value, "__wrapped__") for value in vars(part).values())


@pytest.mark.gpu
def test_a_gpu_computes_the_same_under_nvtx_ranges(folder: Path) -> None:
    found = []
    for nvtx in (False, True):
        with (
            open_cuda(0, config=Config(nvtx=nvtx)) as gpu,
            metrale.load(folder, gpu, "float32", max_batch=4, max_source_len=16, max_new_tokens=10) as model,
        ):
            assert (gpu.ranges is not None) == nvtx
            found.append(generate(model, 2, 8, LENGTHS)[1])
    assert found[0] == found[1]
