# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam search on the demo model gives transformers' ids and scores, several requests together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metrale import BeamReq
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import DEMO, LIMITS, START

GOLDEN: list[dict[str, Any]] = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
BEAMS = 4
TOGETHER = 8  # requests that fill the model's 32 lanes

SCORE = 1e-4
"""Of a score. Either side rounds by about 1e-6, and the recorded one to five digits after the point."""

SEARCHES = {"beam4": False, "beam4_early_stopping": True}


def test_the_golden_cases_are_what_these_tests_take_them_for() -> None:
    assert len(GOLDEN) == 41
    plain, early = ([case[search]["ids"] for case in GOLDEN] for search in SEARCHES)
    assert plain != early
    assert sum(ids != case["greedy"]["ids"] for ids, case in zip(plain, GOLDEN, strict=True)) >= 5


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("first", range(0, 41, TOGETHER))
def test_the_best_hypotheses_are_transformers(demo: NllbModel, search: str, first: int) -> None:
    cases = GOLDEN[first : first + TOGETHER]
    requests = [
        BeamReq(
            case["input_ids"][1:-1],
            case["input_ids"][0],
            case[search]["ids"][1],
            num_beams=BEAMS,
            max_new=LIMITS["max_new_tokens"],
            early_stopping=SEARCHES[search],
        )
        for case in cases
    ]
    best = [hypotheses[0] for hypotheses in demo.generate_beams(requests)]
    assert [[START, *hypothesis.ids] for hypothesis in best] == [case[search]["ids"] for case in cases]
    assert [hypothesis.score for hypothesis in best] == pytest.approx(
        [case[search]["score"] for case in cases], rel=0, abs=SCORE
    )
