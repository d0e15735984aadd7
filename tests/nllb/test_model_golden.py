# SPDX-License-Identifier: MIT OR Apache-2.0
"""Greedy translation gives transformers' ids: one at a time, in mixed batches, and however the encoder is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import DEMO, EOS, GOLDEN, START, greedy, greedy_together


def test_the_golden_cases_are_what_these_tests_take_them_for() -> None:
    assert len(GOLDEN) == 41
    assert all(case.ids[0] == START and case.ids[1] == case.target for case in GOLDEN)
    assert any(case.ids[-1] == EOS for case in GOLDEN)
    assert max(len(case.ids) for case in GOLDEN) <= 64 + 1
    assert len({(case.source, case.target) for case in GOLDEN}) >= 16


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_one_at_a_time(demo: NllbModel, index: int) -> None:
    assert greedy(demo, GOLDEN[index]) == GOLDEN[index].ids


@pytest.mark.parametrize("size", [7, 32])
def test_in_batches_of_mixed_languages(demo: NllbModel, size: int) -> None:
    order = np.random.default_rng(size).permutation(len(GOLDEN))
    for first in range(0, len(order), size):
        cases = [GOLDEN[i] for i in order[first : first + size]]
        assert len({case.target for case in cases}) > 1
        assert len({case.source for case in cases}) > 1
        assert greedy_together(demo, cases) == [case.ids for case in cases]


def test_a_small_encoder_workspace_only_splits_the_pass(gpu: GpuBackend) -> None:
    """Sources of up to 46 ids through passes of at most 64."""
    cases = GOLDEN[:16]
    assert sum(len(case.src) for case in cases) > 3 * 64
    with metrale.load(
        DEMO, gpu, "float32", max_batch=16, max_source_len=64, max_new_tokens=64, max_encoder_tokens=64
    ) as model:
        assert greedy_together(model, cases) == [case.ids for case in cases]


def test_the_folder_may_be_named_by_a_string(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(DEMO)
    with metrale.load(str(link), "host", max_batch=1, max_source_len=64, max_new_tokens=64) as model:
        assert greedy(model, GOLDEN[0]) == GOLDEN[0].ids
