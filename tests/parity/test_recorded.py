# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam search gives transformers' hypotheses, scores and log-probabilities: on recorded cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from tests.parity.cases import EOS, START
from tests.parity.draw import RECORDED_MODELS, draw, part
from tests.parity.edges import edges
from tests.parity.ours import TOLERANCE, answers, close, differences
from tests.parity.recorded import recorded
from tests.parity.shares import is_narrow, shares

RECORDED = recorded()
EVERYTHING = RECORDED.everything
SCATTERED = "fewer ids than"
"""Edge cases with more beams than half the ids. After the language id only one beam is real, and it has fewer
candidates than a step takes: the rest are copies of one another with equal scores, whose order is nobody's promise.
Which hypotheses come of it and what they score is compared there, and not their order."""
ORDERED = [case for case in RECORDED.edges if not case.name.startswith(SCATTERED)]


def test_the_record_tells_right_from_wrong() -> None:
    found = {case.name: RECORDED.answers[case.name] for case in RECORDED.cases}
    own = shares(RECORDED.models, RECORDED.cases, found)
    own.check()
    assert own.as_json() == RECORDED.meta["shares"]
    assert len(RECORDED.cases) == 60
    assert {case.num_beams for case in RECORDED.cases} >= {1, 2, 3, 4, 5, 8, 16}
    assert all(changed > 0 for changed, _ in RECORDED.meta["options_that_matter"].values())


def test_the_record_is_of_this_draw() -> None:
    drawn, at_edges = part(draw(RECORDED_MODELS)), edges(RECORDED_MODELS)
    assert drawn.cases == RECORDED.cases
    assert at_edges.cases == RECORDED.edges
    assert drawn.models + at_edges.models == RECORDED.models


def test_no_recorded_case_was_decided_narrowly() -> None:
    assert not [name for name, answer in RECORDED.answers.items() if is_narrow(answer)]


@pytest.mark.parametrize("index", range(len(RECORDED.models)))
def test_the_recorded_transitions_are_the_models(index: int) -> None:
    """In float64, along the recorded ids: tells another model, or another reading of the file, from a wrong search."""
    judge = RECORDED.models[index].judge()
    for case in EVERYTHING.of(index):
        answer = RECORDED.answers[case.name]
        if not answer.transitions or {"repetition_penalty", "forced_eos_id"} & set(case.options):
            continue
        decoder = [START, *answer.ids[0]]
        logits = judge.logits([case.src, *case.prompt, EOS], decoder[:-1])
        top = logits.max(axis=1, keepdims=True)
        rows = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        exact = [float(row[token]) for row, token in zip(rows, decoder[1:], strict=True)]
        exact[0] = 0.0  # the language id is forced
        first = len(decoder) - len(answer.transitions)
        assert close(answer.transitions, exact[first - 1 :]), case.name


@pytest.mark.parametrize("index", sorted({case.model for case in RECORDED.cases + ORDERED}))
def test_the_hypotheses_are_transformers(index: int, gpu: GpuBackend, tmp_path: Path) -> None:
    cases = [case for case in RECORDED.cases + ORDERED if case.model == index]
    wrong = [
        line
        for case, hypotheses in zip(cases, answers(RECORDED.models[index], cases, gpu, tmp_path), strict=True)
        for line in differences(case, hypotheses, RECORDED.answers[case.name])
    ]
    assert not wrong, "\n".join(wrong)


def test_with_more_beams_than_half_the_ids(gpu: GpuBackend, tmp_path: Path) -> None:
    cases = [case for case in RECORDED.edges if case.name.startswith(SCATTERED)]
    assert len(cases) == 2
    spec = RECORDED.models[cases[0].model]
    assert all(2 * case.num_beams > spec.vocab_size for case in cases)
    for case, found in zip(cases, answers(spec, cases, gpu, tmp_path), strict=True):
        expected = RECORDED.answers[case.name]
        assert sorted(list(hypothesis.ids) for hypothesis in found) == sorted(expected.ids)
        assert close(sorted(hypothesis.score for hypothesis in found), sorted(expected.scores))


def test_a_difference_would_be_seen() -> None:
    assert close([1.0, -800.0], [1.0 + TOLERANCE / 2, -800.001])
    assert not close([1.0], [1.0 + 2 * TOLERANCE])
    assert not close([1.0], [1.0, 1.0])
