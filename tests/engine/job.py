# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random requests, what their callers do to them, and what has to come of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from metrale.engine.handle import RequestHandle
from metrale.engine.request import Generated, Request
from metrale.engine.worker import NO_MEMORY
from metrale.model import GREEDY, BeamParams, Hypothesis, SamplingParams

MAX_PROMPT, MAX_NEW, VOCAB = 10, 14, 97
"""Limits of the requests, and of the models that serve them."""

MOST_BEAMS = 4
ADAPTERS = 2
"""Adapters of a model that has any, in slots 0 and 1."""

ROUNDING = 2e-5
"""Of a log-probability: they come from float32 logits of some ten in size, whose rounding is a few times 1e-6."""

Mischief = Literal["nothing", "collect", "raise", "cancel"]


@dataclass(eq=False)
class Job:
    """A request, its handle once it is submitted, and what its callback does at which token.

    Attributes
    ----------
    cancel_after : int or None
        Turns of the driver from submission to its cancellation from outside.
    seen : list of int
        What ``on_token`` was called with.
    cancelled : bool
        Whether anybody cancelled it while it was running.
    """

    request: Request
    mischief: Mischief
    at: int
    cancel_after: int | None
    handle: RequestHandle | None = None
    seen: list[int] = field(default_factory=list)
    cancelled: bool = False

    def on_token(self, token: int) -> None:
        self.seen.append(token)
        if len(self.seen) == self.at:
            if self.mischief == "raise":
                raise RuntimeError("mischief")
            if self.mischief == "cancel":
                self.cancel()

    def cancel(self) -> None:
        if self.handle is not None and self.handle.cancel():
            self.cancelled = True


def draw_job(rng: random.Random, lanes: int = 1, *, adapters: bool = False) -> Job:
    """Return any job: short or long, greedy, sampled or searched, patient or not, left alone or not.

    Few searches are wider than ``lanes``. With ``adapters``, some requests ask for one.
    """
    mischief: Mischief = rng.choices(("nothing", "collect", "raise", "cancel"), (6, 3, 1, 1))[0]
    job = Job(
        request=Request((), eos_ids=frozenset()),
        mischief=mischief,
        at=rng.randint(1, 6),
        cancel_after=rng.randint(0, 20) if rng.random() < 0.15 else None,
    )
    eos = frozenset(rng.sample(range(VOCAB), rng.choice((0, 1, 10, 20))))
    prefix = [rng.randrange(4, 80) for _ in range(rng.choice((0, 0, 0, 1, 2, 4)))]
    most = MAX_NEW - (1 + len(prefix) if prefix else 0)
    beams = draw_beams(rng, lanes) if rng.random() < 0.3 else None
    sampling = GREEDY if rng.random() < 0.5 else draw_sampling(rng, eos)
    job.request = Request(
        [rng.randrange(4, 80) for _ in range(rng.randint(0, MAX_PROMPT))],
        rng.randrange(80, 90),
        rng.randrange(80, 90),
        rng.choice((1, 2, 3, rng.randint(4, most), most)),
        eos_ids=eos,
        sampling=sampling if beams is None else replace(sampling, temperature=0.0),
        beams=beams,
        prefix_tokens=prefix,
        adapter_slot=rng.randint(-1, ADAPTERS - 1) if adapters else -1,
        priority=rng.choice((0, 0, 0, 1, 5, -3)),
        timeout=rng.uniform(0.05, 2.0) if rng.random() < 0.15 else None,
        logprobs=rng.random() < 0.5,
        on_token=None if mischief == "nothing" else job.on_token,
    )
    return job


def draw_beams(rng: random.Random, lanes: int) -> BeamParams:
    """Return any search, which few times is wider than ``lanes``."""
    beams = rng.randint(2, MOST_BEAMS)
    if beams > lanes and rng.random() < 0.9:
        beams = lanes
    return BeamParams(
        beams,
        length_penalty=rng.choice((1.0, 1.0, 0.0, -0.5, 2.0)),
        early_stopping=rng.choice((False, True, "never")),
        num_return_sequences=rng.randint(1, beams),
    )


