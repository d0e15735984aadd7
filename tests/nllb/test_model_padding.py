# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode steps that are padded to the rungs of the batch ladder: more rows, and nothing else that anyone can see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.host import HostBackend
from metrale.errors import InvalidInput
from metrale.model import BeamParams, FeedSource, PrefillSlice
from metrale.nllb.config import NllbConfig
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.model import NllbModel
from tests.nllb.backends import Padding
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, begin, block, changed_rows, head_product, prefilled, relative, sampled
from tests.nllb.searching import search, select, step
from tests.reference.tiny import tiny_config

ONE = Case([5, 6, 7], 80, 81, [])
POSITION = 3 * 2 * 32 * 4
COMPANY = 2e-6
"""Of the largest logit, as `tests.nllb.decoding.NEIGHBOURS` has it for the host: a padded batch is another matrix
shape, in which BLAS may sum in another order."""

RUNGS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512]


@pytest.fixture
def gpu() -> HostBackend:
    return Padding(check=True)


def cases(count: int) -> list[Case]:
    return [Case([5 + lane, 6, 7][: 1 + lane % 3], 80 - lane, 81, []) for lane in range(count)]


@pytest.mark.parametrize("max_batch", [1, 2, 3, 4, 5, 8, 13, 33, 100, 128, 129, 130, 192, 193, 300, 500])
def test_a_step_has_the_rows_of_the_next_rung_but_no_more_than_there_are_lanes(max_batch: int) -> None:
    shape = ModelShape(NllbConfig.from_dict(tiny_config()), 97, "f32", ServingLimits(max_batch, 4, 4), pad_batches=True)
    expected = [next(rung for rung in RUNGS if rung >= lanes) for lanes in range(1, max_batch + 1)]
    expected = [min(rows, max_batch) for rows in expected]
    assert [shape.step_rows(lanes) for lanes in range(1, max_batch + 1)] == expected
    assert shape.spare_rows == max(rows - lanes for lanes, rows in enumerate(expected, 1))
    plain = replace(shape, pad_batches=False)
    assert [plain.step_rows(lanes) for lanes in range(1, max_batch + 1)] == list(range(1, max_batch + 1))
    assert plain.spare_rows == 0


