# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator: golden texts, order, languages, limits, scores, choices, interrupts, and what it refuses."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from metrale import InvalidInput, Translation, Translator, UnknownLanguage, demo_model_path
from metrale.engine import EngineClosed
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.reference.nllb_float64 import NllbFloat64
from tests.reference.tiny import write_tiny
from tests.translating import CASES, EXPECTED, SOURCES, TARGETS, TEXTS, demo_translator


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 8) as translator:
        yield translator


def test_golden_texts_in_one_call(translator: Translator) -> None:
    results = translator.translate(TEXTS, SOURCES, TARGETS)
    assert [result.text for result in results] == EXPECTED
    assert [result.source_lang for result in results] == SOURCES
    assert [result.target_lang for result in results] == TARGETS
    for case, result in zip(CASES, results, strict=True):
        ids = [token for token in case["greedy"]["ids"][2:-1] if token != 3]  # <unk> is a special token
        assert list(result.token_ids) == ids
        assert (result.finish_reason, result.truncated, result.score, result.error) == ("eos", False, None, None)


def test_the_order_of_the_texts_changes_nothing(translator: Translator) -> None:
    order = list(range(len(TEXTS)))
    random.Random(5).shuffle(order)
    results = translator.translate([TEXTS[i] for i in order], [SOURCES[i] for i in order], [TARGETS[i] for i in order])
    assert [result.text for result in results] == [EXPECTED[i] for i in order]


def test_one_text_gives_one_translation(translator: Translator) -> None:
    result = translator.translate(TEXTS[0], SOURCES[0], TARGETS[0])
    assert isinstance(result, Translation)
    assert result.text == EXPECTED[0]


def test_no_texts(translator: Translator) -> None:
    assert translator.translate([]) == []


def test_default_languages(translator: Translator) -> None:
    result = translator.translate("Hello, how are you today?")
    assert (result.source_lang, result.target_lang, result.text) == ("eng_Latn", "fra_Latn", EXPECTED[0])


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u00a0\u2003", "\u200b"])
def test_blank_gives_blank(translator: Translator, blank: str) -> None:
    first, second = translator.translate([blank, TEXTS[0]])
    assert (first.text, first.token_ids, first.finish_reason) == ("", (), "eos")
    assert second.text == EXPECTED[0]


def test_max_new_tokens_counts_language_and_eos(translator: Translator) -> None:
    ids = CASES[0]["greedy"]["ids"]  # start, language, tokens, EOS
    exact = translator.translate(TEXTS[0], max_new_tokens=len(ids) - 1)
    assert (exact.finish_reason, list(exact.token_ids)) == ("eos", ids[2:-1])
    for less in (len(ids) - 2, 3, 2, 1):
        cut = translator.translate(TEXTS[0], max_new_tokens=less)
        assert (cut.finish_reason, list(cut.token_ids)) == ("length", ids[2 : less + 1])


def test_scores_are_those_of_transformers(translator: Translator) -> None:
    judge = NllbFloat64.load(demo_model_path())
    results = translator.translate(TEXTS, SOURCES, TARGETS, return_scores=True)
    for case, result in zip(CASES, results, strict=True):
        ids = case["greedy"]["ids"]
        source = translator.model.tokenizer.encode_source(case["text"], case["src_lang"])  # type: ignore[union-attr]
        logits = judge.logits(source, ids[:-1])[1:]
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(ids) - 2), ids[2:]] - np.log(np.exp(logits).sum(axis=1))
        # float32 logits are within 1e-5 of 15, so each of the averaged log-probabilities is within 3e-4; seen: 4e-6
        assert result.score == pytest.approx(chosen.sum() / (len(ids) - 1), abs=3e-5)
        if case["beam4"]["ids"] == ids and source == case["input_ids"]:
            assert result.score == pytest.approx(case["beam4"]["score"], abs=3e-5), "recorded by transformers"


