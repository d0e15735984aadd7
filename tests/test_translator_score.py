# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator.score and attention: what they are, whose rows, and that they wait for lanes that others have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from metrale import InvalidInput, Scored, ScoreReq, SequenceError, Translator, demo_model_path
from tests.backends import Device
from tests.reference.nllb_float64 import NllbFloat64
from tests.translating import CASES, EXPECTED, SOURCES, TARGETS, TEXTS, demo_translator

SECONDS = 30.0  # far more than it takes


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 4) as translator:
        yield translator


def test_scores_are_those_of_the_mathematics(translator: Translator) -> None:
    judge, tokenizer = NllbFloat64.load(demo_model_path()), translator.model.tokenizer
    assert tokenizer is not None
    pairs = list(range(0, len(CASES), 4))
    targets = [EXPECTED[i] if i % 8 else "Je ne sais pas." for i in pairs]  # likely ones, and others
    results = translator.score(
        [TEXTS[i] for i in pairs], targets, [SOURCES[i] for i in pairs], [TARGETS[i] for i in pairs]
    )
    for i, target, result in zip(pairs, targets, results, strict=True):
        ids = [*tokenizer.encode(target), 2]
        source = tokenizer.encode_source(TEXTS[i], SOURCES[i])
        logits = judge.logits(source, [2, tokenizer.language_id(TARGETS[i]), *ids[:-1]])[1:]
        logits -= logits.max(axis=1, keepdims=True)
        expected = logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(axis=1))
        assert (list(result.token_ids), result.truncated, result.adapter) == (ids, False, None)
        assert (result.source_lang, result.target_lang) == (SOURCES[i], TARGETS[i])
        # float32 logits are within 1e-5 of 15
        assert result.token_logprobs == pytest.approx(expected, abs=3e-4)
        assert result.score == pytest.approx(expected.sum() / (1 + len(ids)), abs=3e-5)


def test_a_translation_scores_what_it_was_scored(translator: Translator) -> None:
    translated = translator.translate(TEXTS[0], return_scores=True)
    again = translator.score(TEXTS[0], translated.text)
    assert isinstance(again, Scored)
    assert again.token_ids == translated.hypotheses[0].token_ids
    # the same sums in other orders: 1e-5 of logits of 15
    assert again.token_logprobs == pytest.approx(translated.token_logprobs, abs=3e-4)
    assert translator.score(TEXTS[0], "Il pleut.").score < again.score
    assert json.loads(json.dumps(again.to_dict()))["token_ids"] == list(again.token_ids)


def test_more_pairs_than_lanes_and_blank_ones(translator: Translator) -> None:
    texts, targets = [*TEXTS[:9], ""], [*EXPECTED[:9], ""]
    results = translator.score(texts, targets)
    assert [len(result.token_ids) for result in results[-1:]] == [1]  # EOS alone
    assert translator.score(texts[3], targets[3]).score == pytest.approx(results[3].score, abs=1e-5)
    assert translator.score([], []) == []


def test_a_long_source_is_cut_and_flagged(translator: Translator) -> None:
    text = "Turn off the lights in the living room. " * 12
    assert translator.score(text, "Oui.").truncated
    with pytest.raises(InvalidInput, match=r"sources\[0\]: expected a text of at most 62 tokens"):
        translator.score([text], ["Oui."], truncate=False)
    with pytest.raises(InvalidInput, match=r"targets\[1\]: expected a text of at most 63 tokens"):
        translator.score(["Yes.", "Yes."], ["Oui.", text])


@pytest.mark.parametrize(
    ("sources", "targets", "how", "match"),
    [
        (["a", "b"], ["a"], {}, "targets: expected one target for each source, got 1 for 2"),
        ("a", ["a"], {}, "targets: expected one target"),
        (["a"], "a", {}, "targets: expected one target"),
        ([3], ["a"], {}, r"sources\[0\]: expected a str"),
        (["a"], [b"a"], {}, r"targets\[0\]: expected a str"),
        (5, ["a"], {}, "sources: expected a str or a sequence of str"),
        (["a"], ["a"], {"target": "french"}, "target: expected a language code"),
        (["a"], ["a"], {"adapter": "law"}, "adapter: expected None"),
    ],
)
def test_what_is_no_pair_is_refused(
    translator: Translator, sources: Any, targets: Any, how: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match):
        translator.score(sources, targets, **how)


