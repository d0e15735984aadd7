# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests that are searched with beams, and what they come to alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from metrale.engine import Generated, Request, RequestHandle
from metrale.engine.checked import checked_request
from metrale.model import BeamParams, Hypothesis, SamplingParams
from metrale.nllb.model import NllbModel
from tests.engine.alone import search
from tests.engine.job import check_hypothesis
from tests.engine.patience import PATIENCE
from tests.engine.serving import EOS, ask

WIDEST: Final = 6
"""Lanes of the model that searches run on alone."""


def seek(*prompt: int, beams: int = 3, **options: Any) -> Request:
    """Return a search that may take 12 tokens, the language included; ``options`` are those of the request."""
    return ask(*prompt, **{"beams": BeamParams(beams), **options})


def draw_search(rng: random.Random, widest: int) -> Request:
    """Return any search."""
    beams = rng.randint(2, widest)
    ending = EOS if rng.random() < 0.6 else frozenset()
    return ask(
        *(rng.randrange(4, 80) for _ in range(rng.randint(1, 10))),
        max_new_tokens=rng.choice((2, 5, 9, 16)),
        eos_ids=ending,
        beams=BeamParams(
            beams,
            length_penalty=rng.choice((0.0, 1.0, 2.0)),
            early_stopping=rng.choice((False, True, "never")),
            num_return_sequences=rng.randint(1, beams),
        ),
        sampling=SamplingParams(
            repetition_penalty=rng.choice((1.0, 1.3)),
            no_repeat_ngram_size=rng.choice((0, 2)),
            min_new_tokens=rng.choice((0, 4)),
        ),
        prefix_tokens=[rng.randrange(4, 80) for _ in range(rng.choice((0, 0, 1, 3)))],
    )


@dataclass(frozen=True)
class Sought:
    """A search, and what it found.

    Attributes
    ----------
    request : Request
        As an engine has completed it.
    found : list of Hypothesis
        The best first.
    """

    request: Request
    found: list[Hypothesis]

    @property
    def chosen(self) -> list[int]:
        """What the best hypothesis has after what was given."""
        return self.found[0].ids[1 + len(self.request.prefix_tokens) :]

    @property
    def reason(self) -> str:
        return "eos" if self.chosen[-1] in self.request.end_ids else "length"

    @property
    def tokens(self) -> list[int]:
        """``chosen`` without EOS."""
        return self.chosen[:-1] if self.reason == "eos" else self.chosen

    def check(self, handle: RequestHandle) -> None:
        """Assert that ``handle`` came to the same; wait for it."""
        self.check_result(handle.result(PATIENCE))

    def check_result(self, result: Generated) -> None:
        """Assert that ``result`` is the same."""
        assert result.error is None, result.error
        assert (result.ids, result.finish_reason) == (self.tokens, self.reason)
        assert result.eos_id == (self.chosen[-1] if self.reason == "eos" else None)
        assert result.length == self.request.counted_from + len(self.chosen)
        assert result.hypotheses is not None
        for one, other in zip(result.hypotheses, self.found, strict=True):
            check_hypothesis(one, other, self.request)
        assert result.score == result.hypotheses[0].score


def run_sought(model: NllbModel, request: Request) -> Sought:
    """Run a search on a model that nobody else uses, by the model's own call."""
    completed = checked_request(request, model.capacity(), model.vocab_size(), WIDEST)
    return Sought(replace(completed, logprobs=False), search(model, completed))
