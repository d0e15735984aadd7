# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator.stream on a model: order, laziness, bounds, ends of every kind; and how draws depend on texts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import InvalidInput, Translator, UnknownLanguage, demo_model_path
from metrale.model import SamplingParams
from tests.backends import Device
from tests.translating import demo_translator

CASES: list[dict[str, Any]] = [
    case
    for case in json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))["cases"]
    if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn")
]
TEXTS: list[str] = [case["text"] for case in CASES]
EXPECTED: list[str] = [case["greedy"]["text"] for case in CASES]
SECONDS = 30.0  # far more than it takes


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 4) as translator:
        yield translator


class Counted(Iterator[str]):
    """Texts without an end, that knows how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __next__(self) -> str:
        self.read += 1
        return TEXTS[(self.read - 1) % len(TEXTS)]


def settled(texts: Counted) -> int:
    """Return how many texts are read once no more are."""
    seen = -1
    while seen != texts.read:
        seen = texts.read
        time.sleep(0.4)
    return seen


def test_results_come_in_the_order_of_the_texts(translator: Translator) -> None:
    texts = [text for pair in zip(TEXTS, [""] * len(TEXTS), strict=True) for text in pair]
    results = list(translator.stream(texts))
    assert [result.text for result in results] == [text for expected in EXPECTED for text in (expected, "")]
    assert {(result.source_lang, result.target_lang) for result in results} == {("eng_Latn", "fra_Latn")}
    assert list(translator.stream([])) == []


def test_scores_and_ids_are_those_of_a_list(translator: Translator) -> None:
    streamed = list(translator.stream(TEXTS, return_scores=True))
    listed = translator.translate(TEXTS, return_scores=True)
    assert [result.token_ids for result in streamed] == [result.token_ids for result in listed]
    # the texts have other neighbours: float32 sums in another order; the scores are means of some -1
    assert [result.score for result in streamed] == pytest.approx([result.score for result in listed], abs=1e-5)


@pytest.mark.parametrize(("options", "window"), [({}, 16), ({"window": 3}, 3), ({"window": 1}, 1)])
def test_no_more_than_a_window_is_read_ahead(translator: Translator, options: dict[str, Any], window: int) -> None:
    texts = Counted()
    with translator.stream(texts, **options) as stream:
        assert settled(texts) == 0, "nothing is read before something is asked for"
        assert next(stream).text == EXPECTED[0]
        assert settled(texts) == 1 + window
        assert [next(stream).text for _ in range(3)] == EXPECTED[1:4]
        assert settled(texts) == 4 + window


def test_a_source_that_waits_holds_back_no_result(translator: Translator) -> None:
    questions: Queue[str | None] = Queue()
    stream = translator.stream(iter(questions.get, None))
    for text, expected in zip(TEXTS[:3], EXPECTED, strict=False):
        questions.put(text)
        assert next(stream).text == expected
    questions.put(None)
    assert list(stream) == []


def test_closing_cancels_and_leaves_the_lanes(translator: Translator) -> None:
    texts = Counted()
    stream = translator.stream(texts)
    next(stream)
    stream.close()
    read = texts.read
    seqs = [translator.model.alloc_sequence() for _ in range(4)]
    for seq in seqs:
        translator.model.free_sequence(seq)
    assert settled(texts) == read
    assert list(stream) == []


def test_a_stream_that_is_dropped_reads_no_more(translator: Translator) -> None:
    texts = Counted()
    stream = translator.stream(texts)
    next(stream)
    del stream
    read = settled(texts)
    assert read <= 1 + 16 + 1  # it may have been reading one
    translator.translate("Hello")
    assert settled(texts) == read


def test_cancelling_gives_what_is_finished_and_says_what_is_not(translator: Translator) -> None:
    stream = translator.stream(Counted(), window=64)  # more than can be finished at once
    results = [next(stream) for _ in range(2)]
    stream.cancel()
    results += stream
    assert len(results) <= 2 + 64
    assert [result.text for result in results[:2]] == EXPECTED[:2]
    assert {result.finish_reason for result in results[2:]} <= {"eos", "cancelled"}
    assert "cancelled" in {result.finish_reason for result in results}
    for index, result in enumerate(results):
        if result.finish_reason == "eos":
            assert result.text == EXPECTED[index % len(EXPECTED)]


def test_another_thread_may_cancel_while_this_one_waits(translator: Translator) -> None:
    seqs = [translator.model.alloc_sequence() for _ in range(4)]  # no lane is left: nothing is ever finished
    stream = translator.stream(Counted())
    threading.Timer(0.2, stream.cancel).start()
    assert {result.finish_reason for result in stream} == {"cancelled"}
    for seq in seqs:
        translator.model.free_sequence(seq)


def test_what_reading_raises_comes_after_the_results_before_it(translator: Translator) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:3]
        raise OSError("gone")

    stream = translator.stream(texts())
    assert [next(stream).text for _ in range(3)] == EXPECTED[:3]
    with pytest.raises(OSError, match="gone"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("wrong", "match"),
    [(b"bytes", "a str, got bytes"), ("\ud800", "UTF-8"), ("word " * 100, "a text of at most 62 tokens")],
)
def test_a_text_that_is_refused_is_so_in_its_place(translator: Translator, wrong: Any, match: str) -> None:
    stream = translator.stream([*TEXTS[:2], wrong, TEXTS[3]], truncate=False)
    assert [next(stream).text for _ in range(2)] == EXPECTED[:2]
    with pytest.raises(InvalidInput, match=rf"texts\[2\]: .*{match}"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"texts": "one"}, InvalidInput, "texts: expected an iterable of str, got one str"),
        ({"texts": 5}, InvalidInput, "texts: expected"),
        ({"source": "english"}, UnknownLanguage, "source: .*eng_Latn"),
        ({"target": ["fra_Latn", "deu_Latn"]}, InvalidInput, "target: expected one code, got 2 codes"),
        ({"window": 0}, InvalidInput, "window"),
        ({"first_index": -1}, InvalidInput, "first_index"),
        ({"num_beams": 5}, InvalidInput, "num_beams: expected at most 4, a lane for each, got 5"),
        ({"max_new_tokens": 65}, InvalidInput, "max_new_tokens"),
        ({"timeout": -1}, InvalidInput, "timeout"),
        ({"sampling": None}, InvalidInput, "sampling"),
    ],
)
def test_wrong_options_are_refused_at_once(
    translator: Translator, how: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        translator.stream(**{"texts": ["one"], **how})


def test_a_timeout_gives_what_there_is(translator: Translator) -> None:
    seqs = [translator.model.alloc_sequence() for _ in range(4)]  # no lane is left
    (late,) = translator.stream([TEXTS[0]], timeout=0.05)
    assert (late.finish_reason, late.text, late.error) == ("timeout", "", None)
    for seq in seqs:
        translator.model.free_sequence(seq)


def test_an_interrupt_while_it_waits_cancels_the_rest(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Counted()
    stream = translator.stream(texts)
    next(stream)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    read = texts.read
    assert list(stream) == []
    assert settled(texts) == read


def test_closing_the_translator_ends_its_streams(gpu: GpuBackend) -> None:
    translator = Translator(demo_model_path(), device=gpu, max_batch=2, max_new_tokens=32)
    stream = translator.stream(Counted(), "eng_Latn", "fra_Latn")
    next(stream)
    translator.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


# draws


@pytest.fixture
def hot() -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=11)


def test_each_text_draws_by_itself(translator: Translator, hot: SamplingParams) -> None:
    """What a text comes to depends on the seed and its index, not on the other texts or the lanes."""

    def draw(texts: list[str], **options: Any) -> list[tuple[int, ...]]:
        options = {"sampling": hot, "max_new_tokens": 12, **options}
        return [result.token_ids for result in translator.translate(texts, **options)]

    texts = [TEXTS[0]] * 6
    drawn = draw(texts)
    assert len(set(drawn)) == 6
    others = draw([*TEXTS[1:3], texts[2], TEXTS[3], texts[4]])
    assert [others[2], others[4]] == [drawn[2], drawn[4]]
    assert draw(texts, sampling=replace(hot, seed=12)) != drawn
    assert draw(texts[:1]) == drawn[:1]
    for first in (0, 4):
        stream = translator.stream(texts[first:], sampling=hot, max_new_tokens=12, first_index=first)
        assert [result.token_ids for result in stream] == drawn[first:]


def test_choices_reach_the_engine(translator: Translator) -> None:
    (plain,) = translator.translate([TEXTS[0]])
    banned = translator.translate(TEXTS[0], sampling=SamplingParams(suppress_tokens=plain.token_ids[:1]))
    assert plain.token_ids[0] not in banned.token_ids
    longer = translator.translate(TEXTS[0], sampling=SamplingParams(min_new_tokens=len(plain.token_ids) + 10))
    assert len(longer.token_ids) >= len(plain.token_ids) + 8  # language and EOS count as well
