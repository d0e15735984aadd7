# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translations that degenerate into loops are flagged, and what a person may say is not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import Generated, TranslationOptions, Translator
from metrale.model import GREEDY
from metrale.translator.jobs import JobMaker
from metrale.translator.repeats import LONGEST_PERIOD, repeats, runs
from metrale.translator.terms import Terms
from tests.backends import Device
from tests.translating import CASES, SOURCES, TARGETS, TEXTS, demo_translator

SENTENCE = list(range(100, 110))
PLAIN = list(range(200, 260))


@pytest.mark.parametrize(
    ("ids", "whole"),
    [
        ([5] * 16, True),
        ([1, 2] * 8, True),
        ([1, 2, 3] * 6, True),
        ([1, 2, 3, 4, 5] * 4, True),
        ([1, 2, 3] * 5 + [1], True),  # a copy need not be whole
        (SENTENCE * 4, True),
        (list(range(32)) * 4, True),
        # half of it
        (PLAIN[:16] + [5] * 16, True),
        ([5] * 16 + PLAIN[:16], True),
        (PLAIN[:8] + [5] * 16 + PLAIN[8:16], True),
        (PLAIN[:16] + [5] * 16 + PLAIN[16:32] + [6, 7] * 8, True),  # two together
        ([5] * 16 + [6] * 16 + PLAIN[:32], True),
        # up to the end, where a limit stopped it
        (PLAIN + [5] * 16, False),
        (PLAIN + [8, 9] * 8, False),
        ([7] * 20 + PLAIN + [7] * 16, False),  # a longer run of the same period before it
    ],
)
def test_loops(ids: Sequence[int], whole: bool) -> None:
    assert repeats(ids, whole=whole)
    assert repeats(ids, PLAIN, SENTENCE, whole=whole)


@pytest.mark.parametrize(
    ("ids", "whole"),
    [
        ([], True),
        ([], False),
        ([5], False),
        ([5] * 15, True),
        ([5] * 15, False),
        ([1, 2] * 7 + [1], False),
        (SENTENCE * 3, False),  # three times
        (SENTENCE * 3 + SENTENCE[:9], False),
        (list(range(33)) * 6, False),
        (PLAIN[:17] + [5] * 16, True),  # less than half
        (PLAIN[:9] + [5] * 16 + PLAIN[9:17], True),
        (PLAIN + [5] * 16, True),
        (PLAIN[:33] + [5] * 16 + [6] * 16, True),
        (PLAIN + [5] * 16 + [6], False),  # it came out of it again
        ([7] * 20 + PLAIN, False),
        ([1, 2, 3, 1, 2, 4] * 2, False),
        ([token for number in range(40) for token in (number, 1000)], False),  # a list: 1, 2, 3, ...
        ([token for number in range(30) for token in (number, 1000, 1001, 1002)], False),
        ([1, 2, 1, 3] * 3 + PLAIN[:5], False),
    ],
)
def test_no_loops(ids: Sequence[int], whole: bool) -> None:
    assert not repeats(ids, whole=whole)


@pytest.mark.parametrize("size", [16, 20, 40])
def test_what_repeats_in_the_source_may_repeat(size: int) -> None:
    source = [*PLAIN[:5], *[8] * size, 9]
    assert not repeats([5] * size, source, whole=True)
    assert not repeats([5] * (2 * size), source, whole=True)
    assert not repeats([3, 5] * size, source, whole=False)
    assert repeats([5] * (2 * size + 1), source, whole=True)
    assert not repeats([5] * size + [6] * size, source, whole=True)
    assert repeats([5] * size + [6] * (size + 1), source, whole=True)
    assert not repeats(PLAIN + [5] * (2 * size), source, whole=False)
    assert repeats(PLAIN + [5] * (2 * size + 1), source, whole=False)
    assert not repeats([5] * (2 * size), PLAIN, source, whole=True)  # a prefix may, as well
    assert repeats([5] * 16, [8] * 3, whole=True)  # three are none
    assert not repeats([5] * 16, SENTENCE * 4, whole=True)
    assert not repeats([5] * 16, [*[8] * 4, *PLAIN, *[9] * 4], whole=True)


def test_short_runs_of_a_source_excuse_little() -> None:
    assert not repeats([5] * 16, [8] * 8, whole=True)
    assert repeats([5] * 16, [8] * 7, whole=True)


