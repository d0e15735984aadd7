# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a set of searches can tell a right implementation from a wrong one: how often each thing matters in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.parity.cases import Answer, Case, ModelSpec
from tests.parity.draw import PAIRED
from tests.parity.margins import NARROW


@dataclass(frozen=True)
class Shares:
    """Shares between 0 and 1, and counts.

    Attributes
    ----------
    cases : int
    ended : float
        Cases whose best hypothesis ends by an id that ends a sequence.
    lengths_of_ended : int
        How many different lengths those hypotheses have.
    early, never, lengths : float
        Pairs of cases with different results that differ in ``early_stopping`` alone (False and True, False and
        "never"), or in ``length_penalty`` alone.
    narrow : float
        Cases that are left out because transformers decided too narrowly.
    """

    cases: int
    ended: float
    lengths_of_ended: int
    early: float
    never: float
    lengths: float
    narrow: float

    def check(self) -> None:
        """Fail when the set does not bite."""
        assert self.ended >= 0.5, self
        assert self.lengths_of_ended >= 8, self
        assert self.early >= 0.2, self
        assert self.lengths >= 0.2, self
        assert self.narrow < 0.05, self

    def as_json(self) -> dict[str, Any]:
        """Return the fields, rounded."""
        return {key: round(value, 4) for key, value in asdict(self).items()}


def is_narrow(answer: Answer) -> bool:
    """Return whether rounding errors of float32 could have decided."""
    return answer.margin < NARROW


def differing(found: Mapping[str, Answer], other: str) -> float:
    """Return in which share of the groups the plain case and ``other`` have different hypotheses."""
    plain = [name for name in found if name.endswith(f", {PAIRED[0]}")]
    pairs = [(found[name], found[name.removesuffix(PAIRED[0]) + other]) for name in plain]
    return sum(one.ids != two.ids for one, two in pairs) / len(pairs)


def shares(models: Sequence[ModelSpec], cases: Sequence[Case], found: Mapping[str, Answer]) -> Shares:
    """Return the shares of a draw with whole groups, and with the answers by the cases' names."""
    best = {case.name: found[case.name].ids[0] for case in cases}
    ended = [case.name for case in cases if best[case.name][-1] in case.eos_ids(models[case.model])]
    return Shares(
        cases=len(cases),
        ended=len(ended) / len(cases),
        lengths_of_ended=len({len(best[name]) for name in ended}),
        early=differing(found, "early"),
        never=differing(found, "never"),
        lengths=differing(found, "lengths"),
        narrow=sum(is_narrow(answer) for answer in found.values()) / len(cases),
    )
