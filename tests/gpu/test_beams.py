# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam search on a GPU: all golden cases in one call, what is copied and waited for, and requests in company."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import BeamReq, Hypothesis
from metrale.nllb.model import NllbModel
from metrale.ops.beam_layout import pool_width
from tests.backends import cuda_only
from tests.gpu.conftest import LANES, Say
from tests.gpu.copies import Seen, watched
from tests.nllb.adapters import NAMES, Shelf
from tests.nllb.decoding import EOS, LIMITS, START
from tests.nllb.test_beam_golden import BEAMS, GOLDEN, SCORE, SEARCHES

pytestmark = cuda_only

Models = Callable[[str], NllbModel]

COUNTED = GOLDEN[::11]
"""Cases whose searches are counted: few enough that each finds a free slot of page-locked memory for what it sends."""

ROUNDING = 0.05
"""Of a score in bfloat16. A logit is off by up to 0.12 there (`test_precision`), but a score is the mean of some
log-probabilities, whose errors have both signs: 0.008 on the host."""


def request_of(case: dict[str, Any], search: str) -> BeamReq:
    ids = case["input_ids"]
    options: dict[str, Any] = {"num_beams": BEAMS, "max_new": LIMITS["max_new_tokens"]}
    return BeamReq(ids[1:-1], ids[0], case[search]["ids"][1], early_stopping=SEARCHES[search], **options)


def search_all(model: NllbModel) -> dict[str, list[Hypothesis]]:
    """Return the best hypothesis of every golden case by kind of search: all in one call, by turns, 16 at a time."""
    requests = [request_of(case, search) for case in GOLDEN for search in SEARCHES]
    assert BEAMS * len(requests) > LANES
    found = [hypotheses[0] for hypotheses in model.generate_beams(requests)]
    return {search: found[index :: len(SEARCHES)] for index, search in enumerate(SEARCHES)}


def equal_cases(found: Sequence[Hypothesis], search: str) -> int:
    """Return in how many cases the ids are those of transformers in float32."""
    return sum([START, *one.ids] == case[search]["ids"] for one, case in zip(found, GOLDEN, strict=True))


