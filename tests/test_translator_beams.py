# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator with beams, constraints and target prefixes: recorded texts and scores, n-best lists, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import InvalidInput, SamplingParams, Translation, TranslationOptions, Translator
from metrale.translator import Options
from tests.backends import Device
from tests.translating import CASES, SOURCES, TARGETS, TEXTS, demo_translator

HELLO = TEXTS[0]
BONJOUR: list[int] = CASES[0]["greedy"]["ids"][2:]


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 8) as translator:
        yield translator


@pytest.mark.parametrize(
    ("recorded", "early_stopping", "some"),
    [("beam4", False, slice(0, None, 2)), ("beam4_early_stopping", True, slice(1, None, 2))],
)
def test_golden_texts_and_scores(translator: Translator, recorded: str, early_stopping: bool, some: slice) -> None:
    """One half of the cases each way; `tests/nllb/test_beam_golden.py` has the ids of all of them both ways."""
    texts, sources, targets = TEXTS[some], SOURCES[some], TARGETS[some]
    results = translator.translate(
        texts, sources, targets, num_beams=4, early_stopping=early_stopping, return_scores=True
    )
    for case, result in zip(CASES[some], results, strict=True):
        (best,) = result.hypotheses
        assert (result.text, list(best.token_ids)) == (case[recorded]["text"], case[recorded]["ids"][2:])
        assert (result.finish_reason, best.text, best.score) == ("eos", result.text, result.score)
        assert len(best.token_logprobs or ()) == len(best.token_ids)
        assert result.score == pytest.approx(sum(best.token_logprobs or ()) / (1 + len(best.token_ids)), abs=1e-5)
        tokenizer = translator.model.tokenizer
        assert tokenizer is not None
        if tokenizer.encode_source(case["text"], case["src_lang"]) == case["input_ids"]:
            assert result.score == pytest.approx(case[recorded]["score"], abs=1e-4)  # recorded with five digits


def test_an_n_best_list_is_in_order(translator: Translator) -> None:
    for result in translator.translate(TEXTS[:6], SOURCES[:6], TARGETS[:6], **_n_best(4)):
        scores = [one.score for one in result.hypotheses]
        assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
        assert len({one.token_ids for one in result.hypotheses}) == len(result.hypotheses) == 4
        assert (result.text, result.score) == (result.hypotheses[0].text, scores[0])
        assert result.token_logprobs == result.hypotheses[0].token_logprobs


def _n_best(beams: int) -> Options:
    return {"num_beams": beams, "num_return_sequences": beams, "return_scores": True}


def test_a_stream_finds_what_a_list_does(translator: Translator) -> None:
    listed = translator.translate(TEXTS[:5], "eng_Latn", "fra_Latn", num_beams=3, num_return_sequences=2)
    streamed = list(translator.stream(TEXTS[:5], "eng_Latn", "fra_Latn", num_beams=3, num_return_sequences=2))
    assert streamed == listed


def test_one_beam_has_one_hypothesis(translator: Translator) -> None:
    plain = translator.translate(HELLO)
    assert [(one.token_ids, one.score, one.token_logprobs) for one in plain.hypotheses] == [
        (tuple(BONJOUR), None, None)
    ]
    scored = translator.translate(HELLO, return_scores=True)
    logprobs = scored.token_logprobs
    assert logprobs is not None
    assert len(logprobs) == len(BONJOUR)
    # the sum is the engine's, of the same float32 numbers
    assert scored.score == pytest.approx(sum(logprobs) / (1 + len(BONJOUR)), abs=1e-12)
    assert translator.translate(" ", num_beams=2).hypotheses == ()


def test_a_length_penalty_changes_scores_as_it_says(translator: Translator) -> None:
    result = translator.translate(HELLO, num_beams=4, length_penalty=2.0, return_scores=True)
    best = result.hypotheses[0]
    assert result.score == pytest.approx(sum(best.token_logprobs or ()) / (1 + len(best.token_ids)) ** 2, abs=1e-6)


def test_a_penalty_that_leaves_no_score_is_named(translator: Translator) -> None:
    result = translator.translate(HELLO, num_beams=2, length_penalty=-20.0)
    assert (result.finish_reason, result.text, result.hypotheses) == ("error", "", ())
    expected = "every token is forbidden, or a length_penalty of -20 takes every score below -1e9, where none counts"
    assert result.error == expected