def draw_sampling(rng: random.Random, eos: Iterable[int]) -> SamplingParams:
    """Return parameters with every processor on or off, that always leave something to choose."""
    least = rng.choice((0, 0, 4))
    suppressed = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 10))))
    last = rng.choice((None, None, *(token for token in (2, 50) if token not in suppressed)))
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0, 3.0)),
        top_k=rng.choice((0, 0, 1, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.5, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        no_repeat_ngram_size=rng.choice((0, 0, 1, 2, 3)),
        suppress_tokens=suppressed,
        bad_words=tuple(tuple(rng.sample(range(VOCAB), 2)) for _ in range(rng.choice((0, 0, 300)))),
        eos_ids=tuple(sorted(eos)) if least else (),
        min_new_tokens=least if eos else 0,
        forced_eos_id=last,
        seed=rng.getrandbits(64),
    )


def judge(job: Job, alone: Generated, now: float, capacity: int) -> Counter[str]:
    """Return what became of a job, and how it was served, after checking that it is what had to.

    Parameters
    ----------
    job : Job
        Done.
    alone : Generated
        What its request yields alone.
    now : float
        The engine's clock.
    capacity : int
        Positions of the KV pool.
    """
    handle = job.handle
    assert handle is not None
    assert handle.done, "every request ends"
    request, result = handle.request, handle.result(0)
    assert list(handle) == result.ids
    raised = result.error == "on_token raised RuntimeError: mischief"
    if job.mischief != "nothing":
        seen = result.ids[: job.at] if raised else result.ids  # a search's tokens are there when the first is told
        assert job.seen == seen, "the callback saw what the consumer sees"
    assert result.ids == alone.ids[: len(result.ids)], "the ids of the request alone, as far as it came"
    _check_scores(result, alone, request)
    reason = result.finish_reason
    kinds = Counter({"beams": request.beams is not None, "prefix": bool(request.prefix_tokens)})
    kinds["adapter"] = request.adapter_slot >= 0
    if reason in ("eos", "length"):
        assert result.error is None
        assert (result.ids, reason, result.length) == (alone.ids, alone.finish_reason, alone.length)
        assert result.eos_id == alone.eos_id
        _check_hypotheses(result.hypotheses, alone.hypotheses, request)
        return Counter([reason, *(f"{name} {reason}" for name, does in kinds.items() if does)])
    if reason == "cancelled":
        assert job.cancelled
    elif reason == "timeout":
        assert handle.deadline is not None
        assert handle.deadline <= now
    elif result.error == NO_MEMORY:
        positions = len(request.prompt_tokens) + 2 + request.width * request.target_positions
        assert positions > capacity, "it would have fitted alone"
        return Counter(["no memory", *(["beams no memory"] if kinds["beams"] else [])])
    else:
        assert raised, f"{result.error}: {job}"
        assert job.mischief == "raise"
        assert len(job.seen) == job.at
    if request.beams is not None and not raised:
        assert (result.ids, result.hypotheses) == ([], None), "a search yields nothing before its end"
    if job.mischief == "raise" and len(result.ids) >= job.at:
        assert reason == "error", "what a callback raises ends its request"
    return Counter([reason, *(f"{name} {reason}" for name, does in kinds.items() if does)])


def _check_scores(result: Generated, alone: Generated, request: Request) -> None:
    if not request.logprobs:
        assert result.logprobs is None
        assert math.isnan(result.logprob)
    else:
        assert result.logprobs is not None
        assert alone.logprobs is not None
        assert len(result.logprobs) == result.length - request.counted_from
        np.testing.assert_allclose(result.logprobs, alone.logprobs[: len(result.logprobs)], rtol=0, atol=ROUNDING)
        assert result.logprob == sum(result.logprobs)
    if result.hypotheses is not None:
        assert result.score == result.hypotheses[0].score
    elif request.logprobs:
        assert result.score == result.logprob / max(result.length, 1)
    else:
        assert math.isnan(result.score)


def _check_hypotheses(found: list[Hypothesis] | None, alone: list[Hypothesis] | None, request: Request) -> None:
    assert (found is None) == (alone is None) == (request.beams is None or request.most_tokens == request.counted_from)
    for one, other in zip(found or (), alone or (), strict=True):
        check_hypothesis(one, other, request)


def check_hypothesis(one: Hypothesis, other: Hypothesis, request: Request) -> None:
    """Assert that two searches found the same."""
    assert request.beams is not None
    assert one.ids == other.ids
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=ROUNDING)
    counted = len(one.ids) - 1 - len(request.prefix_tokens) + request.counted_from
    tolerance = ROUNDING * counted / counted**request.beams.length_penalty
    np.testing.assert_allclose(one.score, other.score, rtol=1e-6, atol=tolerance)
