# SPDX-License-Identifier: MIT OR Apache-2.0
"""M2M-100's tokenizer against recorded transformers ids, its layout, its languages and its refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from metrale import CheckpointError, UnknownLanguage
from metrale.nllb.languages import near_languages
from metrale.nllb.m2m_languages import M2M_LANGUAGE_NAMES, M2M_LANGUAGES
from metrale.nllb.tokenizer import Tokenizer
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from tests.nllb.m2m_folder import (
    ADDED,
    CODES,
    MADEUP,
    MORE,
    WITHOUT,
    m2m_added_folder,
    m2m_tokenizer_folder,
    m2m_vocabulary,
)
from tests.nllb.opened import opened

DATA = Path(__file__).parents[1] / "data"
TEXTS = [case["text"] for case in json.loads((DATA / "tokenizer_cases.json").read_text(encoding="ascii"))["cases"]]
RECORD: dict[str, Any] = json.loads((DATA / "more_tokenizer_cases.json").read_text(encoding="ascii"))
FIRST_LANGUAGE = 8028
ENTRIES = FIRST_LANGUAGE + 100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(m2m_tokenizer_folder(tmp_path_factory.mktemp("m2m")), vocab_size=ENTRIES + MADEUP)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the tokenizer that was recorded: its vocabulary lacks some pieces and has others."""
    vocabulary = m2m_vocabulary(without=WITHOUT, more=MORE)
    return opened(m2m_tokenizer_folder(tmp_path_factory.mktemp("recorded"), vocabulary))


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_ids_equal_transformers(recorded: Tokenizer) -> None:
    assert len(TEXTS) == len(RECORD["m2m"]) > 1300
    assert [recorded.encode(text) for text in TEXTS] == RECORD["m2m"]
    assert recorded.encode_batch(TEXTS) == RECORD["m2m"]
    vocabulary = m2m_vocabulary(without=WITHOUT, more=MORE)
    used = {number for ids in RECORD["m2m"] for number in ids}
    assert 3 in used
    assert {vocabulary["\u65e5\u672c"], vocabulary["\U0001f600"]} & used, "entries that are no pieces are used"


def test_text_equals_transformers(recorded: Tokenizer) -> None:
    ids = RECORD["m2m"][: len(RECORD["m2m_decoded"])]
    assert [recorded.decode(one) for one in ids] == RECORD["m2m_decoded"]


def test_text_of_any_ids_equals_transformers(recorded: Tokenizer) -> None:
    pairs = RECORD["m2m_decode"]
    assert any(max(ids, default=0) >= len(recorded) - 100 for ids, _ in pairs)
    assert [recorded.decode(ids) for ids, _ in pairs] == [text for _, text in pairs]


def test_added_tokens_of_text_equal_transformers(tmp_path: Path) -> None:
    tokenizer = opened(m2m_added_folder(tmp_path))
    assert [tokenizer.encode(text) for text, _ in RECORD["m2m_added"]] == [ids for _, ids in RECORD["m2m_added"]]
    found = {number for _, ids in RECORD["m2m_added"] for number in ids}
    assert set(range(ENTRIES, ENTRIES + len(ADDED))) <= found
    assert tokenizer.encode("") == []
    assert tokenizer.decode([ENTRIES + 1]) == "foobar"


def test_layout(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.languages == CODES == M2M_LANGUAGES["m2m100"]
    assert [tokenizer.language_id(code) for code in CODES] == list(range(FIRST_LANGUAGE, ENTRIES))
    assert [tokenizer.language_code(number) for number in range(FIRST_LANGUAGE, ENTRIES)] == list(CODES)
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.mask_id) == (ENTRIES, ENTRIES + MADEUP, None)
    assert len(set(M2M_LANGUAGE_NAMES.values())) == 100
    assert tokenizer.encode_source("open", "fr") == [FIRST_LANGUAGE + 24, *tokenizer.encode("open"), 2]
    assert repr(tokenizer) == "Tokenizer(M2M-100 by SentencePiece, 8128 entries, 100 languages, vocab_size=8136)"


