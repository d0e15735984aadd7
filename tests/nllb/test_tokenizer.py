# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200's tokenizer against recorded transformers ids, and its refusals. docs/tokenizer.md has the differences."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from metrale.errors import CheckpointError, InvalidInput, UnknownLanguage
from metrale.nllb.languages import FLORES_200, LANGUAGE_NAMES, near_languages
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from tests.nllb.opened import opened

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "metrale" / "demo_model"
RECORD: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "tokenizer_cases.json").read_text(encoding="ascii"))
GOLDEN: list[dict[str, Any]] = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
CASES: list[dict[str, Any]] = RECORD["cases"]
SAME = [case for case in CASES if "difference" not in case]
SPACE = 7818  # the piece that is a space alone
ROWS, ENTRIES, FIRST_LANGUAGE = 8240, 8231, 8028


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return opened(DEMO, vocab_size=ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DEMO / MODEL_FILE, tmp_path)
    return tmp_path


def with_class(name: str) -> list[dict[str, Any]]:
    return [case for case in CASES if name in case.get("difference", [])]


def test_the_record_is_of_this_model_and_not_thin() -> None:
    assert RECORD["meta"]["model_sha256"] == hashlib.sha256((DEMO / MODEL_FILE).read_bytes()).hexdigest()
    assert len(SAME) > 1000
    assert {case["language"] for case in SAME} == set(FLORES_200)
    classes = {name for case in CASES for name in case.get("difference", [])}
    assert classes == {"trailing_space", "marks_lost", "not_composed"}
    documented = (ROOT / "docs" / "tokenizer.md").read_text(encoding="utf-8")
    assert all(f"### `{name}`" in documented for name in classes)


def test_golden_input_ids(tokenizer: Tokenizer) -> None:
    differing = []
    for case in GOLDEN:
        ids = tokenizer.encode_source(case["text"], case["src_lang"])
        if ids != case["input_ids"]:
            differing.append(case["text"])
            assert [*ids[:-1], SPACE, tokenizer.eos_id] == case["input_ids"]
    # The one golden text that ends in spaces: class trailing_space, of which the next tests have more.
    assert differing == ["   spaces   around   words   "]


def test_ids_equal_transformers(tokenizer: Tokenizer) -> None:
    wrong = [case["text"] for case in SAME if tokenizer.encode_source(case["text"], case["language"]) != case["ids"]]
    assert wrong == []


def test_ids_are_sentencepieces_moved_to_the_layout(tokenizer: Tokenizer) -> None:
    processor = SentencePieceProcessor(model_file=str(DEMO / MODEL_FILE))
    for case in CASES:
        pieces = processor.encode(case["text"])
        assert tokenizer.encode(case["text"]) == [3 if piece == 0 else piece + 1 for piece in pieces]


def without_tail(case: dict[str, Any]) -> list[int]:
    """transformers' subword ids of a case, less the trailing space if that is one of its differences."""
    ids: list[int] = case["ids"][1:-1]
    return ids[:-1] if "trailing_space" in case["difference"] else ids


