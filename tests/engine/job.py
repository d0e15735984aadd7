# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random requests, what their callers do to them, and what has to come of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from metrale.engine.handle import RequestHandle
from metrale.engine.request import Generated, Request
from metrale.engine.worker import NO_MEMORY
from metrale.model import GREEDY, SamplingParams

MAX_PROMPT, MAX_NEW, VOCAB = 10, 14, 97
"""Limits of the requests, and of the models that serve them."""

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


def draw_job(rng: random.Random) -> Job:
    """Return any job: short or long, greedy or not, patient or not, left alone or not."""
    mischief: Mischief = rng.choices(("nothing", "collect", "raise", "cancel"), (6, 3, 1, 1))[0]
    job = Job(
        request=Request((), eos_ids=frozenset()),
        mischief=mischief,
        at=rng.randint(1, 6),
        cancel_after=rng.randint(0, 20) if rng.random() < 0.15 else None,
    )
    eos = frozenset(rng.sample(range(VOCAB), rng.choice((0, 1, 10, 20))))
    job.request = Request(
        [rng.randrange(4, 80) for _ in range(rng.randint(0, MAX_PROMPT))],
        rng.randrange(80, 90),
        rng.randrange(80, 90),
        rng.choice((1, 2, 3, rng.randint(4, MAX_NEW), MAX_NEW)),
        eos_ids=eos,
        sampling=GREEDY if rng.random() < 0.5 else draw_sampling(rng, eos),
        priority=rng.choice((0, 0, 0, 1, 5, -3)),
        timeout=rng.uniform(0.05, 8.0) if rng.random() < 0.15 else None,
        logprobs=rng.random() < 0.5,
        on_token=None if mischief == "nothing" else job.on_token,
    )
    return job


def draw_sampling(rng: random.Random, eos: Iterable[int]) -> SamplingParams:
    """Return parameters with every processor on or off, that always leave something to choose."""
    least = rng.choice((0, 0, 4))
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0, 3.0)),
        top_k=rng.choice((0, 0, 1, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.5, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        no_repeat_ngram_size=rng.choice((0, 0, 1, 2, 3)),
        banned_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 10)))),
        eos_ids=tuple(sorted(eos)) if least else (),
        min_new_tokens=least if eos else 0,
        seed=rng.getrandbits(64),
    )


def judge(job: Job, alone: Generated, now: float, capacity: int) -> str:
    """Return what became of a job, after checking that it is what had to.

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
    handle, request = job.handle, job.request
    assert handle is not None
    assert handle.done, "every request ends"
    result = handle.result(0)
    assert list(handle) == result.ids
    if job.mischief != "nothing":
        assert job.seen == result.ids, "the callback saw what the consumer sees"
    assert result.ids == alone.ids[: len(result.ids)], "the ids of the request alone, as far as it came"
    _check_scores(result, alone, asked=request.logprobs)
    reason = result.finish_reason
    if reason in ("eos", "length"):
        assert result.error is None
        assert (result.ids, reason, result.length) == (alone.ids, alone.finish_reason, alone.length)
    elif reason == "cancelled":
        assert job.cancelled
    elif reason == "timeout":
        assert handle.deadline is not None
        assert handle.deadline <= now
    elif result.error == NO_MEMORY:
        assert len(request.prompt_tokens) + 2 + request.most_tokens > capacity, "it would have fitted alone"
        return "no memory"
    else:
        assert result.error == "on_token raised RuntimeError: mischief", f"{result.error}: {job}"
        assert job.mischief == "raise"
        assert len(result.ids) == job.at
    if job.mischief == "raise" and len(result.ids) >= job.at:
        assert reason == "error", "what a callback raises ends its request"
    return reason


def _check_scores(result: Generated, alone: Generated, *, asked: bool) -> None:
    """Log-probabilities come from float32 logits of some ten in size: their rounding is a few times 1e-6."""
    if not asked:
        assert result.logprobs is None
        assert math.isnan(result.logprob)
        return
    assert result.logprobs is not None
    assert alone.logprobs is not None
    assert len(result.logprobs) == result.length - 1
    np.testing.assert_allclose(result.logprobs, alone.logprobs[: len(result.logprobs)], rtol=0, atol=2e-5)
    assert result.logprob == sum(result.logprobs)
