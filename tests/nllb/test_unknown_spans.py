# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which parts of a text a tokenizer reports as unknown."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from metrale import InvalidInput, demo_model_path
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text(encoding="ascii"))["cases"]
TEXTS = [case["text"] for case in CASES]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_tokenizer(demo_model_path())
    assert found is not None
    return found


def check(tokenizer: Tokenizer, text: str) -> None:
    """Check the spans of a text by encoding what is in them, and what is not."""
    spans = tokenizer.unknown_spans(text)
    lost = tokenizer.unk_id in tokenizer.encode(text)
    assert bool(spans) == lost, ascii(text)
    assert all(0 <= start < stop <= len(text) for start, stop in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans)), "in order, apart, and as few as can be"
    for start, stop in spans:
        assert tokenizer.unk_id in tokenizer.encode(text[start:stop]), ascii(text)
    filled = list(text)
    for start, stop in spans:
        filled[start:stop] = ["a"] * (stop - start)
    assert tokenizer.unk_id not in tokenizer.encode("".join(filled)), ascii(text)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("", []),
        ("open the door", []),
        ("open \u65e5\u672c the", ["\u65e5\u672c"]),
        ("\u65e5", ["\u65e5"]),
        ("   \u65e5   ", ["\u65e5"]),
        ("a  \u65e5  \u672c b", ["\u65e5", "\u672c"]),
        ("a\u2581\u65e5", ["\u65e5"]),
        ("x\U0001f600y\U0001f600", ["\U0001f600", "\U0001f600"]),
        # Several code points that are one after normalisation, and one that becomes four of which none is known.
        ("e\u0302\u0301 x", ["e\u0302\u0301"]),
        ("e\u0301 x", []),
        ("a\u337fb", ["\u337f"]),
        # Three words and three spaces out of one code point, and a mark that stays by itself.
        ("a \ufdfa b", ["\ufdfa"]),
        ("\u2116\u0301", ["\u0301"]),
        # What normalises to nothing is no part of what is unknown, at either end; in between it is.
        ("\x01\u65e5\x02\x03 x", ["\u65e5"]),
        ("\u65e5\x01\u672c", ["\u65e5\x01\u672c"]),
        ("\u65e5\u200b\u200b", ["\u65e5"]),
        ("a\x00b", ["\x00"]),
        ("\ufb01\u0301n", ["\u0301"]),
    ],
)
def test_what_is_lost(text: str, lost: list[str], tokenizer: Tokenizer) -> None:
    assert [text[start:stop] for start, stop in tokenizer.unknown_spans(text)] == lost
    check(tokenizer, text)


def test_positions_are_code_points(tokenizer: Tokenizer) -> None:
    assert tokenizer.unknown_spans("\U0001f600 ok \u65e5!") == ((0, 1), (5, 6))


def test_recorded_texts(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        check(tokenizer, text)


def test_random_mixtures(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    odd = [
        *" \u3000\x01\u200b\u2581",
        "\u0301",
        "\u65e5",
        "\U0001f600",
        "\u337f",
        "\ufdfa",
        "e\u0302\u0301",
        "\xbd",
        "\0",
    ]
    for _ in range(2000):
        check(tokenizer, "".join(rng.choice(odd if rng.random() < 0.6 else ["ab", "open", "\xe9"]) for _ in range(6)))


@pytest.mark.parametrize("text", [None, 7, b"x", "\ud800"])
def test_what_is_no_text_is_refused(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="text: expected "):
        tokenizer.unknown_spans(text)
