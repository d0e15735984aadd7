# SPDX-License-Identifier: MIT OR Apache-2.0
"""One beam search, as the host knows it: what was asked, how far it has come, and what its scores are divided by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metrale.errors import InvalidInput
from metrale.model import BeamParams, SamplingParams, SequenceState
from metrale.ops.beam_candidates import MAX_CANDIDATES


@dataclass(slots=True, eq=False)
class Search:
    """A search: its sequence and slots, what was asked, and how far it has come.

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
    selections: int = 0

    @property
    def adjusts(self) -> bool:
        """Whether its scores are processed before it selects, or will be."""
        return self.modes != (0, 0) or self.params.needs_history

    @property
    def limit(self) -> int:
        """Most ids after those that do not count."""
        assert self.params.max_new_tokens is not None
        return self.params.max_new_tokens

    @property
    def rows(self) -> int:
        """Rows of logits that its next selection looks at: before the first, all beams are the same."""
        return len(self.slots) if self.selections else 1

    def norm(self, length: int) -> float:
        """Return what divides the summed log-probability of a hypothesis of ``length`` ids."""
        return math.pow(length, self.beams.length_penalty)

    def bound_norm(self, length: int) -> float:
        """Return the same for the length at which a running beam is held against the finished ones."""
        at_best = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        return self.norm(self.limit if at_best else length)


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
