# SPDX-License-Identifier: MIT OR Apache-2.0
"""A few translations and searches in every type: short enough for a memory checker (`benchmarks/gpu_evidence.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale import BeamReq
from tests.backends import cuda_only
from tests.nllb.adapters import Shelf
from tests.nllb.decoding import DEMO, GOLDEN, LIMITS, START, greedy_together
from tests.nllb.test_beam_golden import BEAMS
from tests.nllb.test_beam_golden import GOLDEN as SEARCHED

pytestmark = cuda_only


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_few_translations(gpu: GpuBackend, dtype: str) -> None:
    cases = sorted(GOLDEN, key=lambda case: len(case.ids))[:3]
    with metrale.load(DEMO, gpu, dtype, max_batch=4, **LIMITS) as model:
        results = greedy_together(model, cases)
    if dtype == "float32":
        assert results == [case.ids for case in cases]
    assert [ids[:2] for ids in results] == [case.ids[:2] for case in cases]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_few_searches(gpu: GpuBackend, dtype: str) -> None:
    cases = sorted(SEARCHED, key=lambda case: len(case["beam4"]["ids"]))[:2]
    requests = [
        BeamReq(ids[1:-1], ids[0], case["beam4"]["ids"][1], num_beams=BEAMS, max_new=LIMITS["max_new_tokens"])
        for case in cases
        for ids in [case["input_ids"]]
    ]
    with metrale.load(DEMO, gpu, dtype, max_batch=2 * BEAMS, **LIMITS) as model:
        results = [[START, *found[0].ids] for found in model.generate_beams(requests)]
    if dtype == "float32":
        assert results == [case["beam4"]["ids"] for case in cases]
    assert [ids[:2] for ids in results] == [case["beam4"]["ids"][:2] for case in cases]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_searches_with_adapters(gpu: GpuBackend, tmp_path: Path, dtype: str) -> None:
    """Two adapters and none in one batch; every processor looks at the scores."""
    processors = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": ((9,), (5, 6)), "min_new": 3}
    requests = [
        BeamReq([5, 6, 7], 80, 81, adapter_slot=slot, num_beams=3, max_new=6, **processors)  # type: ignore[arg-type]
        for slot in (-1, 0, 1)
    ]
    with Shelf(tmp_path).load(gpu, "ab", dtype, max_batch=9) as model:
        results = [found[0].ids for found in model.generate_beams(requests)]
    assert all(ids[0] == 81 and 3 <= len(ids) <= 6 for ids in results)
    assert results[0] != results[1] != results[2], "adapters are told apart"
