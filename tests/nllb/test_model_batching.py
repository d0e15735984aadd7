# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sequence's logits do not depend on its neighbours, and a batch reads each weight once."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from gpu_runtime.handles import LaunchRecord
from metrale.model import PrefillSlice
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import (
    GOLDEN,
    Case,
    Rows,
    begin,
    company,
    forced,
    forced_together,
    head_product,
    prefilled,
    relative,
)


@pytest.fixture(scope="module")
def alone(demo_model: NllbModel) -> list[Rows]:
    return [forced(demo_model, case) for case in GOLDEN]


def groups(size: int, count: int) -> list[list[int]]:
    """Return ``count`` random groups of golden cases; over all of them, every case is in one at least."""
    rng = np.random.default_rng(size)
    pool: list[int] = []
    result = []
    for _ in range(count):
        if len(pool) < size:
            pool += [int(i) for i in rng.permutation(len(GOLDEN)) if i not in pool]
        result.append([pool.pop(0) for _ in range(size)])
    assert set().union(*result) == set(range(len(GOLDEN)))
    return result


@pytest.mark.parametrize(("size", "count"), [(7, 6), (32, 2)])
def test_the_same_logits_in_any_company(demo: NllbModel, alone: list[Rows], size: int, count: int) -> None:
    """Every lane of random groups, the first of 7 and the last of 32 too: the same ids and nearly the same logits."""
    for group in groups(size, count):
        for index, rows in zip(group, forced_together(demo, [GOLDEN[i] for i in group]), strict=True):
            assert relative(rows, alone[index]) <= company(demo), index
            assert rows.argmax(axis=1).tolist() == alone[index].argmax(axis=1).tolist() == GOLDEN[index].ids[2:]


@pytest.mark.parametrize(("size", "lane"), [(7, 0), (32, 31)])
def test_company_of_other_lengths_and_languages(demo: NllbModel, alone: list[Rows], size: int, lane: int) -> None:
    """The shortest and the longest source and the longest target, first of 7 and last of 32 different neighbours."""
    lengths = [len(case.tokens) for case in GOLDEN]
    targets = [len(case.ids) for case in GOLDEN]
    for index in {lengths.index(min(lengths)), lengths.index(max(lengths)), targets.index(max(targets))}:
        group = [i for i in range(len(GOLDEN)) if i != index][: size - 1]
        group.insert(lane, index)
        rows = forced_together(demo, [GOLDEN[i] for i in group])[lane]
        assert relative(rows, alone[index]) <= company(demo)


def random_cases(seed: int, count: int, longest: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [
        Case(rng.integers(3, 97, rng.integers(0, longest + 1)).tolist(), int(rng.integers(3, 97)), 60 + lane % 30, [])
        for lane in range(count)
    ]


def test_more_source_tokens_than_one_product_of_cross_keys_and_values(make_tiny: MakeModel) -> None:
    """2,413 source tokens in one pass; the keys and values are made 2,048 at a time."""
    model = make_tiny(max_batch=36, max_source_len=80)
    cases = [Case([3 + (i * 7 + j) % 90 for j in range(68 + i % 3)], 80 + i % 9, 60 + i, []) for i in range(34)]
    seqs = [begin(model, case) for case in cases]
    assert sum(len(case.src) for case in cases) > 2048 + 80
    with model.gpu.launch_trace() as trace:
        ptrs = model.prefill_batch_chunk([PrefillSlice.whole(c.tokens, s) for c, s in zip(cases, seqs, strict=True)])
    assert [record.name for record in trace if record.name.endswith("x192x32")] == ["2048x192x32", "365x192x32"]
    together = [model.copy_logits_to_host(ptr) for ptr in ptrs]
    for case, seq, row in zip(cases, seqs, together, strict=True):
        assert relative(row, model.copy_logits_to_host(model.prefill(case.tokens, seq))) <= company(model)


def shapes(trace: list[LaunchRecord]) -> Counter[str]:
    """Return how many launches of each kernel, and products of each ``n x k``, there were."""
    return Counter(r.name.split("x", 1)[1] if r.kind == "gemm" else r.name for r in trace)


def test_one_packed_encoder_pass_and_one_decoder_pass_serve_all_streams(make_tiny: MakeModel) -> None:
    """2 encoder layers of 4 products, the cross keys and values, 3 decoder layers of 6 products, and the head."""
    model = make_tiny(max_batch=7)

    @cache
    def launches(count: int) -> Counter[str]:
        cases = random_cases(count, count, 8)
        seqs = [begin(model, case) for case in cases]
        slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]
        with model.gpu.launch_trace() as trace:
            model.prefill_batch_chunk(slices)
        assert sum(record.kind == "gemm" for record in trace) == 2 * 4 + 1 + 3 * 6 + 1
        assert sum(record.kind == "copy" for record in trace) == 2
        for seq in seqs:
            model.free_sequence(seq)
        return shapes(trace)

    assert launches(1) == launches(7)