def test_languages_of_the_published_order() -> None:
    # Three ids of facebook/m2m100_418M, whose languages begin at 128004.
    assert [128004 + CODES.index(code) for code in ("en", "fr", "zh")] == [128022, 128028, 128102]


def test_a_language_may_be_spelt_as_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.language_id(f"__{code}__") == tokenizer.language_id(code) for code in CODES)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("French", ("fr",)),
        ("fra_Latn", ("fr",)),
        ("fra", ("fr",)),
        ("FR", ("fr",)),
        ("pt-BR", ("pt",)),
        ("zho_Hans", ("zh",)),
        ("eng_Latn", ("en",)),
        ("nob_Latn", ("no",)),
        ("nso_Latn", ("ns",)),
        ("fry_Latn", ("fy",)),
        ("Frnch", ("fr",)),
        ("__fr", ("fr",)),
        ("qqqq", ()),
    ],
)
def test_unknown_language_has_near_matches(typed: str, near: tuple[str, ...], tokenizer: Tokenizer) -> None:
    with pytest.raises(UnknownLanguage, match=r"^target: ") as caught:
        tokenizer.language_id(typed, "target")
    assert caught.value.near == near


def test_every_language_is_near_its_nllb_code() -> None:
    lost = {code for code in CODES if not near_languages(code)}
    assert lost == {"br", "fy"}, "languages that NLLB-200 does not have"
    for code in set(CODES) - lost:
        assert near_languages(near_languages(code, limit=1)[0], CODES, 1) == (code,)


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "__fr__", "a __en__ b</s>"])
def test_special_tokens_in_a_text_are_text(text: str, tokenizer: Tokenizer) -> None:
    assert not {0, 1, 2, *range(FIRST_LANGUAGE, ENTRIES + MADEUP)} & set(tokenizer.encode(text))