def test_float32_gives_every_golden_result_in_one_call(models: Models, say: Say) -> None:
    """Searches that end in different ways join and leave; `tests.nllb.test_beam_golden` has them eight at a time."""
    began = time.perf_counter()
    found = search_all(models("float32"))
    equal = {search: equal_cases(hypotheses, search) for search, hypotheses in found.items()}
    say(f"beam search, float32, {BEAMS} beams: golden results {equal}, of {len(GOLDEN)} each, all in one call; "
        f"{time.perf_counter() - began:.2f} s")  # fmt: skip
    for search, hypotheses in found.items():
        assert [[START, *one.ids] for one in hypotheses] == [case[search]["ids"] for case in GOLDEN]
        scores = [case[search]["score"] for case in GOLDEN]
        assert [one.score for one in hypotheses] == pytest.approx(scores, rel=0, abs=SCORE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits_find_results_as_good(models: Models, say: Say, dtype: str) -> None:
    """Other ids now and then, where rounding decides, but no other scores; each ends by EOS or at the limit.

    With early stopping, what has ended first ends a search: rounding may let another one end before the best.
    """
    for search, hypotheses in search_all(models(dtype)).items():
        equal = equal_cases(hypotheses, search)
        apart = [abs(one.score - case[search]["score"]) for one, case in zip(hypotheses, GOLDEN, strict=True)]
        say(f"beam search, {dtype}, {search}: {equal} of {len(GOLDEN)} golden results, scores off by {max(apart):.4f}")
        for one, case in zip(hypotheses, GOLDEN, strict=True):
            assert one.ids[0] == case[search]["ids"][1]
            assert EOS not in one.ids[:-1]
            assert one.ids[-1] == EOS or len(one.ids) == LIMITS["max_new_tokens"]
            assert sum(one.logprobs) / len(one.ids) == pytest.approx(one.score, rel=1e-5)
        assert sum(score >= ROUNDING for score in apart) <= int(search == "beam4_early_stopping")
        assert equal > 0.8 * len(GOLDEN), "rounding decides now and then, and not as a rule"


# what a run asks of CUDA


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_flags_and_hypotheses_come_to_the_host(
    models: Models, say: Say, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Counted at CuPy's functions and those of cuda-bindings, over a whole call of `generate_beams`."""
    from cuda.bindings import driver as bindings
    from cupy.cuda import runtime

    model = models(dtype)
    backend: Any = model.gpu
    requests = [request_of(case, "beam4") for case in COUNTED]
    expected = model.generate_beams(requests)  # kernels and products are loaded by now
    sizes = searches_of_each_step(model, monkeypatch)
    with watched(model.gpu, (runtime, bindings), lambda at: backend._memory.pinned.find(at) is not None) as seen:
        found = model.generate_beams(requests)
    assert found == expected
    check_calls(seen, sizes, model)
    copies = Counter((one.kind, one.nbytes) for one in seen if one.kind)
    say(f"calls of CUDA in a run of {len(requests)} searches of {BEAMS} beams in {dtype}: {len(sizes)} steps; "
        f"copies by kind and bytes: {json.dumps({f'{kind} {size}': n for (kind, size), n in sorted(copies.items())})}; "
        f"others: {json.dumps(Counter(one.name for one in seen if not one.kind))}")  # fmt: skip


def searches_of_each_step(model: NllbModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of searches of each selection from here on."""
    sizes: list[int] = []
    select = model.select_beams_to_feed

    def noted(rows: Any, seqs: Any, *others: Any, **options: Any) -> None:
        sizes.append(len(seqs))
        select(rows, seqs, *others, **options)

    monkeypatch.setattr(model, "select_beams_to_feed", noted)
    return sizes


def check_calls(seen: Sequence[Seen], sizes: Sequence[int], model: NllbModel) -> None:
    """Four bytes come for each search of a step, and a row for each beam of a search that has ended.

    The host waits for the events that come after these copies, and for nothing else; a stream is waited for once, when
    the call gives it back at its end, and all its work is done by then.
    """
    count, steps = len(COUNTED), len(sizes)
    row = 4 * pool_width(model.shape.limits.target_positions)
    to_host = [one for one in seen if one.kind == "d2h"]
    flags = [one.nbytes for one in to_host if one.nbytes != row]
    assert flags == [4 * size for size in sizes]
    assert len(to_host) - len(flags) == BEAMS * count
    assert sizes[0] == count
    assert sizes[-1] < count, "searches end at different steps"
    assert all(one.pinned for one in seen if one.kind)
    assert {one.kind for one in seen} == {"h2d", "d2h", ""}, "nothing is copied from beam to beam"
    waits = Counter(one.name for one in seen if not one.kind)
    assert waits == {"eventSynchronize": steps + count, "streamSynchronize": 1}
    assert seen[-1].name == "streamSynchronize"
    # After the first step, each sends what its decoder pass and what its selection need to know: a table each.
    ends = [index for index, one in enumerate(seen) if one.kind == "d2h" and one.nbytes != row]
    for first, last in pairwise(ends):
        assert sum(one.kind == "h2d" for one in seen[first:last]) == 2
    assert not any(one.kind == "h2d" for one in seen[ends[-1] :])


# company


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("adapters"))


def drawn(seed: int) -> list[BeamReq]:
    """Return 16 requests of all widths, with adapters and without; many ids end a result, so that they end anywhere."""
    draw = random.Random(seed)
    requests = []
    for index in range(16):
        beams = 1 if index % 5 == 0 else draw.choice((2, 3, 4, 6, 8))  # of either kind some with adapters, some without
        options: dict[str, Any] = {"num_beams": beams, "max_new": draw.randint(5, 16), "adapter_slot": index % 6 - 1}
        options["eos_ids"] = tuple(draw.sample(range(2, 80), draw.randint(1, 8)))
        if beams > 1:
            options["num_return_sequences"] = draw.randint(1, beams)
            options["length_penalty"] = draw.choice((1.0, 0.0, 2.0, -0.5))
            options["early_stopping"] = draw.choice((False, True, "never"))
        if draw.random() < 0.3:
            options["no_repeat_ngram_size"] = 2
        if draw.random() < 0.3:
            options["repetition_penalty"] = 1.3
        if draw.random() < 0.3:
            options["prefix_tokens"] = tuple(draw.sample(range(80, 97), 2))
        prompt = [draw.randrange(3, 80) for _ in range(draw.randint(1, 9))]
        requests.append(BeamReq(prompt, draw.randrange(80, 97), draw.randrange(80, 97), **options))
    return requests


CLOSE = 2e-4
"""On a log-probability, and of a score: a logit may be off by 1e-5 of the largest in other company (`NEIGHBOURS` in
`tests.nllb.decoding`), which is up to 8 here, a log-probability by twice that, and a penalty multiplies it by 1.3."""


def narrowly(one: Sequence[Hypothesis], other: Sequence[Hypothesis]) -> bool:
    """Return whether two results have the same scores, whatever their ids."""
    return len(one) == len(other) and [x.score for x in one] == pytest.approx([x.score for x in other], rel=CLOSE)


# No search of these seeds is decided by less than a GPU's rounding: with noise of that size on all logits, the host
# finds the same ids.
@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_a_search_finds_in_company_what_it_finds_alone(gpu: GpuBackend, shelf: Shelf, seed: int) -> None:
    """With five adapters and none beside each other: ids, scores and log-probabilities, in float32."""
    requests = drawn(seed)
    assert sum(req.num_beams for req in requests) > 24, "some must wait for others to leave"
    with shelf.load(gpu, NAMES, max_batch=24, max_new_tokens=20) as model:
        together = model.generate_beams(requests)
        alone = [model.generate_beams([req])[0] for req in requests]
    for found, expected in zip(together, alone, strict=True):
        if [one.ids for one in found] != [one.ids for one in expected]:
            assert narrowly(found, expected), (found, expected)
            continue
        for one, other in zip(found, expected, strict=True):
            assert one.score == pytest.approx(other.score, rel=CLOSE, nan_ok=True)
            assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=CLOSE)
    assert len({len(found[0].ids) for found in together}) > 3, "they end at different steps"