def test_a_long_source_is_cut_and_flagged(translator: Translator) -> None:
    text = "Turn off the lights in the living room. " * 12
    result = translator.translate(text)
    assert result.truncated
    tokenizer = translator.model.tokenizer
    assert tokenizer is not None
    first = tokenizer.encode(text)[:62]
    again = translator.translate(tokenizer.decode(first))
    assert not again.truncated
    assert again.token_ids == result.token_ids
    with pytest.raises(InvalidInput, match=r"texts\[1\]: expected a text of at most 62 tokens, got \d+ tokens"):
        translator.translate(["short", text], truncate=False)


def test_progress_reaches_the_number_of_texts(translator: Translator) -> None:
    seen: list[int] = []
    translator.translate([*TEXTS, "", " "], [*SOURCES, *SOURCES[:2]], [*TARGETS, *TARGETS[:2]], progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(TEXTS) + 2


def test_an_exception_in_the_callback_frees_the_lanes(translator: Translator) -> None:
    def stop(count: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        translator.translate(TEXTS, SOURCES, TARGETS, progress=stop)
    assert translator.translate(TEXTS[0]).text == EXPECTED[0]


def test_other_holders_of_slots_leave_fewer_lanes(translator: Translator) -> None:
    seqs = [translator.model.alloc_sequence() for _ in range(6)]
    results = translator.translate(TEXTS[:9], SOURCES[:9], TARGETS[:9])
    assert [result.text for result in results] == EXPECTED[:9]
    seqs += [translator.model.alloc_sequence() for _ in range(2)]
    assert translator.translate(TEXTS[0], timeout=0.1).finish_reason == "timeout"  # it waits for a slot
    for seq in seqs:
        translator.model.free_sequence(seq)


def test_many_threads_share_a_translator(translator: Translator) -> None:
    results: dict[int, list[str]] = {}

    def work(index: int) -> None:
        chosen = range(index, len(TEXTS), 4)
        found = translator.translate(
            [TEXTS[i] for i in chosen], [SOURCES[i] for i in chosen], [TARGETS[i] for i in chosen]
        )
        results[index] = [result.text for result in found]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: EXPECTED[index::4] for index in range(4)}


def test_translators_and_threads_share_a_model(translator: Translator) -> None:
    """A batch has the model to itself: neither another translator nor a caller of single steps disturbs its rows."""
    results: dict[str, list[str]] = {}

    def translate(name: str) -> None:
        with Translator(translator.model) as mine:
            cases = zip(TEXTS[:6], SOURCES, TARGETS, strict=False)
            results[name] = [mine.translate(text, source, target).text for text, source, target in cases]

    def step_by_step() -> None:
        model, tokenizer = translator.model, translator.model.tokenizer
        assert tokenizer is not None
        texts = []
        for case in CASES[:4]:
            seq = model.alloc_sequence()
            seq.src_lang_id, seq.tgt_lang_id = case["input_ids"][0], case["greedy"]["ids"][1]
            with model.exclusive():
                token = model.argmax_on_device(model.prefill(case["input_ids"][1:-1], seq))
            ids = []
            while token != tokenizer.eos_id:
                ids.append(token)
                with model.exclusive():
                    token = model.argmax_on_device(model.decode(token, seq))
            model.free_sequence(seq)
            texts.append(tokenizer.decode(ids))
        results["steps"] = texts

    threads = [threading.Thread(target=translate, args=(name,)) for name in "abc"]
    threads.append(threading.Thread(target=step_by_step))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {**dict.fromkeys("abc", EXPECTED[:6]), "steps": EXPECTED[:4]}


def test_a_callback_may_translate_while_lanes_are_free(translator: Translator) -> None:
    inner: list[str] = []
    found = translator.translate(
        TEXTS[:5], SOURCES[:5], TARGETS[:5], progress=lambda n: inner.append(translator.translate(TEXTS[0]).text)
    )
    assert [result.text for result in found] == EXPECTED[:5]
    assert inner
    assert set(inner) == {EXPECTED[0]}


def test_a_callback_may_translate_when_every_lane_is_taken(translator: Translator) -> None:
    """A lane that ended is free before the callback hears of it."""
    inner: list[str] = []
    found = translator.translate(
        TEXTS[:9], SOURCES[:9], TARGETS[:9], progress=lambda n: inner.append(translator.translate(TEXTS[0]).text)
    )
    assert [result.text for result in found] == EXPECTED[:9]
    assert set(inner) == {EXPECTED[0]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_cancels_what_is_under_way(translator: Translator, error: type[BaseException]) -> None:
    """The texts that are not finished leave their lanes before the exception reaches the caller."""
    submitted: list[Any] = []
    engine = translator._running()
    original = engine.submit

    def submit(request: Any) -> Any:
        submitted.append(original(request))
        return submitted[-1]

    def stop(count: int) -> None:
        raise error("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", submit)
        with pytest.raises(error):
            translator.translate(TEXTS, SOURCES, TARGETS, progress=stop)
    assert len(submitted) == 32  # the window: four texts for each lane
    assert all(handle.done for handle in submitted)
    assert sum(handle.finish_reason == "cancelled" for handle in submitted) >= 16
    seqs = [translator.model.alloc_sequence() for _ in range(8)]
    for seq in seqs:
        translator.model.free_sequence(seq)


def test_a_text_that_has_no_room_fails_alone(gpu: GpuBackend) -> None:
    """KV for 40 positions: a short text and its translation fit, a long one does not, whatever its place."""
    plan = metrale.memory_plan(demo_model_path(), gpu, "float32", max_batch=1, max_source_len=24, max_new_tokens=16)
    texts = ["Hello.", "Turn off the lights in the living room and in the kitchen, please.", "Good morning!"]
    options = {"max_batch": 4, "max_source_len": 24, "max_new_tokens": 24, "kv_bytes": plan.kv // 41 * 40}
    seen: list[int] = []
    with Translator(demo_model_path(), device=gpu, dtype="float32", **options) as small:
        results = small.translate(texts, "eng_Latn", "fra_Latn", progress=seen.append)
    assert [result.finish_reason for result in results] == ["eos", "error", "eos"]
    assert "out of memory" in str(results[1].error)
    assert seen[-1] == 3


@pytest.mark.parametrize("texts", [None, 5, {"a", "b"}, b"bytes", {"a": 1}])
def test_what_is_no_sequence_of_texts_is_refused(translator: Translator, texts: Any) -> None:
    with pytest.raises(InvalidInput, match="texts: expected a str or a sequence of str"):
        translator.translate(texts)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"source": "english"}, UnknownLanguage, "source: .*eng_Latn"),
        ({"target": "fr"}, UnknownLanguage, "target: .*fra_Latn"),
        ({"target": ["fra_Latn", "xxx"]}, UnknownLanguage, "target: .*xxx"),
        ({"target": ["fra_Latn"]}, InvalidInput, "target: expected one code for each of 2 texts, got 1 codes"),
        ({"max_new_tokens": 0}, InvalidInput, "max_new_tokens: expected an int from 1 to 64"),
        ({"max_new_tokens": 65}, InvalidInput, "max_new_tokens: .*the limit the model was loaded with, got 65"),
        ({"max_new_tokens": True}, InvalidInput, "max_new_tokens"),
        ({"progress": 3}, InvalidInput, "progress: expected a callable"),
        ({"source": 5}, InvalidInput, "source: expected a language code"),
        ({"target": [[], []]}, UnknownLanguage, "target"),
        ({"num_beams": 0}, InvalidInput, "num_beams: expected an int of 1 to 64, got 0"),
        ({"sampling": 1.0}, InvalidInput, "sampling: expected a SamplingParams"),
        ({"timeout": 0}, InvalidInput, "timeout: expected a finite number of seconds"),
    ],
)
def test_wrong_options_are_refused_by_name(
    translator: Translator, how: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        translator.translate(["one", "two"], **how)


@pytest.mark.parametrize("texts", [[b"bytes"], [None], ["fine", 3], ["\ud800"]])
def test_what_is_no_text_is_refused(translator: Translator, texts: list[Any]) -> None:
    with pytest.raises(InvalidInput, match=r"texts\[\d\]"):
        translator.translate(texts)


def test_languages_that_have_no_default() -> None:
    with metrale.load(demo_model_path(), "host", max_batch=1, max_new_tokens=8) as model, Translator(model) as bare:
        assert "fra_Latn" in bare.languages
        with pytest.raises(InvalidInput, match=r"source: .*source= where the model is loaded"):
            bare.translate("hello", target="fra_Latn")
        with pytest.raises(InvalidInput, match=r"target: .*target= where the model is loaded"):
            bare.translate("hello", source="eng_Latn")
        bare.close()
        assert model.alloc_sequence().slot_idx == 0, "a model that was given stays open"


def test_options_with_a_loaded_model_are_refused(translator: Translator) -> None:
    with pytest.raises(InvalidInput, match="options"):
        Translator(translator.model, max_batch=4)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    folder = write_tiny(tmp_path / "tiny", 3)
    with pytest.raises(InvalidInput, match="model: expected a checkpoint with a tokenizer"):
        Translator(folder, device="host", max_batch=1)


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the logits of the last lane in some step NaN, as a kernel fault would."""
    original = NllbModel.sample_batch_to_feed
    calls = 0

    def sample(self: NllbModel, logits: Any, seqs: Any, *rest: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            row = logits.offset((len(seqs) - 1) * self.logits_row_bytes())
            self.gpu.event_synchronize(self.logits_event(row))  # a forward on another stream may still write it
            self.gpu.copy_h2d(np.full(4, np.nan, dtype=np.float32), row)
        original(self, logits, seqs, *rest, **options)

    monkeypatch.setattr(NllbModel, "sample_batch_to_feed", sample)


def test_a_failed_request_leaves_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch, translator: Translator) -> None:
    poison(monkeypatch, 3)
    results = translator.translate(TEXTS[:4], SOURCES[:4], TARGETS[:4])
    failed = [result for result in results if result.finish_reason == "error"]
    assert len(failed) == 1
    assert (failed[0].text, failed[0].error) == ("", "the model's logits hold a NaN or an infinity")
    good = [(r.text, e) for r, e in zip(results, EXPECTED[:4], strict=True) if r.finish_reason != "error"]
    assert all(text == expected for text, expected in good)


def test_a_device_that_is_lost_is_no_fault_of_a_text(monkeypatch: pytest.MonkeyPatch, translator: Translator) -> None:
    poison(monkeypatch, 1)

    def synchronize(*_: Any) -> None:
        raise DeviceError("an illegal address")

    monkeypatch.setattr(type(translator.model.gpu), "synchronize", synchronize)
    with pytest.raises(DeviceError, match="an illegal address"):
        translator.translate(TEXTS[:4], SOURCES[:4], TARGETS[:4])


def test_an_engine_that_stopped_is_no_fault_of_a_text(monkeypatch: pytest.MonkeyPatch, gpu: GpuBackend) -> None:
    with Translator(demo_model_path(), device=gpu, dtype="float32", max_batch=2, max_new_tokens=32) as doomed:
        assert doomed.translate(TEXTS[0], SOURCES[0], TARGETS[0]).text == EXPECTED[0]
        poison(monkeypatch, 1)
        doomed._running().close()
        with pytest.raises(EngineClosed):
            doomed.translate(TEXTS[0], SOURCES[0], TARGETS[0])


def test_a_closed_translator_says_so(gpu: GpuBackend) -> None:
    options = {"device": gpu, "max_batch": 1, "max_new_tokens": 8, "source": "eng_Latn", "target": "fra_Latn"}
    closed = Translator(demo_model_path(), **options)
    assert closed.translate("Hello").text
    closed.close()
    closed.close()
    with pytest.raises(metrale.SequenceError, match="the translator is closed"):
        closed.translate("Hello")
    with pytest.raises(metrale.SequenceError, match="the translator is closed"):
        closed.stream(["Hello"])


def test_to_dict_is_json(translator: Translator) -> None:
    result = translator.translate(TEXTS[0])
    again = json.loads(json.dumps(result.to_dict()))
    assert again == {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "score": None,
        "finish_reason": "eos",
        "truncated": False,
        "source_lang": "eng_Latn",
        "target_lang": "fra_Latn",
        "error": None,
        "adapter": None,
        "token_logprobs": None,
        "hypotheses": [
            {
                "text": result.text,
                "token_ids": [*result.token_ids, 2],
                "score": None,
                "token_logprobs": None,
            }
        ],
        "unknown": [],
        "repeats": False,
    }
