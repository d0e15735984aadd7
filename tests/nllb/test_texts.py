# SPDX-License-Identifier: MIT OR Apache-2.0
"""Real text of hundreds of languages, and hostile strings, through every kind of tokenizer: transformers' ids, as
recorded; no text lost; the same on many threads. docs/tokenizer.md explains where the ids differ."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from sentencepiece import SentencePieceProcessor

from metrale.errors import InvalidInput
from metrale.nllb.tokenizer import Tokenizer
from tests.nllb.strings import REFUSED
from tests.nllb.texts import (
    DATA,
    KINDS,
    LANGUAGES_FILE,
    MODEL_FILE,
    TEXTS_FILE,
    Text,
    digests,
    opened,
    pieces_of,
    read_record,
    read_vocabulary,
    text_sets,
    tokenizer_folder,
)

RECORD: Final = read_record()
SETS: Final = text_sets()
WRITTEN: Final = SETS["written"]
JSON_KINDS: Final = ("json demo", "json udhr")
"""tokenizer.json alone, whose ids are the tokenizers library's, as transformers' are."""

CASES: Final = [(kind, texts) for kind in KINDS for texts in SETS]
UNKNOWN: Final = 3
THREADS: Final = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: tokenizer_folder(kind, root / kind) for kind in (*KINDS, *JSON_KINDS)}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: opened(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, SentencePieceProcessor]:
    return {kind: SentencePieceProcessor(model_file=str(folders[kind] / MODEL_FILE)) for kind in KINDS}


def encoded(tokenizer: Tokenizer, texts: list[Text]) -> dict[str, list[int]]:
    """The ids of texts by their keys."""
    return {one.key: ids for one, ids in zip(texts, tokenizer.encode_batch([one.text for one in texts]), strict=True)}


def test_the_record_is_of_these_texts_and_models(folders: dict[str, Path]) -> None:
    meta = RECORD["meta"]
    assert meta["texts_sha256"] == hashlib.sha256((DATA / TEXTS_FILE).read_bytes()).hexdigest()
    for kind in KINDS:
        assert meta[f"{kind} sha256"] == hashlib.sha256((folders[kind] / MODEL_FILE).read_bytes()).hexdigest()


def test_the_texts_are_many() -> None:
    names = [line.split("\t") for line in (DATA / LANGUAGES_FILE).read_text(encoding="utf-8").splitlines()]
    translations = {one.group for one in WRITTEN}
    assert translations == {code for code, _, _ in names}
    assert len(WRITTEN) >= 5_000
    assert len({one.text for one in WRITTEN}) == len(WRITTEN)
    # Dialects and orthographies of one language count once.
    assert len({code.split("_")[0] for code in translations}) > 450
    letters = {letter for one in WRITTEN for letter in one.text if letter.isalpha()}
    assert len({unicodedata.name(letter, "?").split()[0] for letter in letters}) >= 35  # scripts
    assert len(letters) > 2_500
    for kind, texts in SETS.items():
        assert len({one.key for one in texts}) == len(texts), kind


def wrong_groups(kind: str, texts: str, tokenizer: Tokenizer) -> list[str]:
    """Groups of a set with ids that are not those recorded, of texts that SentencePiece gives transformers' ids."""
    recorded = RECORD[kind][texts]
    expected = recorded["digests"]
    found = digests(SETS[texts], list(encoded(tokenizer, SETS[texts]).values()), recorded["differing"])
    return [group for group in expected.keys() | found if found.get(group) != expected.get(group)]


@pytest.mark.parametrize(("kind", "texts"), CASES)
def test_ids_are_transformers(kind: str, texts: str, tokenizers: dict[str, Tokenizer]) -> None:
    assert wrong_groups(kind, texts, tokenizers[kind]) == []


