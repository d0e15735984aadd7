# SPDX-License-Identifier: MIT OR Apache-2.0
"""All 300 drawn cases against transformers itself, on machines that have it; `test_recorded` has a fifth of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.parity import hf, ours
from tests.parity.cases import Answer
from tests.parity.draw import MODELS, draw
from tests.parity.shares import is_narrow, shares

DRAWN = draw()


@pytest.fixture(scope="module")
def theirs() -> dict[str, Answer]:
    """What transformers answers, by the names of the cases."""
    hf.torch.set_num_threads(1)
    return hf.all_answers(DRAWN)


def test_the_draw_tells_right_from_wrong(theirs: dict[str, Answer]) -> None:
    assert len(DRAWN.cases) == 300
    shares(DRAWN.models, DRAWN.cases, theirs).check()


@pytest.mark.parametrize("index", range(MODELS))
def test_the_hypotheses_are_transformers(index: int, theirs: dict[str, Answer], tmp_path: Path) -> None:
    cases = [case for case in DRAWN.of(index) if not is_narrow(theirs[case.name])]
    assert cases
    found = ours.answers(DRAWN.models[index], cases, "host", tmp_path)
    wrong = [
        line
        for case, hypotheses in zip(cases, found, strict=True)
        for line in ours.differences(case, hypotheses, theirs[case.name])
    ]
    assert not wrong, "\n".join(wrong)
