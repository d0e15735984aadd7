# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokens and languages that a fine-tune added to NLLB-200, by SentencePiece and by the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer import Tokenizer
from tests.nllb.added_folder import ADDED, FIRST_ADDED, added_folder, entry
from tests.nllb.opened import opened

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "more_tokenizer_cases.json").read_text(encoding="ascii")
)
CASES: list[tuple[str, list[int]]] = [(text, ids) for text, ids in RECORD["added"]]
NUMBERS = {str(token["content"]): FIRST_ADDED + i for i, token in enumerate(ADDED)}
LANGUAGES = ("xyz_Latn", "tyv_Cyrl")
SPACE = 7818
WAYS: dict[str, Any] = {"both": {}, "model": {"whole": False}, "whole": {"model": False}}
"""The files that a folder may have: SentencePiece's model, tokenizer.json, or both."""


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    return request.param, opened(added_folder(tmp_path_factory.mktemp("added"), **WAYS[request.param]))


def test_the_record_is_not_thin() -> None:
    assert len(CASES) > 700
    found = {number for _, ids in CASES for number in ids}
    assert {NUMBERS[token] for token in NUMBERS if token not in (*LANGUAGES, "<ent>")} <= found


def test_ids_equal_transformers(way: tuple[str, Tokenizer]) -> None:
    name, tokenizer = way
    different = [
        (text, tokenizer.encode(text), ids)
        for text, ids in CASES
        if text not in LANGUAGES and tokenizer.encode(text) != ids
    ]
    if name == "whole":
        assert different == []
        return
    # By SentencePiece the classes of docs/tokenizer.md remain: a space at the end, and marks that transformers loses.
    assert all(ours == ids[:-1] for text, ours, ids in different if ids[-1] == SPACE and "\u0301" not in text)
    others = [text for text, ours, ids in different if ids != [*ours, SPACE]]
    assert len(others) <= 3
    assert all("\u0301" in text for text in others)


def test_a_space_in_front_of_a_token_is_a_piece(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    foo = NUMBERS["foo"]
    assert tokenizer.encode("a foo b") == [10, SPACE, foo, 44]
    assert tokenizer.encode("afoo b") == [10, foo, 44]
    assert tokenizer.encode("foo  foo") == [foo, SPACE, foo]
    assert tokenizer.encode("\uff46\uff4f\uff4f") == [foo]
    assert tokenizer.encode("foobar") == [NUMBERS["foobar"]]
    assert tokenizer.encode("") == []


def test_nothing_is_found_inside_a_special_token(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    assert NUMBERS["sk>"] in tokenizer.encode("ask>")
    assert NUMBERS["/s>"] in tokenizer.encode("a/s>")
    assert not {NUMBERS["/s>"], NUMBERS["sk>"]} & set(tokenizer.encode("<mask></s>"))


def test_languages_and_special_tokens_in_a_text_are_text(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    special = {NUMBERS[token] for token in (*LANGUAGES, "<ent>")}
    for token in (*LANGUAGES, "<ent>", "</s>", "eng_Latn"):
        ids = tokenizer.encode(f"open {token} foo")
        assert not (special | {0, 1, 2} | set(range(8028, FIRST_ADDED))) & set(ids)
        assert NUMBERS["foo"] in ids


def test_new_languages_are_languages(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    assert tokenizer.languages == (*FLORES_200, *LANGUAGES)
    assert len(tokenizer) == FIRST_ADDED + len(ADDED)
    for code in LANGUAGES:
        assert tokenizer.language_id(code) == NUMBERS[code]
        assert tokenizer.language_code(NUMBERS[code]) == code
        assert tokenizer.encode_source("open", code) == [NUMBERS[code], *tokenizer.encode("open"), 2]


def test_text_equals_transformers(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    pairs = RECORD["added_decode"]
    assert set(NUMBERS.values()) - {NUMBERS["tyv_Cyrl"]} <= {number for ids, _ in pairs for number in ids}
    assert [tokenizer.decode(ids) for ids, _ in pairs] == [text for _, text in pairs]


def test_which_ids_have_text(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    silent = {token for token, number in NUMBERS.items() if tokenizer.is_special(number)}
    assert silent == {*LANGUAGES, "<ent>"}
    assert [tokenizer.decode([NUMBERS[token]]) for token in NUMBERS] == [
        "" if token in silent else token for token in NUMBERS
    ]


def test_encode_batch_equals_encode(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    texts = [text for text, _ in CASES]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_the_longest_token_wins_and_the_first_place(tmp_path: Path) -> None:
    tokens = [*(entry(token, normalized=False) for token in ("a+b", "a+bc", "bc+d")), entry("b+")]
    for model in (True, False):
        tokenizer = opened(added_folder(tmp_path / str(model), tokens, model=model))
        ab, abc, bcd, plus = range(FIRST_ADDED, FIRST_ADDED + 4)
        assert tokenizer.encode("a+bc+d")[0] == abc
        assert tokenizer.encode("a+bbc+d") == [ab, bcd]
        assert tokenizer.encode("a+bb+") == [ab, plus]


def test_unknown_parts_are_found_beside_tokens(way: tuple[str, Tokenizer]) -> None:
    _, tokenizer = way
    assert tokenizer.unknown_spans("\u65e5\u672cfoo") == ()
    assert tokenizer.unknown_spans("\uff46\uff4f\uff4f \u8a9e! \U0001f600foo") == ((4, 5), (7, 8))
    # In front of a token the text between is normalised by itself; the positions stay those of the whole text.
    assert tokenizer.unknown_spans("Bar-X  \u337f\u8a9ex foo \u8a9e") == ((7, 9), (15, 16))