@pytest.mark.parametrize("case", with_class("trailing_space"), ids=lambda case: ascii(case["text"])[:40])
def test_trailing_space_is_one_more_piece_in_transformers(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert case["normalized"][-1] in " \u2581"
    assert case["ids"][-2] == SPACE
    assert tokenizer.encode(case["text"])[-1:] != [SPACE]
    if case["difference"] == ["trailing_space"]:
        assert tokenizer.encode(case["text"]) == case["ids"][1:-2]


@pytest.mark.parametrize("case", with_class("marks_lost"), ids=lambda case: ascii(case["text"])[:40])
def test_marks_lost_by_transformers_are_kept(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(case["text"])
    assert ids != without_tail(case)
    # Its normalised text is another text, from which SentencePiece too makes what transformers made.
    assert tokenizer.encode(case["normalized"]) == without_tail(case)


@pytest.mark.parametrize("case", with_class("not_composed"), ids=lambda case: ascii(case["text"])[:40])
def test_not_composed_by_transformers_is_composed(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(case["text"])
    assert ids != without_tail(case)
    # Nothing is lost in its normalised text: normalised to the end, it gives SentencePiece's ids.
    assert tokenizer.encode(case["normalized"]) == ids


def test_special_tokens_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    cases = [case for case in CASES if "default_ids" in case]
    assert {"</s>", "<mask>", "eng_Latn"} <= {case["text"] for case in cases}
    special = {0, 1, 2, *range(FIRST_LANGUAGE, ENTRIES)}
    found_by_transformers: set[int] = set()
    for case in cases:
        found_by_transformers |= special & set(case["default_ids"][1:-1])
        assert not special & set(tokenizer.encode(case["text"]))
    assert len(found_by_transformers) >= 6


@pytest.mark.parametrize("text", ["", " ", "\t\n", "\u3000", "\u200b", "\u2581", "\x00", "\x7f"])
def test_nothing_visible_gives_no_ids(text: str, tokenizer: Tokenizer) -> None:
    # The normaliser drops the rest or makes it space; it keeps NUL, which the vocabulary lacks.
    expected = [SPACE, tokenizer.unk_id] if text == "\x00" else []
    assert tokenizer.encode_source(text, "eng_Latn") == [8074, *expected, 2]


def test_every_code_point_encodes(tokenizer: Tokenizer) -> None:
    for start in range(0, 0x110000, 0x800):
        if not 0xD800 <= start < 0xE000:
            ids = tokenizer.encode("".join(map(chr, range(start, start + 0x800))))
            assert all(tokenizer.unk_id <= number < FIRST_LANGUAGE for number in ids)


def test_long_texts_are_not_cut(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("open")
    assert tokenizer.encode("open " * 20_000) == word * 20_000


def test_encode_batch_equals_encode(tokenizer: Tokenizer) -> None:
    texts = [case["text"] for case in CASES]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(tuple(texts[:3])) == tokenizer.encode_batch(texts[:3])
    assert tokenizer.encode_batch([]) == []


def test_many_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    def work(_: int) -> list[tuple[list[int], str]]:
        return [(ids := tokenizer.encode(case["text"]), tokenizer.decode(ids)) for case in CASES]

    expected = work(0)
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(work, range(32)))


def test_is_immutable(tokenizer: Tokenizer) -> None:
    for name in ("vocab_size", "languages", "unk_id", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(tokenizer, name, 7)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \udc80"])
def test_lone_surrogates_are_refused(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match=r"text: .*lone surrogate U\+D"):
        tokenizer.encode(text)
    with pytest.raises(InvalidInput, match=r"texts\[1\]: .*lone surrogate"):
        tokenizer.encode_batch(["fine", text])


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["list"]])
def test_other_types_are_refused(text: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="text: expected a str"):
        tokenizer.encode_source(text, "eng_Latn")
    with pytest.raises(InvalidInput, match=r"texts\[0\]: expected a str"):
        tokenizer.encode_batch([text])
    for texts in ("one text", 5, None):
        with pytest.raises(InvalidInput, match="texts: expected a sequence of str"):
            tokenizer.encode_batch(texts)  # type: ignore[arg-type]


def test_golden_texts(tokenizer: Tokenizer) -> None:
    for case in GOLDEN:
        for kind in ("greedy", "beam4", "beam4_early_stopping"):
            assert tokenizer.decode(case[kind]["ids"]) == case[kind]["text"]


def test_decoding_equals_transformers(tokenizer: Tokenizer) -> None:
    cases = [case for case in CASES if "decoded" in case]
    assert len(cases) > 400
    assert [tokenizer.decode(case["ids"]) for case in cases] == [case["decoded"] for case in cases]


def test_decoding_any_ids_equals_transformers(tokenizer: Tokenizer) -> None:
    pairs: list[tuple[list[int], str]] = RECORD["decode"]
    assert any(max(ids, default=0) >= ENTRIES for ids, _ in pairs)
    assert [tokenizer.decode(ids) for ids, _ in pairs] == [text for _, text in pairs]


def test_special_ids_and_padding_rows_have_no_text(tokenizer: Tokenizer) -> None:
    nothing = [0, 1, 2, 3, *range(FIRST_LANGUAGE, ROWS)]
    ids = [*nothing, *tokenizer.encode("open"), *nothing]
    assert tokenizer.decode(ids) == tokenizer.decode(iter(ids)) == tokenizer.decode(np.array(ids, np.int32)) == "open"
    assert tokenizer.decode(nothing) == tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31, -(2**63), 2**70])
def test_ids_outside_the_vocabulary_are_refused(bad: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match=rf"ids\[1\]: expected an id from 0 to {ROWS - 1}, got {bad}$"):
        tokenizer.decode([5, bad])


def test_without_rows_the_last_entry_is_the_last_id() -> None:
    tokenizer = opened(DEMO)
    assert tokenizer.vocab_size == ENTRIES
    assert tokenizer.decode([ENTRIES - 1]) == ""
    with pytest.raises(InvalidInput, match="ids"):
        tokenizer.decode([ENTRIES])


@pytest.mark.parametrize("bad", [None, 5, [1.5], ["a"], "text", [None], np.zeros((2, 2), np.int64)])
def test_ids_that_are_no_integers_are_refused(bad: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="ids: expected a sequence of integers"):
        tokenizer.decode(bad)