@pytest.mark.parametrize("texts", SETS)
@pytest.mark.parametrize("kind", JSON_KINDS)
def test_all_ids_of_tokenizer_json_are_transformers(kind: str, texts: str, tokenizers: dict[str, Tokenizer]) -> None:
    same = kind.replace("json", "nllb")
    assert wrong_groups(same, texts, tokenizers[kind]) == []
    ids = encoded(tokenizers[kind], SETS[texts])
    for key, case in RECORD[same][texts]["differing"].items():
        assert ids[key] == case["ids"], key


@pytest.mark.parametrize(("kind", "texts"), CASES)
def test_ids_that_differ_do_so_for_a_reason(
    kind: str, texts: str, tokenizers: dict[str, Tokenizer], processors: dict[str, SentencePieceProcessor]
) -> None:
    tokenizer, space = tokenizers[kind], processors[kind].piece_to_id("\u2581") + 1
    by_key = {one.key: one.text for one in SETS[texts]}
    for key, case in RECORD[kind][texts]["differing"].items():
        ours, theirs, classes = tokenizer.encode(by_key[key]), list(case["ids"]), set(case["classes"])
        assert ours != theirs
        assert classes <= {"trailing_space", "marks_lost", "not_composed"}
        assert classes
        if "trailing_space" in classes:
            assert theirs.pop() == space
            assert ours[-1:] != [space]
        normalized = tokenizer.encode(case["normalized"])
        # With a mark lost, the normalised text is another one; else, it is ours when it is normalised to the end.
        assert (normalized != ours) == ("marks_lost" in classes)
        # Of that text, SentencePiece makes the same, unless letters and marks are left that it would put together.
        assert (normalized != theirs) == ("not_composed" in classes)


SHARES: Final[dict[tuple[str, str], dict[str, int]]] = {
    ("nllb demo", "written"): {"trailing_space": 3},
    ("nllb udhr", "written"): {"trailing_space": 3, "not_composed": 1},
    ("m2m udhr", "written"): {},
    ("nllb demo", "decomposed"): {"marks_lost": 24, "not_composed": 1},
    ("nllb udhr", "decomposed"): {"not_composed": 76, "marks_lost": 37, "marks_lost + not_composed": 1},
    ("m2m udhr", "decomposed"): {},
    ("m2m udhr", "hostile"): {},
}
"""Texts whose ids are not transformers', by reasons. docs/tokenizer.md has the numbers too."""


@pytest.mark.parametrize(("kind", "texts"), SHARES)
def test_how_many_ids_differ(kind: str, texts: str) -> None:
    differing = RECORD[kind][texts]["differing"]
    assert Counter(" + ".join(case["classes"]) for case in differing.values()) == SHARES[kind, texts]
    assert len(differing) / len(SETS[texts]) < {"written": 0.001, "decomposed": 0.07, "hostile": 0.1}[texts]


@pytest.mark.parametrize(("kind", "texts"), CASES)
def test_ids_are_sentencepieces(
    kind: str,
    texts: str,
    folders: dict[str, Path],
    tokenizers: dict[str, Tokenizer],
    processors: dict[str, SentencePieceProcessor],
) -> None:
    pieces = pieces_of((folders[kind] / MODEL_FILE).read_bytes())
    own = {piece: number + 1 for number, piece in enumerate(pieces) if number > 2}
    if kind.startswith("m2m"):
        own = json.loads((folders[kind] / "vocab.json").read_bytes())
    for one in SETS[texts]:
        expected = [own.get(piece, UNKNOWN) for piece in processors[kind].encode(one.text, out_type=str)]
        assert tokenizers[kind].encode(one.text) == expected, one.key


def test_nearly_all_scripts_have_pieces(tokenizers: dict[str, Tokenizer]) -> None:
    share = {}
    for kind in KINDS:
        share[kind] = sum(UNKNOWN in ids for ids in encoded(tokenizers[kind], WRITTEN).values()) / len(WRITTEN)
    assert share["nllb udhr"] < 0.03
    assert share["nllb demo"] > 0.3  # the reason for a second vocabulary
    assert 0.1 < share["m2m udhr"] < 0.9  # whose vocab.json lacks some pieces