def test_a_prefix_leads_to_what_goes_on_behind_it(translator: Translator) -> None:
    """A golden text cut behind a word: the rest is what the model makes of it, and alone counts for the score."""
    tokenizer = translator.model.tokenizer
    assert tokenizer is not None
    tried = 0
    whole = translator.translate(TEXTS[:12], SOURCES[:12], TARGETS[:12], return_scores=True)
    prefixes = [" ".join(result.text.split()[: len(result.text.split()) // 2]) for result in whole]
    results = translator.translate(
        TEXTS[:12], SOURCES[:12], TARGETS[:12], target_prefix=prefixes, return_scores=True, max_new_tokens=40
    )
    for expected, prefix, result in zip(whole, prefixes, results, strict=True):
        given = tokenizer.encode(prefix)
        ids, logprobs = expected.hypotheses[0].token_ids, expected.token_logprobs
        assert result.text.startswith(prefix)
        assert logprobs is not None
        if tuple(given) != ids[: len(given)]:  # the cut fell into a token
            continue
        tried += 1
        assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
        assert result.hypotheses[0].token_ids == ids
        assert result.token_logprobs == pytest.approx((*[0.0] * len(given), *logprobs[len(given) :]), abs=1e-4)
        assert result.score == pytest.approx(sum(logprobs[len(given) :]) / len(ids[len(given) :]), abs=1e-5)
    assert tried >= 6


def test_limits_count_what_follows_a_prefix(translator: Translator) -> None:
    prefix = "Bonjour, combien"
    assert translator.model.tokenizer is not None
    given = len(translator.model.tokenizer.encode(prefix))
    follow = len(BONJOUR) - given  # with EOS
    for beams in (1, 2):
        exact = translator.translate(HELLO, target_prefix=prefix, max_new_tokens=follow, num_beams=beams)
        assert (exact.finish_reason, list(exact.token_ids)) == ("eos", BONJOUR[:-1])
    cut = translator.translate(HELLO, target_prefix=prefix, max_new_tokens=1)
    assert (cut.finish_reason, list(cut.token_ids)) == ("length", BONJOUR[: given + 1])
    least = translator.translate(HELLO, target_prefix=prefix, min_new_tokens=follow + 3)
    assert len(least.hypotheses[0].token_ids) >= given + follow + 3
    searched = translator.translate(HELLO, target_prefix=prefix, num_beams=4)  # to the model's limit
    assert searched.text.startswith(prefix)


def test_prefixes_are_one_for_all_or_one_for_each(translator: Translator) -> None:
    texts = [HELLO, TEXTS[1]]
    plain = translator.translate(texts)
    first, second = translator.translate(texts, target_prefix=["Salut", None])
    assert first.text.startswith("Salut")
    assert second == plain[1]
    assert all(one.text.startswith("Salut") for one in translator.translate(texts, target_prefix="Salut"))
    assert translator.translate(HELLO, target_prefix="") == plain[0]
    (streamed,) = translator.stream([HELLO], target_prefix="Salut")
    assert streamed == first


@pytest.mark.parametrize("beams", [1, 3])
def test_constraints_hold(translator: Translator, beams: int) -> None:
    def ids(**options: Any) -> tuple[int, ...]:
        result: Translation = translator.translate(HELLO, num_beams=beams, **options)
        return result.hypotheses[0].token_ids

    assert 120 not in ids(suppress_tokens=[120])
    assert BONJOUR[0] == 120
    word = tuple(BONJOUR[5:7])
    found = ids(bad_words_ids=[word, [BONJOUR[1]]])
    assert BONJOUR[1] not in found
    assert word not in list(itertools.pairwise(found))
    assert len(ids(min_new_tokens=30)) >= 29
    cut = translator.translate(HELLO, num_beams=beams, max_new_tokens=6, forced_eos=True)
    assert (cut.finish_reason, cut.hypotheses[0].token_ids[-1], len(cut.hypotheses[0].token_ids)) == ("eos", 2, 5)
    assert ids(max_new_tokens=6, forced_eos=7)[-1] == 7
    long = translator.translate("no no no no no no no no", min_new_tokens=40, no_repeat_ngram_size=1, num_beams=beams)
    assert len(set(long.token_ids)) == len(long.token_ids)


def test_constraints_may_come_in_sampling_as_well(translator: Translator) -> None:
    one = translator.translate(HELLO, sampling=SamplingParams(min_new_tokens=30, suppress_tokens=(120,)))
    assert one == translator.translate(HELLO, min_new_tokens=30, suppress_tokens=[120])
    assert one == translator.translate(HELLO, sampling=SamplingParams(suppress_tokens=(120,)), min_new_tokens=30)
    assert one != translator.translate(HELLO, suppress_tokens=[120])


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"num_beams": 9}, "num_beams: expected at most 8, a lane for each, got 9"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences: expected 1 to 2, the number of beams"),
        ({"num_return_sequences": 2}, "num_return_sequences: expected 1 to 1"),
        ({"num_beams": 2, "length_penalty": 1e9}, "length_penalty: expected a number"),
        ({"num_beams": 2, "length_penalty": 999}, "length_penalty: expected one whose power of 64"),
        ({"early_stopping": "soon"}, "early_stopping: expected False, True or 'never'"),
        ({"num_beams": 2, "sampling": SamplingParams(temperature=1.0)}, "temperature: expected 0, as beam search"),
        ({"min_new_tokens": 3, "sampling": SamplingParams(min_new_tokens=4)}, "min_new_tokens: expected it here, or"),
        ({"forced_eos": True, "sampling": SamplingParams(forced_eos_id=2)}, "forced_eos: expected it here, or"),
        ({"bad_words_ids": [[5]], "sampling": SamplingParams(bad_words=((6,),))}, "bad_words_ids: .*bad_words of samp"),
        ({"bad_words_ids": "le"}, "bad_words_ids: expected a sequence of sequences of ids"),
        ({"bad_words_ids": [5]}, r"bad_words_ids\[0\]: expected a sequence of ids"),
        ({"bad_words_ids": [[5], []]}, r"bad_words_ids\[1\]: length"),
        ({"bad_words_ids": [[5, 8240]]}, r"bad_words_ids: expected ids in \[0, 8240\)"),
        ({"bad_words_ids": [[5, 6]] * 341}, "bad_words_ids: expected at most 1022 ids in all, .* got 1023"),
        ({"suppress_tokens": 5}, "suppress_tokens: expected a sequence of ids"),
        ({"suppress_tokens": [8240]}, "suppress_tokens: expected ids in"),
        ({"suppress_tokens": [-1]}, r"suppress_tokens\[0\]"),
        ({"suppress_tokens": [2], "forced_eos": True}, "forced_eos: expected an id that is not among suppress_tokens"),
        ({"forced_eos": -2}, "forced_eos: expected"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number above 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: expected"),
        ({"min_new_tokens": 1.5}, "min_new_tokens: expected an int"),
        ({"target_prefix": 5}, "target_prefix: expected a text, or one for each text"),
        ({"target_prefix": ["a"]}, "target_prefix: expected one text for each of 2 texts, got 1 texts"),
        ({"target_prefix": ["a", 5]}, r"target_prefix\[1\]: expected a str"),
        ({"target_prefix": "oui " * 70}, "max_new_tokens with the language and target_prefix: expected at most 64"),
        ({"target_prefix": "oui", "max_new_tokens": 64}, "max_new_tokens with the language and target_prefix"),
        ({"adapter": "law"}, "adapter: expected None, as no adapter is loaded, got 'law'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_translated(
    translator: Translator, how: dict[str, Any], match: str
) -> None:
    submitted = translator._running().stats().submitted
    with pytest.raises(InvalidInput, match=match):
        translator.translate(["one", "two"], **how)
    single = not isinstance(how.get("target_prefix"), list)
    if single:
        for call in (lambda: translator.stream(["one"], **how), lambda: translator.check_options(**how)):
            with pytest.raises(InvalidInput, match=match):
                call()
    assert translator._running().stats().submitted == submitted


def test_an_unknown_option_is_no_option(translator: Translator) -> None:
    with pytest.raises(TypeError, match="beams"):
        translator.translate("one", beams=4)  # type: ignore[call-overload]


def test_the_keywords_are_the_options() -> None:
    assert list(Options.__annotations__) == [field.name for field in dataclasses.fields(TranslationOptions)]


def test_a_search_that_is_stopped_has_nothing(translator: Translator) -> None:
    seqs = [translator.model.alloc_sequence() for _ in range(5)]  # three lanes are left, of the four that it needs
    result = translator.translate(HELLO, num_beams=4, timeout=0.1, return_scores=True, return_attention=True)
    for seq in seqs:
        translator.model.free_sequence(seq)
    assert (result.finish_reason, result.text, result.hypotheses) == ("timeout", "", ())
    assert (result.score, result.token_logprobs, result.attention) == (None, None, None)


def test_to_dict_is_json(translator: Translator) -> None:
    options: Options = {**_n_best(2), "return_attention": True}
    result = translator.translate(HELLO, **options)
    again = json.loads(json.dumps(result.to_dict()))
    assert [one["token_ids"] for one in again["hypotheses"]] == [list(one.token_ids) for one in result.hypotheses]
    assert again["token_logprobs"] == again["hypotheses"][0]["token_logprobs"] == list(result.token_logprobs or ())
    assert result.attention is not None
    assert again["attention"] == result.attention.tolist()
    assert "attention" not in translator.translate(HELLO).to_dict()
