# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the scores of a search are divided by, and how many candidates it looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.errors import InvalidInput
from metrale.model import BeamParams, SamplingParams, SequenceState
from metrale.nllb.search import Search, kept_candidates


@pytest.mark.parametrize("penalty", [-1.5, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_lengths_that_scores_are_divided_by(penalty: float, early: Any) -> None:
    """A running beam is held against the finished ones at its own length; with "never" at the longest, but only where
    a longer result has the better score for the same sum, as transformers has it."""
    beams, params = BeamParams(2, penalty, early), SamplingParams(max_new_tokens=9)
    search = Search(SequenceState(0), (0, 1), beams, params, 2, 1, 4, (0, 0))
    norms, bounds = search.norms()
    assert norms.shape == bounds.shape == (10,)
    for length in range(1, 10):
        assert search.norm(length) == pytest.approx(length**penalty, rel=1e-15)
        assert norms[length] == np.float32(search.norm(length))
        longest = early == "never" and penalty > 0
        assert bounds[length] == np.float32(search.norm(9 if longest else length))


@pytest.mark.parametrize(
    ("beams", "ends", "kept"),
    [(1, (), 2), (4, (2,), 8), (4, (2, 5), 12), (4, (2, 5, 2), 12), (64, (2, 5, 6), 256), (1, tuple(range(255)), 256)],
)
def test_candidates_that_a_selection_looks_at(beams: int, ends: tuple[int, ...], kept: int) -> None:
    """Twice as many as beams, or more, so that enough are left however many of them end."""
    assert kept_candidates(BeamParams(beams), SamplingParams(eos_ids=ends, max_new_tokens=5)) == kept


@pytest.mark.parametrize(("beams", "most"), [(64, 3), (4, 63), (1, 255)])
def test_too_many_ends(beams: int, most: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        kept_candidates(BeamParams(beams), SamplingParams(eos_ids=tuple(range(most + 1)), max_new_tokens=5))
    assert (refused.value.argument, refused.value.got) == ("eos_ids", f"{most + 1}")
    assert f"at most {most} with {beams} beams" in str(refused.value)


@pytest.mark.parametrize("penalty", [-200.0, -60.0, 60.0, 200.0, 9999.0, -9999.0])
def test_penalties_whose_scores_would_be_no_numbers(penalty: float) -> None:
    with pytest.raises(InvalidInput, match="length_penalty: expected one whose power of 9, the longest result, is a"):
        kept_candidates(BeamParams(2, penalty), SamplingParams(max_new_tokens=9))
    assert kept_candidates(BeamParams(2, penalty), SamplingParams(max_new_tokens=1)) == 4


def test_what_is_of_another_type_or_does_not_go_together() -> None:
    beams, params = BeamParams(2), SamplingParams(max_new_tokens=4)
    wrong: list[tuple[Any, Any, str]] = [
        (params, params, "beams"),
        (beams, beams, "params"),
        (beams, SamplingParams(max_new_tokens=4, temperature=0.5), "temperature"),
        (beams, SamplingParams(), "max_new_tokens"),
    ]
    for one, other, argument in wrong:
        with pytest.raises(InvalidInput) as refused:
            kept_candidates(one, other)
        assert refused.value.argument == argument
