# SPDX-License-Identifier: MIT OR Apache-2.0
"""A few translations in every type: short enough for a memory checker (`benchmarks/gpu_evidence.py`)."""

from __future__ import annotations

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from tests.backends import cuda_only
from tests.nllb.decoding import DEMO, GOLDEN, LIMITS, greedy_together

pytestmark = cuda_only


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_few_translations(gpu: GpuBackend, dtype: str) -> None:
    cases = sorted(GOLDEN, key=lambda case: len(case.ids))[:3]
    with metrale.load(DEMO, gpu, dtype, max_batch=4, **LIMITS) as model:
        results = greedy_together(model, cases)
    if dtype == "float32":
        assert results == [case.ids for case in cases]
    assert [ids[:2] for ids in results] == [case.ids[:2] for case in cases]
