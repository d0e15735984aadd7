# SPDX-License-Identifier: MIT OR Apache-2.0
"""One beam search, as the host knows it: what was asked, and what its scores are divided by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metrale.errors import InvalidInput
from metrale.model import BeamParams, SamplingParams, SequenceState
from metrale.ops.beam_candidates import MAX_CANDIDATES


@dataclass(slots=True, eq=False)
class Search:
    """A search: its sequence and slots, and what was asked.

    ``start`` is the length of its history before the first selection, ``given`` that part of it which does not count,
    ``kept`` the candidates that a selection looks at, and ``modes`` the bits of its rows, while EOS may be chosen and
    while it may not.
    """

    seq: SequenceState
    slots: tuple[int, ...]
    beams: BeamParams
    params: SamplingParams
    start: int
    given: int
    kept: int
    modes: tuple[int, int]

    @property
    def adjusts(self) -> bool:
        """Whether its scores are processed before it selects, or will be."""
        return self.modes != (0, 0) or self.params.needs_history

    @property
    def limit(self) -> int:
        """Most ids after those that do not count."""
        assert self.params.max_new_tokens is not None
        return self.params.max_new_tokens

    def norm(self, length: int) -> float:
        """Return what divides the summed log-probability of a hypothesis of ``length`` ids."""
        return math.pow(length, self.beams.length_penalty)

    def norms(self) -> NDArray[np.float32]:
        """Return what divides the score at each length up to the limit, ``[2, limit + 1]``: that of hypotheses that end
        there, and that of running beams when they are held against the finished ones."""
        norms = np.array([1.0, *(self.norm(length) for length in range(1, self.limit + 1))], np.float32)
        at_best = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        return np.stack((norms, np.full_like(norms, norms[-1]) if at_best else norms))


def kept_candidates(beams: BeamParams, params: SamplingParams) -> int:
    """Return how many candidates a selection looks at.

    Raises
    ------
    InvalidInput
        When the settings are not of their types, or do not go together.
    """
    if not isinstance(beams, BeamParams):
        raise InvalidInput("beams", "a BeamParams", beams)
    if not isinstance(params, SamplingParams):
        raise InvalidInput("params", "a SamplingParams", params)
    if params.temperature:
        raise InvalidInput("temperature", "0, as beam search draws nothing", params.temperature)
    if params.max_new_tokens is None:
        raise InvalidInput("max_new_tokens", "the most ids of a result", None)
    ends = len(set(params.eos_ids))
    kept = max(2, 1 + ends) * beams.num_beams
    if kept > MAX_CANDIDATES:
        most = MAX_CANDIDATES // beams.num_beams - 1
        raise InvalidInput("eos_ids", f"at most {most} with {beams.num_beams} beams", f"{ends}")
    _check_penalty(beams.length_penalty, params.max_new_tokens)
    return kept


def _check_penalty(penalty: float, longest: int) -> None:
    """Refuse a penalty whose power of some length is not a number that float32 holds, as scores would be none."""
    try:
        largest = math.pow(longest, penalty)
        with np.errstate(over="ignore", under="ignore"):
            usable = bool(0 < np.float32(largest) < np.inf)
    except OverflowError:
        usable = False
    if not usable:
        what = f"one whose power of {longest}, the longest result, is a float32 above 0"
        raise InvalidInput("length_penalty", what, penalty)