def test_runs_against_their_definition() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(300):
        ids = [rng.randrange(2) for _ in range(rng.randrange(60))]
        ids += (ids[-rng.randint(1, 5) :] or [1]) * rng.randrange(12)
        for least in (0, 16):
            expected = set()
            for period in range(1, min(LONGEST_PERIOD, len(ids)) + 1):
                start = 0
                while start + period < len(ids):
                    stop = start + period
                    while stop < len(ids) and ids[stop] == ids[stop - period]:
                        stop += 1
                    if stop - start >= max(4 * period, least) and stop > start + period:
                        expected.add((start, stop, period))
                    start = max(stop - period, start) + 1
            assert {(run.start, run.stop, run.period) for run in runs(ids, least_ids=least)} == expected
            found += len(expected)
    assert found > 500


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 8) as translator:
        yield translator


def test_no_golden_output_is_flagged(translator: Translator) -> None:
    for case in CASES:
        for kind in ("greedy", "beam4", "beam4_early_stopping"):
            assert not repeats(case[kind]["ids"][2:-1], whole=True), case["text"]
    for beams in (1, 4):
        results = translator.translate(TEXTS[::4], SOURCES[::4], TARGETS[::4], num_beams=beams)
        assert not any(result.repeats for result in results)


def test_a_model_that_may_not_end_loops(translator: Translator) -> None:
    endless = {"suppress_tokens": [2]}
    results = translator.translate(TEXTS[:14], SOURCES[:14], TARGETS[:14], **endless)  # type: ignore[call-overload]
    assert all(result.finish_reason == "length" for result in results)
    looping = [result for result in results if result.repeats]
    assert len(looping) >= 2
    assert all(result.text.endswith("." * 30) for result in looping)
    for result in results:
        assert result.repeats == repeats(result.hypotheses[0].token_ids, whole=False)
    (searched,) = translator.translate(["Good morning."], num_beams=2, **endless)  # type: ignore[call-overload]
    assert searched.repeats
    assert [result.repeats for result in translator.stream(["Good morning."], suppress_tokens=[2])] == [True]
    assert json.loads(json.dumps(searched.to_dict()))["repeats"] is True


@pytest.mark.parametrize(
    "text",
    [
        "Ha ha ha!",
        "ha " * 30,
        "It is very, very, very, very good.",
        "very " * 25 + "good",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
        "no " * 40,
        "." * 60,
        "- - - - - - - - - - - - - - - - - - - - - -",
        "0000 0000 0000 0000 0000 0000",
    ],
)
def test_what_people_write_is_not_flagged(text: str, translator: Translator) -> None:
    result = translator.translate(text)
    assert not result.repeats, result.text


SOME = tuple(range(200, 260))


@pytest.mark.parametrize(
    ("prompt", "prefix", "generated", "looping"),
    [
        (SOME[:9], (), Generated([5] * 20, "eos"), True),
        ((8,) * 10, (), Generated([5] * 20, "eos"), False),
        (SOME[:9], (8,) * 10, Generated([5] * 20, "eos"), False),
        (SOME[:9], (8,) * 9, Generated([5] * 20, "eos"), True),
        (SOME[:9], (5,) * 20, Generated([*SOME[:9]], "eos"), False),  # a prefix is not generated
        (SOME[:9], (), Generated([*SOME[:30], *[5] * 20], "eos"), False),
        *(
            (SOME[:9], (), Generated([*SOME[:30], *[5] * 20], reason), True)
            for reason in ("length", "timeout", "cancelled")
        ),
        (SOME[:9], (), Generated([5] * 20, "error", error="not finite"), False),  # there is no text
    ],
)
def test_what_counts_as_given(
    prompt: tuple[int, ...], prefix: tuple[int, ...], generated: Generated, looping: bool, translator: Translator
) -> None:
    model = translator.model
    assert model.tokenizer is not None
    maker = JobMaker(model, model.tokenizer, TranslationOptions(), GREEDY)
    job = maker.job(0, "", prompt, Terms("eng_Latn", "fra_Latn", prefix))
    assert maker.translation(job, generated).repeats is looping


def test_a_prefix_that_repeats_is_the_caller_s(translator: Translator) -> None:
    assert not translator.translate("Good morning.", target_prefix="la " * 30).repeats