def test_the_model_says_how_many_rows_a_step_has(make_tiny: MakeModel) -> None:
    padded, plain = make_tiny(max_batch=7), make_tiny(HostBackend(), max_batch=7)
    assert [padded.step_rows(lanes) for lanes in range(1, 8)] == [1, 2, 4, 4, 7, 7, 7]
    assert [plain.step_rows(lanes) for lanes in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    wrong: list[Any] = [0, 8, -1, True, None, 2.0]
    for lanes in wrong:
        with pytest.raises(InvalidInput) as refused:
            padded.step_rows(lanes)
        assert refused.value.argument == "lanes"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limits", [{"max_batch": 7}, {"max_batch": 2}, {"max_batch": 1}, {"max_batch": 40}])
def test_the_plan_is_what_is_allocated(tiny_folder: Path, dtype: str, limits: dict[str, Any]) -> None:
    """It has KV for the rows that nobody owns, which an unpadded model does not need."""
    with Padding() as gpu, HostBackend() as plain:
        plan = metrale.memory_plan(tiny_folder, gpu, dtype, **limits)
        unpadded = metrale.memory_plan(tiny_folder, plain, dtype, **limits)
        spare = {7: 2, 2: 0, 1: 0, 40: 7}[limits["max_batch"]]
        size = spare * POSITION // (1 if dtype == "float32" else 2)
        assert plan.workspace - unpadded.workspace == -(-size // 256) * 256
        assert replace(plan, workspace=0) == replace(unpadded, workspace=0)
        with metrale.load(tiny_folder, gpu, dtype, **limits) as model:
            assert model.shape.spare_rows == spare
            assert model.memory_plan() == plan
            assert gpu.live_bytes() == plan.total
            assert {entry.tag: entry.nbytes for entry in gpu.alloc_report()}["workspace"] == plan.workspace


def steps(model: NllbModel, lanes: int, count: int) -> Iterator[np.ndarray]:
    """Yield the first rows after each of some steps, and free the sequences."""
    seqs = [prefilled(model, case) for case in cases(lanes)]
    for turn in range(count):
        model.decode_batch([9 + turn + lane for lane in range(lanes)], seqs)
        yield arena(model)[:lanes, :97]
    for seq in seqs:
        model.free_sequence(seq)


def test_the_logits_are_those_of_unpadded_steps(make_tiny: MakeModel) -> None:
    """Of any number of lanes; where nothing is added, they are the same bits."""
    padded, plain = make_tiny(max_batch=13), make_tiny(HostBackend(), max_batch=13)
    for lanes in range(1, 14):
        for one, other in zip(steps(padded, lanes, 3), steps(plain, lanes, 3), strict=True):
            assert relative(one, other) <= COMPANY
            if padded.step_rows(lanes) == lanes:
                assert one.tobytes() == other.tobytes()


def test_a_step_computes_the_rows_of_its_rung_and_the_head_only_its_lanes(make_tiny: MakeModel) -> None:
    model = make_tiny(max_batch=7)
    head = head_product(model)
    seqs = [prefilled(model, case) for case in cases(7)]
    for lanes in range(1, 8):
        with model.gpu.launch_trace() as trace:
            model.decode_batch([9] * lanes, seqs[:lanes])
        products = [record.name.split("x", 1) for record in trace if record.kind == "gemm"]
        assert {rows for rows, shape in products if shape != head} == {str(model.step_rows(lanes))}
        assert [rows for rows, shape in products if shape == head] == [str(lanes)]


def test_launches_depend_on_the_rung_alone_but_for_the_head(make_tiny: MakeModel) -> None:
    """Which is what padding is for: a few captured or prepared launches serve every number of lanes."""
    model = make_tiny(max_batch=8)
    head = head_product(model)
    seqs = [prefilled(model, case) for case in cases(8)]
    seen = set()
    for lanes in (5, 6, 7, 8):
        with model.gpu.launch_trace() as trace:
            model.decode_batch([9] * lanes, seqs[:lanes])
        seen.add(tuple((record.name, record.grid, record.block) for record in trace if head not in record.name))
    assert len(seen) == 1


def test_rows_past_the_lanes_stay_as_they_are(make_tiny: MakeModel) -> None:
    """A prefill may have written them a moment ago."""
    model = make_tiny(max_batch=7)
    seqs = [prefilled(model, case) for case in cases(7)]
    for lanes in (5, 3, 1, 6, 7):
        before = arena(model)
        model.decode_batch([9 + lanes] * lanes, seqs[:lanes])
        assert changed_rows(before, arena(model)) == list(range(lanes))
        for seq in seqs[:lanes]:
            seq.tokens.pop()
            seq.seq_len -= 1
    fresh = seqs.pop()
    slices = [PrefillSlice.whole(ONE.tokens, fresh)]
    alone = model.copy_logits_to_host(model.prefill_batch_chunk_rows(slices, 0, 5)[0])
    result = model.mixed_forward_batch([9] * 5, seqs[:5], slices)
    assert model.copy_logits_to_host(result.prefill_logits[0]).tobytes() == alone.tobytes()


def test_rows_that_nobody_owns_touch_no_sequences_kv(make_tiny: MakeModel) -> None:
    """Of the whole pool, a step changes the position of each lane's token, and nothing else."""
    model = make_tiny(max_batch=7)
    seqs = [prefilled(model, case) for case in cases(7)]
    model.free_sequence(seqs[6])
    positions = 12 + 9
    for lanes in (3, 5, 6):
        before = np.frombuffer(block(model.gpu, "KV cache"), np.uint8).reshape(-1, POSITION)
        expected = [
            seq.slot_idx * positions + len(case.src) + seq.seq_len
            for seq, case in islice(zip(seqs, cases(7), strict=True), lanes)
        ]
        model.decode_batch([9] * lanes, seqs[:lanes])
        after = np.frombuffer(block(model.gpu, "KV cache"), np.uint8).reshape(-1, POSITION)
        assert np.flatnonzero((before != after).any(axis=1)).tolist() == sorted(expected)


def test_fed_steps_are_padded_as_well(make_tiny: MakeModel) -> None:
    """The rows that nobody owns take no id from a cell."""
    padded, plain = make_tiny(max_batch=7), make_tiny(HostBackend(), max_batch=7)
    ids = []
    for model in (padded, plain):
        seqs = [begin(model, case) for case in cases(5)]
        slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases(5), seqs, strict=True)]
        base = model.prefill_batch_chunk_rows(slices)[0]
        ids.append([sampled(model, base, seqs).ids])
        for _ in range(4):
            with model.gpu.launch_trace() as trace:
                model.decode_batch_fed([FeedSource(sampled=True)] * 5, seqs)
            assert trace[1].grid[0] == model.step_rows(5)
            for seq in seqs:
                seq.seq_len += 1
            ids[-1].append(sampled(model, base, seqs).ids)
    assert ids[0] == ids[1]
    assert len({tuple(step) for step in ids[0]}) > 3


def test_steps_of_beams_are_padded_as_well(make_tiny: MakeModel) -> None:
    """Each beam's row writes its own position of the span, and a row that nobody owns none; it has no ancestors."""
    padded, plain = make_tiny(max_batch=7), make_tiny(HostBackend(), max_batch=7)
    found = []
    for model in (padded, plain):
        seqs = [search(model, BeamParams(beams)) for beams in (3, 2)]
        select(model, [row for _, row in seqs], [seq for seq, _ in seqs])
        for turn in range(4):
            before = np.frombuffer(block(model.gpu, "KV cache"), np.uint8).reshape(-1, POSITION)
            with model.gpu.launch_trace() as trace:
                base = step(model, [seq for seq, _ in seqs])
            assert trace[1].grid[0] == model.step_rows(5)
            after = np.frombuffer(block(model.gpu, "KV cache"), np.uint8).reshape(-1, POSITION)
            first = [5 + 2 + turn, 5 + 6 * 3 + 5 + 2 + turn]  # behind each one's source, and what was fed before
            expected = [start + 6 * beam for start, beams in zip(first, (3, 2), strict=True) for beam in range(beams)]
            assert np.flatnonzero((before != after).any(axis=1)).tolist() == expected
            select(model, [base, base.offset(3 * model.logits_row_bytes())], [seq for seq, _ in seqs])
        found.append([[one.ids for one in model.take_beams(seq)] for seq, _ in seqs])
    assert found[0] == found[1]
    assert [len(one) for one in found[0]] == [1, 1]