@pytest.mark.parametrize(("kind", "texts"), CASES)
def test_nothing_is_lost_on_the_way_back(
    kind: str, texts: str, tokenizers: dict[str, Tokenizer], processors: dict[str, SentencePieceProcessor]
) -> None:
    known = as_it_was = 0
    for one in SETS[texts]:
        ids = tokenizers[kind].encode(one.text)
        if UNKNOWN not in ids:
            back = tokenizers[kind].decode(ids)
            assert back == processors[kind].normalize(one.text).replace("\u2581", " ").removeprefix(" "), one.key
            known, as_it_was = known + 1, as_it_was + (back == one.text)
    if (kind, texts) == ("nllb udhr", "written"):
        assert known > 5_000
        assert as_it_was > 4_800  # nothing that normalises at all


@pytest.mark.parametrize("kind", [*KINDS, *JSON_KINDS])
def test_unknown_spans_are_where_unknown_ids_are(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    for one in [*WRITTEN[::7], *SETS["decomposed"][::7], *SETS["hostile"]]:
        if len(one.text) < 3_000:
            spans = tokenizer.unknown_spans(one.text)
            assert bool(spans) == (UNKNOWN in tokenizer.encode(one.text)), one.key
            assert all(0 <= start < stop <= len(one.text) for start, stop in spans), one.key


def test_what_is_composed_again_is_as_before(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["nllb udhr"]
    before = encoded(tokenizer, WRITTEN)
    after = encoded(tokenizer, SETS["decomposed"])
    moved = [key for key, ids in after.items() if ids != before[key]]
    # Where Unicode and the normaliser put marks of one letter in another order.
    assert len(moved) / len(after) < 0.015


@pytest.mark.parametrize("kind", ["nllb udhr", "m2m udhr", "json udhr"])
def test_threads_share_a_tokenizer(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    every = 3 if kind.startswith("nllb") else 8
    texts = [one.text for texts in (WRITTEN, SETS["hostile"][::4]) for one in texts[::every] if len(one.text) < 10_000]

    def work(turn: int) -> tuple[list[list[int]], list[str]]:
        order = [*range(turn, len(texts)), *range(turn)]  # each begins elsewhere
        ids = {at: tokenizer.encode(texts[at]) for at in order}
        back = {at: tokenizer.decode(ids[at]) for at in order}
        return [ids[at] for at in range(len(texts))], [back[at] for at in range(len(texts))]

    alone = work(0)
    with ThreadPoolExecutor(THREADS) as pool:
        turns = [len(texts) * thread // THREADS for thread in range(THREADS)]
        assert all(result == alone for result in pool.map(work, turns))
    assert tokenizer.encode_batch(texts) == alone[0]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", [*KINDS, *JSON_KINDS])
def test_surrogates_are_refused(kind: str, name: str, tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidInput, match=r"^text: .*lone surrogate U\+D"):
        tokenizers[kind].encode(REFUSED[name])
    with pytest.raises(InvalidInput, match=r"^texts\[1\]: .*lone surrogate U\+D"):
        tokenizers[kind].encode_batch(["fine", REFUSED[name]])


def test_the_digest_notices() -> None:
    texts = [Text("a", "1", ""), Text("a", "2", ""), Text("b", "3", "")]
    ids: list[list[int]] = [[5, 6], [7], [8]]
    whole = digests(texts, ids)
    others: list[Any] = [
        [[5, 6], [9], [8]],
        [[5], [7], [8]],
        [[6, 5], [7], [8]],
        [[5], [6, 7], [8]],
        [[5, 6, 3], [7], [8]],
    ]
    for other in others:
        changed = digests(texts, other)
        assert changed["a"] != whole["a"]
        assert changed["b"] == whole["b"]
    assert digests(texts, ids, ["3"]).keys() == {"a"}


def test_the_vocabulary_is_of_nllbs_kind() -> None:
    assert pieces_of(read_vocabulary())[:3] == ["<unk>", "<s>", "</s>"]
    assert b"nmt_nfkc" in read_vocabulary()
