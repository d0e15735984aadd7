# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a target begins with is prefilled: as if it had been fed by decode steps, one id at a time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from metrale import BeamReq
from metrale.errors import InvalidInput
from metrale.model import PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.nllb.by_rows import device_by_rows
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, company, head_product, relative, sampled, saved
from tests.nllb.searching import alone, same
from tests.reference.nllb_float64 import NllbFloat64

LIMITS: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 30}
CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, []), Case([40] * 5, 84, 85, []), Case([], 86, 87, [])]
DEPTHS = [
    (3, 0, 5, 1),
    (2, 2, 2, 2),  # one group
    (7, 7, 0, 0),
    (6, 20, 1, 13),  # a row of the workspace for each of 8: in chunks
    (28, 0, 28, 0),
]
"""Ids after the language, of each case. The workspace takes eight decoder ids in a pass."""

JUDGED = 1e-5
"""Of the largest logit: float32 against float64, as `tests.nllb.test_model_logits` has it for this checkpoint."""


def prefix(depth: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 97, depth).tolist())


def started(model: NllbModel, depths: Sequence[int]) -> list[SequenceState]:
    seqs = [begin(model, case) for case in CASES[: len(depths)]]
    for place, (seq, depth) in enumerate(zip(seqs, depths, strict=True)):
        seq.prefix_tokens = prefix(depth, place)
    return seqs


def fed_one_by_one(model: NllbModel, depths: Sequence[int]) -> list[Any]:
    """Return each sequence's logits after its prefix, which decode steps have fed."""
    rows = []
    for place, (case, depth) in enumerate(zip(CASES, depths, strict=True)):
        seq = begin(model, case)
        ptr = model.prefill(case.tokens, seq)
        for token in prefix(depth, place):
            ptr = model.decode(token, seq)
        rows.append(model.copy_logits_to_host(ptr))
        model.free_sequence(seq)
    return rows


@pytest.mark.parametrize("depths", DEPTHS)
def test_the_logits_are_those_of_decode_steps(
    make_tiny: MakeModel, tiny_judge: NllbFloat64, depths: tuple[int, ...]
) -> None:
    """Of prefixes of several lengths in one call, and of the step after it."""
    model = make_tiny(**LIMITS)
    expected = fed_one_by_one(model, depths)
    seqs = started(model, depths)
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES, seqs, strict=True)]
    rows = [model.copy_logits_to_host(ptr) for ptr in model.prefill_batch_chunk(slices)]
    for place, (seq, case, row) in enumerate(zip(seqs, CASES, rows, strict=True)):
        given = [2, case.target, *prefix(depths[place], place)]
        assert (seq.tokens, seq.seq_len, seq.prompt_len) == (given, len(given), len(given))
        assert relative(row, expected[place]) <= company(model)
        assert relative(row, tiny_judge.logits(case.src, given)[-1]) <= JUDGED
    base = model.decode_batch([9, 10, 11, 12], seqs)
    for place, (seq, case) in enumerate(zip(seqs, CASES, strict=True)):
        row = model.copy_logits_to_host(base.offset(place * model.logits_row_bytes()))
        assert relative(row, tiny_judge.logits(case.src, seq.tokens)[-1]) <= JUDGED


@host_only
def test_the_passes_of_a_prefill(make_tiny: MakeModel) -> None:
    """Equally long ones that follow one another share passes; what is too long for one takes several, with one head."""
    model = make_tiny(**LIMITS)
    for depths, passes in (
        ((0, 0, 0, 0), [8]),
        ((2, 2, 2, 2), [8, 8]),
        ((3, 0, 0, 3), [5, 4, 5]),
        ((6, 7, 0, 0), [8, 8, 1, 4]),
        ((20, 2, 2, 0), [8, 8, 6, 8, 2]),
    ):
        seqs = started(model, depths)
        slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES, seqs, strict=True)]
        with model.gpu.launch_trace() as trace:
            model.prefill_batch_chunk(slices)
        products = [record.name for record in trace if record.kind == "gemm"]
        assert [int(name.split("x")[0]) for name in products if name.endswith("x96x32")][2::3] == passes
        assert sum(int(name.split("x")[0]) for name in products if name.endswith(f"x{head_product(model)}")) == 4
        for seq in seqs:
            model.free_sequence(seq)


@pytest.mark.parametrize("depth", [1, 5, 20])
def test_a_sequence_with_a_prefix_is_saved_and_brought_back(make_tiny: MakeModel, depth: int) -> None:
    """What counts as given comes back as well: a minimum length counts from there."""
    model = make_tiny(**LIMITS)
    rule = SamplingParams(eos_ids=tuple(range(50)), min_new_tokens=3)
    ids: list[list[int]] = []
    for swapped in (False, True):
        seq = started(model, [depth])[0]
        ptr = model.prefill(CASES[0].tokens, seq)
        model.begin_sampling(seq, rule)
        ids.append([])
        for turn in range(6):
            if swapped and turn == 2:
                data = saved(model, seq)
                model.free_sequence(seq)
                seq = model.alloc_sequence()
                model.restore_sequence_state(seq, 0, io.BytesIO(data))
                assert seq.prompt_len == 2 + depth
                model.begin_sampling(seq, rule)
            if turn:
                ptr = model.decode(ids[-1][-1], seq)
            ids[-1] += sampled(model, ptr, [seq]).ids
        assert min(ids[-1][:3]) >= 50
        model.free_sequence(seq)
    assert ids[0] == ids[1]


def test_a_prefix_that_does_not_fit(make_tiny: MakeModel) -> None:
    model = make_tiny(**LIMITS)
    seq = begin(model, CASES[0])
    for tokens, match in (
        ((5, 97), r"prefix_tokens\[1\]"),
        ((5,) * 30, "prefix_tokens: expected at most 29 ids, got 30"),
        ("ab", "prefix_tokens"),
    ):
        seq.prefix_tokens = tokens  # type: ignore[assignment]
        with model.gpu.launch_trace() as trace, pytest.raises(InvalidInput, match=match):
            model.prefill([5], seq)
        assert not trace
    small = model.alloc_sequence_for(9)
    small.src_lang_id, small.tgt_lang_id, small.prefix_tokens = 80, 81, (7, 8, 9)
    with pytest.raises(InvalidInput, match=r"at most 2 ids .* with 3 ids of the target after it"):
        model.prefill([5, 6, 7], small)
    model.prefill([5, 6], small)
    assert small.tokens == [2, 81, 7, 8, 9]


def test_searches_behind_prefixes_of_any_length(tiny_folder: Path) -> None:
    """In one call, whose prefills have several depths, some of them in chunks: to the bit what each finds alone."""
    reqs = [
        BeamReq(
            [5, 6], 80, 81, num_beams=beams, max_new=6, num_return_sequences=beams, prefix_tokens=prefix(depth, depth)
        )
        for beams, depth in ((2, 0), (1, 12), (3, 12), (2, 23), (1, 0), (2, 1))
    ]
    with device_by_rows() as gpu, metrale.load(tiny_folder, gpu, "float32", **LIMITS) as model:
        together = model.generate_beams(reqs)
        for req, found in zip(reqs, together, strict=True):
            assert same(found, alone(model, req))
            assert all(one.ids[1 : 1 + len(req.prefix_tokens)] == list(req.prefix_tokens) for one in found)
