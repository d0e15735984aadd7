# SPDX-License-Identifier: MIT OR Apache-2.0
"""Characters that the model does not know are told, with their places in the text as the caller gave it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import Translator, UnknownSpan
from tests.backends import Device
from tests.translating import SOURCES, TARGETS, TEXTS, demo_translator

KNOWN = "The garage door is open."


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend) -> Iterator[Translator]:
    with demo_translator(gpu, 4) as translator:
        yield translator


def span(text: str, part: str, where: str = "source") -> UnknownSpan:
    """The span of a part that stands once in a text."""
    assert text.count(part) == 1
    start = text.index(part)
    return UnknownSpan(start, start + len(part), part, where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (KNOWN, []),
        ("", []),
        (" \t", []),
        ("日本", ["日本"]),
        ("  The 日本 door 😀 is open.", ["日本", "😀"]),
        ("😀The garage door", ["😀"]),
        ("a 👨‍👩‍👧 family", ["👨‍👩‍👧"]),
        ("e\u0302\u0301 x", ["e\u0302\u0301"]),
        ("\ufb01ne \u2028 tabs\tand\u00a0spaces 語", ["語"]),
        ("say </s> and 語", ["<", ">", "語"]),
    ],
)
def test_parts_and_places(text: str, parts: list[str], translator: Translator) -> None:
    result = translator.translate(text)
    assert list(result.unknown) == [span(text, part) for part in parts]
    (streamed,) = translator.stream([text])
    assert streamed == result
    for one in result.unknown:
        assert text[one.start : one.stop] == one.text


def test_each_text_has_its_own(translator: Translator) -> None:
    texts = [KNOWN, f"語 {KNOWN}", KNOWN, f"{KNOWN} 語"]
    expected = [(), (span(texts[1], "語"),), (), (span(texts[3], "語"),)]
    assert [result.unknown for result in translator.translate(texts)] == expected
    assert [result.unknown for result in translator.translate(texts, num_beams=2)] == expected
    assert [result.unknown for result in translator.stream(texts)] == expected


def test_golden_texts_with_an_unknown_token_have_spans_and_no_others(translator: Translator) -> None:
    tokenizer = translator.model.tokenizer
    assert tokenizer is not None
    results = translator.translate(TEXTS, SOURCES, TARGETS)
    lost = [tokenizer.unk_id in tokenizer.encode(text) for text in TEXTS]
    assert [bool(result.unknown) for result in results] == lost
    assert 0 < sum(lost) < len(lost)


def test_what_is_cut_off_counts_as_well(translator: Translator) -> None:
    text = f"{KNOWN * 20} 語"
    result = translator.translate(text)
    assert result.truncated
    assert result.unknown == (span(text, "語"),)
    assert translator.score(text, "Oui.").unknown == (span(text, "語"),)


def test_a_prefix_is_told_apart(translator: Translator) -> None:
    source, prefix = f"語 {KNOWN}", "La 日本 porte"
    result = translator.translate(source, target_prefix=prefix)
    assert result.unknown == (span(source, "語"), span(prefix, "日本", "target"))
    assert result.text.startswith("La ")
    assert "日本" not in result.text
    (streamed,) = translator.stream([source], target_prefix=prefix)
    assert streamed == result
    first, second = translator.translate([KNOWN, KNOWN], target_prefix=[None, prefix])
    assert (first.unknown, second.unknown) == ((), (span(prefix, "日本", "target"),))
    assert translator.translate("", target_prefix=prefix).unknown == ()  # of which nothing comes


def test_scores_tell_of_both_sides(translator: Translator) -> None:
    source, target = f"{KNOWN} 語", "La 日本 porte."
    results = translator.score([source, KNOWN], [target, "La porte."])
    assert results[0].unknown == (span(source, "語"), span(target, "日本", "target"))
    assert results[1].unknown == ()


def test_it_is_json(translator: Translator) -> None:
    expected = [{"start": 0, "stop": 1, "text": "語", "where": "source"}]
    assert json.loads(json.dumps(translator.translate("語 a").to_dict()))["unknown"] == expected
    assert json.loads(json.dumps(translator.score("語 a", "b").to_dict()))["unknown"] == expected


def test_a_text_that_fails_tells_of_it_all_the_same(gpu: GpuBackend) -> None:
    with demo_translator(gpu, 2) as translator:
        (late,) = translator.translate(["語 a"], timeout=1e-6)
        assert late.finish_reason == "timeout"
        assert late.unknown == (UnknownSpan(0, 1, "語"),)