def test_a_run_of_unknown_characters_is_no_special_token(tmp_path: Path) -> None:
    texts, model = iter(["open the door", "aaaa bbbb __"]), io.BytesIO()
    options: dict[str, Any] = {"model_type": "bpe", "vocab_size": 24, "hard_vocab_limit": False, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options)
    processor = SentencePieceProcessor(model_proto=model.getvalue())
    # A model without these characters makes one piece of them, whose text vocab.json has.
    assert processor.encode("open<s>", out_type=str)[-1] == "<s>"
    pieces = [processor.id_to_piece(number) for number in range(3, len(processor))]
    vocabulary = {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    folder = m2m_tokenizer_folder(tmp_path, vocabulary)
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    assert opened(folder).encode("open<s>")[-1] == 3
    assert opened(folder).unknown_spans("open<s>") == ((4, 7),)


def test_special_ids_languages_and_madeup_rows_have_no_text(tokenizer: Tokenizer) -> None:
    nothing = [0, 1, 2, 3, *range(FIRST_LANGUAGE, ENTRIES + MADEUP)]
    assert tokenizer.decode(nothing) == tokenizer.decode([]) == ""
    assert tokenizer.decode([*nothing, *tokenizer.encode("open the door"), *nothing]) == "open the door"
    assert all(tokenizer.is_special(number) for number in nothing)
    assert not any(tokenizer.is_special(number) for number in range(4, FIRST_LANGUAGE))


def test_languages_of_wmt21(tmp_path: Path) -> None:
    folder = m2m_tokenizer_folder(tmp_path, config={"language_codes": "wmt21"})
    (folder / "special_tokens_map.json").unlink()
    tokenizer = opened(folder)
    assert tokenizer.languages == ("en", "ha", "is", "ja", "cs", "ru", "zh", "de")
    assert tokenizer.language_id("de") == FIRST_LANGUAGE + 7


def test_added_languages(tmp_path: Path) -> None:
    folder = m2m_tokenizer_folder(tmp_path)
    put(folder / "added_tokens.json", {"__xyz__": ENTRIES, "__tyv_Cyrl__": ENTRIES + 1, "__fr__": FIRST_LANGUAGE + 24})
    tokenizer = opened(folder)
    assert tokenizer.languages == (*CODES, "xyz", "tyv_Cyrl")
    assert tokenizer.language_id("__tyv_Cyrl__") == tokenizer.language_id("tyv_Cyrl") == ENTRIES + 1
    assert tokenizer.encode("__xyz__")[0] != ENTRIES
    assert tokenizer.decode([ENTRIES, ENTRIES + 1]) == ""


def wrong_vocabularies() -> list[tuple[dict[str, Any], str]]:
    right: dict[str, Any] = m2m_vocabulary()
    last = len(right) - 1
    moved = {piece: {0: 2, 2: 0}.get(number, number) for piece, number in right.items()}
    return [
        ({}, "'<s>' has id null, expected 0"),
        (moved, "'<s>' has id 2, expected 0"),
        ({**right, "extra": last}, "expected the ids from 0 to 8028, each once"),
        ({**right, "extra": last + 5}, "expected the ids from 0 to 8028, each once"),
        ({**right, "extra": "8028"}, "expected the ids from 0 to 8028, each once"),
        ({**right, "extra": True}, "expected the ids from 0 to 8028, each once"),
        ({**right, "__fr__": last + 1}, "has '__fr__', expected it behind the vocabulary"),
        ({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4}, "lacks 8023 of the 8027 pieces of sentencepiece"),
    ]


@pytest.mark.parametrize(("vocabulary", "message"), wrong_vocabularies(), ids=lambda value: str(value)[:30])
def test_wrong_vocabularies_are_refused(vocabulary: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vocab\.json") as caught:
        opened(m2m_tokenizer_folder(tmp_path, vocabulary))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"language_codes": "all"}, 'language_codes is "all", expected one of m2m100, wmt21'),
        ("tokenizer_config.json", {"language_codes": ["en"]}, "language_codes is"),
        ("tokenizer_config.json", {"tokenizer_class": "NllbTokenizer"}, "expected M2M100Tokenizer"),
        ("tokenizer_config.json", {"sp_model_kwargs": {"nbest_size": 3}}, "sp_model_kwargs"),
        ("special_tokens_map.json", {"additional_special_tokens": ["__fr__", "__en__"]}, "from '__fr__' on"),
        ("special_tokens_map.json", {"additional_special_tokens": ["__xx__"]}, '"__xx__", which M2M-100 does not have'),
        ("added_tokens.json", {"__fr__": FIRST_LANGUAGE}, '"__fr__" has id 8028, expected id 8052'),
        ("added_tokens.json", {"__xx__": 5}, "expected an id from 8128 on"),
        ("tokenizer.json", {"model": {"vocab": {"<s>": 0}}}, "have another id there or none"),
        (MODEL_FILE, "no model", "not a whole SentencePiece model"),
        ("vocab.json", [], "expected an object"),
    ],
)
def test_files_that_contradict_the_layout(name: str, content: object, message: str, tmp_path: Path) -> None:
    folder = m2m_tokenizer_folder(tmp_path)
    put(folder / name, content)
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert message in str(caught.value)


def test_every_contradiction_is_reported(tmp_path: Path) -> None:
    folder = m2m_tokenizer_folder(tmp_path, config={"language_codes": "no", "tokenizer_class": "Other"})
    put(folder / "added_tokens.json", {"__xx__": 5})
    with pytest.raises(CheckpointError) as caught:
        opened(folder, vocab_size=100)
    assert len(caught.value.problems) == 4


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    (m2m_tokenizer_folder(tmp_path) / MODEL_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"sentencepiece\.bpe\.model: there is no such file"):
        opened(tmp_path)


def test_a_missing_vocabulary_is_no_reason_to_guess(tmp_path: Path) -> None:
    (m2m_tokenizer_folder(tmp_path) / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match=r'tokenizer_class is "M2M100Tokenizer", expected NllbTokenizer'):
        opened(tmp_path)


def test_too_few_rows(tmp_path: Path) -> None:
    folder = m2m_tokenizer_folder(tmp_path)
    assert opened(folder, vocab_size=ENTRIES).vocab_size == ENTRIES
    with pytest.raises(CheckpointError, match="has 8128 entries, the model's embedding only 8127 rows"):
        opened(folder, vocab_size=ENTRIES - 1)