def test_layout(tokenizer: Tokenizer) -> None:
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert list(tokenizer.languages) == config["extra_special_tokens"]
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert (tokenizer.mask_id, len(tokenizer), tokenizer.vocab_size) == (ENTRIES - 1, ENTRIES, ROWS)
    assert [tokenizer.language_id(code) for code in FLORES_200] == list(range(FIRST_LANGUAGE, ENTRIES - 1))
    assert [tokenizer.language_code(tokenizer.language_id(code)) for code in FLORES_200] == list(FLORES_200)
    assert len(set(FLORES_200)) == len(set(LANGUAGE_NAMES.values())) == 202


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("fr", ("fra_Latn",)),
        ("en", ("eng_Latn",)),
        ("French", ("fra_Latn",)),
        ("fra-latn", ("fra_Latn",)),
        ("eng_Latin", ("eng_Latn",)),
        ("pt-BR", ("por_Latn",)),
        ("zh", ("zho_Hans", "zho_Hant")),
        ("__de__", ("deu_Latn",)),
        ("Kurdish", ("ckb_Arab", "kmr_Latn")),
        ("Arabic", ("arb_Arab", "arz_Arab", "ary_Arab")),
        ("Spansh", ("spa_Latn",)),
        ("", ()),
        ("qqqq", ()),
        ("x" * 100_000, ()),
    ],
)
def test_unknown_language_has_near_matches(typed: str, near: tuple[str, ...], tokenizer: Tokenizer) -> None:
    with pytest.raises(UnknownLanguage, match=r"^target: ") as caught:
        tokenizer.language_id(typed, "target")
    assert caught.value.near == near
    assert len(str(caught.value)) < 200


def test_near_matches_stay_within_the_given_languages() -> None:
    assert near_languages("zh", ["zho_Hant", "eng_Latn"]) == ("zho_Hant",)
    assert near_languages("fr", ["eng_Latn"]) == ()


@pytest.mark.parametrize("code", [None, 17, ["eng_Latn"]])
def test_language_of_another_type_is_refused(code: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(UnknownLanguage, match=r"^language: "):
        tokenizer.encode_source("text", code)


@pytest.mark.parametrize("bad", [FIRST_LANGUAGE - 1, ENTRIES - 1, -1, 0, 2**70, None, "eng_Latn", 8074.0])
def test_language_code_of_another_id_is_refused(bad: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="language_id: expected the id of a language, from 8028 to 8229"):
        tokenizer.language_code(bad)


def test_the_model_file_alone_is_enough(folder: Path, tokenizer: Tokenizer) -> None:
    alone = opened(folder)
    assert alone.encode_source("Hello!", "ita_Latn") == tokenizer.encode_source("Hello!", "ita_Latn")


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        opened(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert open_tokenizer(tmp_path) is None
    (tmp_path / MODEL_FILE).mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        opened(tmp_path)


def first_cut_that_parses(data: bytes) -> bytes:
    for length in range(60_000, 60_100):
        try:
            SentencePieceProcessor(model_proto=data[:length])
        except RuntimeError:
            continue
        return data[:length]
    raise AssertionError("no piece ends in a hundred bytes")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is an empty file"),
        (lambda data: data[:-1], "not a whole SentencePiece model"),
        (lambda data: data[:100_000], "not a whole SentencePiece model"),
        (first_cut_that_parses, "ends before its last parts"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "not a whole SentencePiece model"),
        (lambda data: bytes(1000), "not a whole SentencePiece model"),
        (lambda data: data.replace(b"\n\x03<s>", b"\n\x03<S>", 1), "expected the first pieces <unk>, <s>, </s>, got"),
        (lambda data: data.replace(b"\n\x03<s>", b"\n\x03\xff\xfe\xfd", 1), "can.t decode byte"),
    ],
)
def test_damaged_model_file(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    whole = (DEMO / MODEL_FILE).read_bytes()
    broken = damage(whole)
    assert broken != whole
    (tmp_path / MODEL_FILE).write_bytes(broken)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_byte_pieces_are_refused(tmp_path: Path) -> None:
    texts, model = iter(["open the door", "close the window"]), io.BytesIO()
    options: dict[str, Any] = {"model_type": "bpe", "vocab_size": 280, "hard_vocab_limit": False, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, byte_fallback=True, **options)
    (tmp_path / MODEL_FILE).write_bytes(model.getvalue())
    with pytest.raises(CheckpointError, match="has byte pieces"):
        opened(tmp_path)


def test_too_few_embedding_rows(folder: Path) -> None:
    assert opened(folder, vocab_size=ENTRIES).vocab_size == ENTRIES
    with pytest.raises(CheckpointError, match="has 8231 entries, the model's embedding only 8230 rows"):
        opened(folder, vocab_size=ENTRIES - 1)
    with pytest.raises(InvalidInput, match="vocab_size"):
        opened(folder, vocab_size=True)
