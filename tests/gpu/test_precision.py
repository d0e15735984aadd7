# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model on a GPU: transformers' ids in float32, and in bfloat16 wherever rounding leaves a choice at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from metrale.nllb.model import NllbModel
from tests.backends import cuda_only
from tests.gpu.conftest import LANES, Say
from tests.nllb.decoding import GOLDEN, Rows, forced, forced_together, greedy, greedy_together

pytestmark = cuda_only

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "transformers_bf16.json").read_text(encoding="utf-8"))
Models = Callable[[str], NllbModel]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Forced:
    """Logits after each prefix of the golden ids, case by case, and how far apart the two best in float32 are.

    ``error`` is the largest difference of a bfloat16 logit, alone or in a batch, from the float32 one.
    """

    f32: list[Rows]
    alone: list[Rows]
    together: list[Rows]
    margins: list[NDArray[np.float32]]
    error: float


@pytest.fixture(scope="module")
def logits(models: Models) -> Forced:
    f32 = [forced(models("float32"), case) for case in GOLDEN]
    alone = [forced(models("bfloat16"), case) for case in GOLDEN]
    together = forced_together(models("bfloat16"), GOLDEN)
    best = [np.sort(rows, axis=1)[:, -2:] for rows in f32]
    error = max(
        float(np.abs(rows - exact).max()) for some in (alone, together) for rows, exact in zip(some, f32, strict=True)
    )
    return Forced(f32, alone, together, [pair[:, 1] - pair[:, 0] for pair in best], error)


def choices(rows: list[Rows]) -> list[Ids]:
    return [one.argmax(axis=1) for one in rows]


@pytest.mark.parametrize("size", [1, 2, 7, 32, len(GOLDEN)])
def test_float32_gives_the_golden_ids(models: Models, size: int) -> None:
    model = models("float32")
    assert len(GOLDEN) <= LANES
    if size == 1:
        assert [greedy(model, case) for case in GOLDEN] == [case.ids for case in GOLDEN]
        return
    for first in range(0, len(GOLDEN), size):
        cases = GOLDEN[first : first + size]
        assert greedy_together(model, cases) == [case.ids for case in cases]


def test_the_error_of_bfloat16_is_that_of_transformers(logits: Forced, say: Say) -> None:
    """At most 1.2 times the recorded one, of the largest logit: what follows is judged by it."""
    largest = max(float(np.abs(rows).max()) for rows in logits.f32)
    theirs: Any = RECORDED["overall"]["bfloat16"]["cached"]["max_rel"] * largest
    say(f"bfloat16: largest error {logits.error:.4f}, transformers' {theirs:.4f}, logits up to {largest:.2f}")
    assert 0 < logits.error <= 1.2 * theirs


@pytest.mark.parametrize("company", ["alone", "together"])
def test_bfloat16_differs_only_where_rounding_decides(logits: Forced, say: Say, company: str) -> None:
    """Where the two best float32 logits are further apart than bfloat16's error, it chooses as float32 does."""
    found = choices(getattr(logits, company))
    flips = [
        float(margins[step])
        for mine, golden, margins in zip(found, choices(logits.f32), logits.margins, strict=True)
        for step in np.flatnonzero(mine != golden)
    ]
    steps = sum(map(len, found))
    say(f"bfloat16 {company}: {len(flips)} of {steps} ids differ, margins up to {max(flips, default=0):.4f}, "
        f"error {logits.error:.4f}")  # fmt: skip
    assert max(flips, default=0.0) <= logits.error
    assert len(flips) <= 0.02 * steps, "rounding decides now and then, and not as a rule"


def test_bfloat16_gives_the_same_ids_alone_and_in_a_batch(logits: Forced, say: Say) -> None:
    differ, near = 0, 0
    for one, other, margins in zip(choices(logits.alone), choices(logits.together), logits.margins, strict=True):
        near += int((margins <= logits.error).sum())
        differ += int((one != other).sum())
        assert not np.any((one != other) & (margins > logits.error))
    say(f"bfloat16 alone and in a batch: {differ} ids differ; {near} have a margin below the error")
    assert differ <= near


def test_greedy_in_bfloat16_leaves_the_golden_ids_only_where_rounding_decides(
    models: Models, logits: Forced, say: Say
) -> None:
    """Free running: the first id that differs is where the float32 logits hardly do."""
    model = models("bfloat16")
    for name, results in (
        ("alone", [greedy(model, case) for case in GOLDEN]),
        ("together", greedy_together(model, GOLDEN)),
    ):
        same, margins = 0, []
        for case, ids, gaps in zip(GOLDEN, results, logits.margins, strict=True):
            differ = [step for step, (a, b) in enumerate(zip(ids, case.ids, strict=False)) if a != b]
            if not differ:
                same += ids == case.ids
                continue
            margins.append(float(gaps[differ[0] - 2]))  # the first logits choose the third id
        say(f"greedy bfloat16 {name}: {same} of {len(GOLDEN)} translations are float32's; "
            f"margins where the others leave it: {[round(margin, 4) for margin in margins]}")  # fmt: skip
        assert same + len(margins) == len(GOLDEN)
        assert max(margins, default=0.0) <= logits.error


def test_the_device_alone_repeats_itself(models: Models) -> None:
    """Equal calls give equal bits, in every type."""
    cases = GOLDEN[:9]
    for dtype in ("float32", "float16", "bfloat16"):
        model = models(dtype)
        first, again = forced_together(model, cases), forced_together(model, cases)
        assert [rows.tobytes() for rows in first] == [rows.tobytes() for rows in again]