def test_each_weight_is_read_once_a_step(make_tiny: MakeModel) -> None:
    model = make_tiny(max_batch=32)
    seqs = [prefilled(model, case) for case in random_cases(0, 32, 10)]
    counts = []
    for lanes in (1, 32):
        with model.gpu.launch_trace() as trace:
            model.decode_batch([5] * lanes, seqs[:lanes])
        assert sum(record.kind == "gemm" for record in trace) == 3 * 6 + 1
        assert sum(record.kind == "copy" for record in trace) == 1
        counts.append(shapes(trace))
    assert counts[0] == counts[1]


def test_an_encoder_pass_takes_as_many_sources_as_fit(make_tiny: MakeModel) -> None:
    """Sources of 6, 6, 5, 12 and 3 tokens through passes of at most 12: (6, 6), (5), (12), (3); one decoder pass."""
    model = make_tiny(max_batch=5, max_encoder_tokens=12)
    cases = [Case(list(range(10, 10 + length - 2)), 80, 81 + length, []) for length in (6, 6, 5, 12, 3)]
    seqs = [begin(model, case) for case in cases]
    with model.gpu.launch_trace() as trace:
        ptrs = model.prefill_batch_chunk([PrefillSlice.whole(c.tokens, s) for c, s in zip(cases, seqs, strict=True)])
    rows = [record.name.split("x")[0] for record in trace if record.kind == "gemm" and record.name.endswith("x192x32")]
    assert rows == ["12", "5", "12", "3"]
    head = head_product(model)
    assert [record.name for record in trace if record.name.endswith(f"x{head}")] == [f"5x{head}"]
    split = [model.copy_logits_to_host(ptr) for ptr in ptrs]
    for case, seq, row in zip(cases, seqs, split, strict=True):
        assert relative(row, model.copy_logits_to_host(model.prefill(case.tokens, seq))) <= company(model)


def test_lanes_are_matched_by_place_not_by_slot(tiny: NllbModel) -> None:
    """Row ``i`` belongs to ``seqs[i]``, in any order of slots and any subset of the live sequences."""
    cases = random_cases(7, 4, 8)
    expected = []
    for case in cases:
        seq = prefilled(tiny, case)
        expected.append([tiny.copy_logits_to_host(tiny.decode(token, seq)) for token in (20, 21)])
        tiny.free_sequence(seq)
    seqs = [prefilled(tiny, case) for case in cases]
    size = tiny.logits_row_bytes()
    for step, order in ((0, [2, 0, 3]), (1, [3, 2]), (0, [1]), (1, [1, 0])):
        base = tiny.decode_batch([20 + step] * len(order), [seqs[i] for i in order])
        for lane, i in enumerate(order):
            assert relative(tiny.copy_logits_to_host(base.offset(lane * size)), expected[i][step]) <= company(tiny)
