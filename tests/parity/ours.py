# SPDX-License-Identifier: MIT OR Apache-2.0
"""The cases as metrale answers them, and what is different from transformers' answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import metrale
from gpu_runtime.backend import GpuBackend
from metrale import BeamReq, Hypothesis
from tests.parity.cases import Answer, Case, ModelSpec

LANES = 32

TOLERANCE = 1e-4
"""On a log-probability and on a score. Either side has a rounding error of about 1e-6 in each log-probability."""

RELATIVE = 2e-6
"""On top of it, of a score: a negative length penalty multiplies a sum by its length, and its errors as well."""


def request(case: Case) -> BeamReq:
    """Return the case as metrale takes it."""
    options: dict[str, Any] = {name: _frozen(value) for name, value in case.options.items()}
    return BeamReq(case.prompt, case.src, case.tgt, **options)


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def batches(cases: Sequence[Case], lanes: int) -> Iterator[list[Case]]:
    """Split the cases, in their order, into lists whose beams fit into ``lanes`` together."""
    batch: list[Case] = []
    for case in cases:
        if batch and sum(one.num_beams for one in batch) + case.num_beams > lanes:
            yield batch
            batch = []
        batch.append(case)
    if batch:
        yield batch


def answers(spec: ModelSpec, cases: Sequence[Case], gpu: GpuBackend | str, scratch: Path) -> list[list[Hypothesis]]:
    """Return the hypotheses of every case of one model: several requests in a call, of different options.

    ``scratch`` is a folder for the checkpoint.
    """
    lanes = max(LANES, max(case.num_beams for case in cases))
    limits = {
        "max_source_len": max(len(case.prompt) for case in cases) + 2,
        "max_new_tokens": max(
            case.options["max_new"] + len(case.options.get("prefix_tokens", [])) + 1 for case in cases
        ),
    }
    found: list[list[Hypothesis]] = []
    with metrale.load(spec.write(scratch), gpu, "float32", max_batch=lanes, **limits) as model:
        for batch in batches(cases, lanes):
            found += model.generate_beams([request(case) for case in batch])
    return found


def differences(case: Case, found: Sequence[Hypothesis], answer: Answer) -> list[str]:
    """Return in words what is not as transformers has it; nothing when all is."""
    ids = [list(hypothesis.ids) for hypothesis in found]
    if ids != answer.ids:
        return [f"{case.name}: ids {ids}, expected {answer.ids} (margin {answer.margin:.1e}, {case.options})"]
    if case.num_beams == 1:  # transformers gives no scores for it
        return []
    # With a prefix, transformers has log-probabilities for what follows it alone.
    last = list(found[0].logprobs)[-len(answer.transitions) :]
    return [
        f"{case.name}: {what} {ours}, expected {theirs}"
        for what, ours, theirs in (
            ("scores", [hypothesis.score for hypothesis in found], answer.scores),
            ("logprobs", last, answer.transitions),
        )
        if not close(ours, theirs)
    ]


def close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether two lists of scores or log-probabilities are equal up to rounding."""
    return len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=RELATIVE, atol=TOLERANCE)
