# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which parts of a text a tokenizer reports as unknown."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from metrale import InvalidInput, demo_model_path
from metrale.nllb.tokenizer import Tokenizer
from tests.nllb.opened import KINDS, opened

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text(encoding="ascii"))["cases"]
TEXTS = [case["text"] for case in CASES]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return opened(demo_model_path())


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of each kind, and whether all pieces of its SentencePiece model have ids."""
    return opened(KINDS[request.param](tmp_path_factory.mktemp("kind"))), request.param != "m2m that does not fit"


def check(tokenizer: Tokenizer, text: str, fits: bool = True) -> None:
    """Check the spans of a text; where only characters can be unknown, by encoding what is in them and what is not."""
    spans = tokenizer.unknown_spans(text)
    lost = tokenizer.unk_id in tokenizer.encode(text)
    assert bool(spans) == lost, ascii(text)
    assert all(0 <= start < stop <= len(text) for start, stop in spans)
    assert all(one[1] < other[0] for one, other in pairwise(spans)), "in order, apart, and as few as can be"
    if not fits:
        return
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


def test_recorded_texts(kind: tuple[Tokenizer, bool]) -> None:
    tokenizer, fits = kind
    for text in TEXTS:
        check(tokenizer, text, fits)


def test_random_mixtures(kind: tuple[Tokenizer, bool]) -> None:
    tokenizer, fits = kind
    rng = random.Random(5)
    odd = [*" \u3000\x01\u200b\u2581\u0301\u65e5\U0001f600\u337f\ufdfa\xbd\0", "e\u0302\u0301", "foo", "Bar-X"]
    for _ in range(1000):
        parts = [rng.choice(odd if rng.random() < 0.6 else ["ab", "open", "\xe9"]) for _ in range(6)]
        check(tokenizer, "".join(parts), fits)


def test_pieces_without_an_id_are_lost_where_they_stand(tmp_path: Path) -> None:
    tokenizer = opened(KINDS["m2m that does not fit"](tmp_path))

    def lost(text: str) -> list[str]:
        return [text[start:stop] for start, stop in tokenizer.unknown_spans(text)]

    # The vocabulary lacks the pieces for a word of its own and for letters within one; the space is none of the loss.
    assert lost("see  the door") == ["the"]
    assert lost("the see") == ["the"]
    assert lost("finer qer") == ["er", "er"]
    # It has an entry for two characters side by side that SentencePiece does not know, and one for one of them.
    assert lost("\u65e5\u672c \U0001f600 \u65e5\u672c\u65e5") == ["\u65e5\u672c\u65e5"]


@pytest.mark.parametrize("text", [None, 7, b"x", "\ud800"])
def test_what_is_no_text_is_refused(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="text: expected "):
        tokenizer.unknown_spans(text)
