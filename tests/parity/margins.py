# SPDX-License-Identifier: MIT OR Apache-2.0
"""How narrowly transformers decided: the smallest distance that, had it been the other way, could change a result.

Two implementations in float32 agree on a log-probability to about 1e-6. A search whose every decision was wider than
that must come out the same; one with a narrower decision need not, and is no evidence against anyone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NARROW = 1e-5
"""A search with a margin below this says nothing."""

ROUNDING = 1e-6
"""Of a score's size: what the order of a float32 sum of some dozen terms, each rounded to 6e-8, may change."""

REAL = -1e8  # transformers' marks for beams that are not there are around -1e9


def gap(high: float, low: float) -> float:
    """Return how much ``high`` is above ``low``, less what rounding may do; infinite unless both are real scores."""
    if high < REAL or low < REAL:
        return math.inf
    return high - low - ROUNDING * abs(low)


@dataclass
class Margins:
    """The decisions of one search.

    Attributes
    ----------
    ends : set of int
        Ids that end a sequence.
    length_penalty : float
    early_stopping : bool or str
    max_new, num_beams : int
    smallest : float
        The narrowest decision so far.
    pool : list of float
        Scores of the finished hypotheses, best first.
    finished : list of float
        Sums of the candidates that ended in the present step.
    generated : int
        Ids that every running beam has, those of a prefix left out.
    """

    ends: set[int]
    length_penalty: float
    early_stopping: bool | str
    max_new: int
    num_beams: int
    smallest: float = math.inf
    pool: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    generated: int = 0

    def note(self, high: float, low: float) -> None:
        """Count a decision for ``high`` and against ``low``, two sums of log-probabilities."""
        self.smallest = min(self.smallest, gap(high, low))

    def weigh(self, high: float, low: float) -> None:
        """Count a decision between two scores. A power of the length makes scores small, and their errors as well."""
        self.smallest = min(self.smallest, gap(high, low) / min(1.0, max(abs(low), 1e-30)))

    def candidates(self, sums: Array, vocab_size: int) -> None:
        """Take in the summed log-probabilities ``[num_beams * vocab_size]`` of every candidate of a step.

        Decided are: which of the candidates that end are among the best ``num_beams`` of all, and which of the others
        are the best ``num_beams`` of those.
        """
        self.generated += 1
        order = np.argsort(-sums, kind="stable")
        values, tokens = sums[order].tolist(), (order % vocab_size).tolist()
        last = self.generated == self.max_new
        ending = [rank for rank, token in enumerate(tokens) if (last or token in self.ends) and values[rank] > REAL]
        inside, outside = values[self.num_beams - 1], values[self.num_beams]
        for rank in ending:
            if rank < self.num_beams:
                self.note(values[rank], outside)
            else:
                self.note(inside, values[rank])
        if not last:
            others = [values[rank] for rank, token in enumerate(tokens) if token not in self.ends]
            self.note(others[self.num_beams - 1], others[self.num_beams])
        self.finished = [values[rank] for rank in ending if rank < self.num_beams]

    def kept(self, pool: list[float]) -> None:
        """Take in the scores of the finished hypotheses after a step, best first, and those that came into question."""
        weighed = [value / self.generated**self.length_penalty for value in self.finished]
        ranked = sorted(self.pool + weighed, reverse=True)
        if len(ranked) > self.num_beams:
            self.weigh(ranked[self.num_beams - 1], ranked[self.num_beams])
        self.pool = [score for score in pool if score > REAL]

    def stop(self, best_sum: float, length: int) -> None:
        """Take in the sum of the best running beam when it is compared with the worst finished hypothesis."""
        if len(self.pool) < self.num_beams or self.early_stopping is True:
            return
        hopeful = self.early_stopping == "never" and self.length_penalty > 0.0
        best, worst = best_sum / (self.max_new if hopeful else length) ** self.length_penalty, min(self.pool)
        self.weigh(max(best, worst), min(best, worst))

    def returned(self, count: int) -> None:
        """Take in how many of the finished hypotheses are returned: their order is decided too."""
        for high, low in zip(self.pool[:count], self.pool[1 : count + 1], strict=False):
            self.weigh(high, low)

    def greedy(self, rows: list[Array]) -> None:
        """Take in the scores ``[vocab_size]`` of every step of a search with one beam."""
        for row in rows:
            best = np.sort(row)[::-1]
            self.note(float(best[0]), float(best[1]))


@contextmanager
def watched(model: Any, margins: Margins) -> Iterator[None]:
    """Let ``margins`` see the decisions of transformers' beam search while the context is open."""
    continuations, update = model._get_top_k_continuations, model._update_finished_beams
    check = model._check_early_stop_heuristic

    def seen_continuations(**options: Any) -> Any:
        margins.candidates(options["accumulated_log_probs"][0].double().numpy(), options["vocab_size"])
        return continuations(**options)

    def seen_update(**options: Any) -> Any:
        result = update(**options)
        margins.kept(result[1][0].tolist())
        return result

    def seen_check(**options: Any) -> Any:
        length = options["cur_len"] - options["decoder_prompt_len"]
        margins.stop(float(options["running_beam_scores"][0, 0]), length)
        return check(**options)

    with (
        mock.patch.object(model, "_get_top_k_continuations", seen_continuations),
        mock.patch.object(model, "_update_finished_beams", seen_update),
        mock.patch.object(model, "_check_early_stop_heuristic", seen_check),
    ):
        yield