def test_attention_has_a_row_for_each_token(translator: Translator) -> None:
    tokenizer = translator.model.tokenizer
    assert tokenizer is not None
    texts = [*TEXTS[:5], ""]
    *results, blank = translator.translate(texts, num_beams=2, return_attention=True)
    assert blank.attention is None
    for text, result in zip(texts, results, strict=False):
        source, best = tokenizer.encode(text), result.hypotheses[0].token_ids
        assert result.attention is not None
        assert result.attention.shape == (len(best), len(source) + 2)
        assert result.attention.dtype == np.float32
        np.testing.assert_allclose(result.attention.sum(axis=1), 1, atol=1e-5)  # float32 sums of at most 64 terms
        language = tokenizer.language_id
        req = ScoreReq(source, best, language("eng_Latn"), language("fra_Latn"))
        (scored,) = translator.model.score_targets([req], attention=True)
        assert scored.attention is not None
        expected = scored.attention.astype(np.float64).mean(axis=(0, 1))
        np.testing.assert_allclose(result.attention, expected, atol=1e-6)  # float32 means of numbers of at most 1


def test_a_row_belongs_to_the_step_that_chose_the_token(translator: Translator) -> None:
    """It depends on the tokens before, and not on the token itself."""
    one, other = translator.translate([TEXTS[0]] * 2, target_prefix=["Bonjour", "Salut"], return_attention=True)
    assert one.attention is not None
    assert other.attention is not None
    assert one.token_ids[0] != other.token_ids[0]
    np.testing.assert_allclose(one.attention[0], other.attention[0], atol=1e-5)  # sums in another order
    assert np.abs(one.attention[1] - other.attention[1]).max() > 1e-2


def test_a_stream_gives_attention_while_its_texts_have_all_lanes(translator: Translator) -> None:
    listed = translator.translate(TEXTS[:12], return_attention=True)
    streamed = list(translator.stream(TEXTS[:12], return_attention=True))
    for one, other in zip(listed, streamed, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.attention, other.attention, atol=1e-5)  # type: ignore[arg-type]


def test_scores_come_while_translations_go_on(translator: Translator) -> None:
    alone = [result.score for result in translator.score(TEXTS[:6], EXPECTED[:6])]
    found: list[list[str]] = []

    def translate() -> None:
        found.append([one.text for one in translator.translate(TEXTS, SOURCES, TARGETS)])

    threads = [threading.Thread(target=translate) for _ in range(2)]
    for thread in threads:
        thread.start()
    beside = [result.score for result in translator.score(TEXTS[:6], EXPECTED[:6])]
    for thread in threads:
        thread.join(SECONDS)
    assert beside == pytest.approx(alone, abs=1e-5)
    assert found == [EXPECTED] * 2


def test_it_waits_for_lanes_that_others_have(translator: Translator) -> None:
    seqs = [translator.model.alloc_sequence() for _ in range(4)]
    found: list[Scored] = []
    thread = threading.Thread(target=lambda: found.append(translator.score(TEXTS[0], EXPECTED[0])))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    assert not found
    for seq in seqs:
        translator.model.free_sequence(seq)
    thread.join(SECONDS)
    assert len(found) == 1


def test_waiting_ends_when_the_translator_is_closed(translator: Translator) -> None:
    other = Translator(translator.model)
    seqs = [translator.model.alloc_sequence() for _ in range(4)]
    found: list[BaseException] = []

    def score() -> None:
        try:
            other.score(TEXTS[0], EXPECTED[0])
        except SequenceError as error:
            found.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.1)
    other.close()
    thread.join(SECONDS)
    for seq in seqs:
        translator.model.free_sequence(seq)
    assert [str(error) for error in found] == ["the translator is closed"]
    with pytest.raises(SequenceError, match="the translator is closed"):
        other.score("a", "b")


def test_what_never_has_room_is_not_waited_for(gpu: GpuBackend) -> None:
    """KV for 40 positions."""
    plan = metrale.memory_plan(demo_model_path(), gpu, "float32", max_batch=1, max_source_len=24, max_new_tokens=16)
    options = {"max_batch": 4, "max_source_len": 24, "max_new_tokens": 24, "kv_bytes": plan.kv // 41 * 40}
    languages = {"source": "eng_Latn", "target": "fra_Latn"}
    long = "Turn off the lights in the living room and in the kitchen, please."
    with Translator(demo_model_path(), device=gpu, dtype="float32", **options, **languages) as small:
        assert small.score("Hello.", "Bonjour.").score < 0
        with pytest.raises(OutOfMemory):
            small.score(long, "Allumez les lumi\u00e8res dans la salle, s'il vous.")
