# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the files beside a SentencePiece model may say: ids that agree, and each way not to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from metrale import CheckpointError, demo_model_path
from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer import has_tokenizer, open_tokenizer
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from tests.nllb.added_folder import FIRST_ADDED, entry
from tests.nllb.opened import opened

ENTRIES, FIRST_LANGUAGE, MASK_ID = 8231, 8028, 8230
SWAPPED = [FLORES_200[1], FLORES_200[0], *FLORES_200[2:]]
CONFIG, ADDED, WHOLE, SPECIAL = (
    "tokenizer_config.json",
    "added_tokens.json",
    "tokenizer.json",
    "special_tokens_map.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(demo_model_path() / MODEL_FILE, tmp_path)
    return tmp_path


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def decoder(number: int, content: str, **flags: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(number): entry(content, **flags)}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, {"extra_special_tokens": SWAPPED}, "another order than NLLB-200, from 'ace_Latn' on"),
        (
            CONFIG,
            {"additional_special_tokens": [*FLORES_200, "xyz_Latn"]},
            'has "xyz_Latn", which .* no file gives an id',
        ),
        (CONFIG, {"added_tokens_decoder": {"8028": {"content": "ace_Latn"}}}, "expected id 8029"),
        (CONFIG, {"added_tokens_decoder": {"9" * 5000: {"content": "<s>"}}}, "expected id 0"),
        (CONFIG, decoder(FIRST_ADDED, "foo", lstrip=True), "'foo' asks for lstrip, which is not supported"),
        (CONFIG, decoder(FIRST_ADDED, "foo", rstrip=True, single_word=True), "'foo' asks for rstrip, single_word"),
        (CONFIG, decoder(FIRST_ADDED, "two words"), "'two words' holds a space"),
        (CONFIG, decoder(FIRST_ADDED, "a\u2581b"), "holds a space"),
        (CONFIG, decoder(FIRST_ADDED, "\uff46oo"), "is another text when it is normalised"),
        (
            CONFIG,
            {"tokenizer_class": "M2M100Tokenizer"},
            'tokenizer_class is "M2M100Tokenizer", expected NllbTokenizer',
        ),
        (CONFIG, {"tokenizer_class": "SMALL100Tokenizer"}, "expected NllbTokenizer"),
        (CONFIG, {"sp_model_kwargs": {"alpha": 0.5}}, "sp_model_kwargs .* expected none"),
        (SPECIAL, {"additional_special_tokens": [{"content": "xyz_Latn"}]}, 'has "xyz_Latn"'),
        (ADDED, {"eng_Latn": 8074, "xyz_Latn": 8229}, '"xyz_Latn" has id 8229, expected an id from 8230 on'),
        (ADDED, {"xyz_Latn": MASK_ID}, "'xyz_Latn' has id 8230, the place of <mask>, which no file moves"),
        (ADDED, {"<mask>": 8231, "xyz_Latn": 8231}, "\"xyz_Latn\" has id 8231, which is that of '<mask>'"),
        (ADDED, {"er": 8231}, "'er' is added, and a piece of the vocabulary: which id it has is left open"),
        (ADDED, {"xyz_Latn": True}, "has id true, expected an id from"),
        (ADDED, {"xyz_Latn": 2**40}, "expected an id from"),
        (ADDED, {"": 8231}, 'added_tokens.json: "" has id 8231, expected the text of a token'),
        (ADDED, {"<s>": False}, '"<s>" has id false, expected id 0'),
        (WHOLE, {"added_tokens": [{"id": 8075, "content": "eng_Latn"}]}, "expected id 8074"),
        (WHOLE, {"added_tokens": ["<s>", {"content": "other"}]}, '"<s>" has id null, expected id 0'),
        (WHOLE, {"added_tokens": [{"content": "other"}]}, '"other" has id null, expected an id from'),
        (WHOLE, {"added_tokens": [{"content": 5, "id": 8231}]}, "5 has id 8231, expected the text of a token"),
        (WHOLE, {"model": {"vocab": {"er": 4, "en": 6}}}, "8023 pieces .* have another id .* as 'en'"),
        ("vocab.json", {"<s>": 0}, "'<pad>' has id null, expected 1"),
        (CONFIG, ["no object"], "expected an object"),
    ],
)
def test_files_that_contradict_the_layout(name: str, content: object, message: str, folder: Path) -> None:
    put(folder / name, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(folder)
    assert name in str(caught.value) or "added token" in str(caught.value)


def test_files_that_contradict_each_other(folder: Path) -> None:
    put(folder / ADDED, {"xyz_Latn": 8231, "foo": 8232})
    put(folder / CONFIG, decoder(8233, "xyz_Latn"))
    put(folder / WHOLE, {"added_tokens": [{"id": 8232, **entry("bar")}]})
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert (
        caught.value.problems
        == [
            'added_tokens.json: "xyz_Latn" has id 8231, and 8233 in tokenizer_config.json',
        ]
        or len(caught.value.problems) == 2
    )
    put(folder / CONFIG, decoder(8231, "foo"))
    put(folder / ADDED, {"foo": 8231})
    put(folder / WHOLE, {"added_tokens": [{"id": 8231, **entry("foo", special=True)}]})
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert caught.value.problems == [
        "tokenizer.json: 'foo' has another special than in tokenizer_config.json",
        "tokenizer.json: 'foo' has another normalized than in tokenizer_config.json",
    ]


def test_every_contradiction_is_reported(folder: Path) -> None:
    put(folder / ADDED, {"xyz_Latn": 8000})
    put(folder / CONFIG, {"extra_special_tokens": SWAPPED, "tokenizer_class": "Other"})
    with pytest.raises(CheckpointError) as caught:
        opened(folder, vocab_size=100)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (CONFIG, {"additional_special_tokens": None, "extra_special_tokens": {}}),
        (CONFIG, {"additional_special_tokens": ["eng_Latn", "fra_Latn", "<mask>"]}),
        (CONFIG, {"added_tokens_decoder": {"3": {"content": "<unk>"}, "8230": {"content": "<mask>"}}}),
        (CONFIG, {"tokenizer_class": "NllbTokenizerFast", "sp_model_kwargs": {}, "legacy_behaviour": False}),
        (SPECIAL, {"additional_special_tokens": list(FLORES_200), "mask_token": "<mask>"}),
        (ADDED, {code: FIRST_LANGUAGE + i for i, code in enumerate(FLORES_200)}),
        (WHOLE, {"added_tokens": None, "model": {"vocab": []}}),
    ],
)
def test_files_that_agree_are_accepted(name: str, content: object, folder: Path) -> None:
    put(folder / name, content)
    tokenizer = opened(folder)
    assert (len(tokenizer), tokenizer.mask_id, tokenizer.languages) == (ENTRIES, MASK_ID, FLORES_200)


def test_a_language_may_take_the_place_of_mask_that_moves(folder: Path) -> None:
    put(folder / ADDED, {"xyz_Latn": MASK_ID, "<mask>": MASK_ID + 1})
    tokenizer = opened(folder)
    assert tokenizer.languages == (*FLORES_200, "xyz_Latn")
    assert (tokenizer.language_id("xyz_Latn"), tokenizer.mask_id, len(tokenizer)) == (MASK_ID, MASK_ID + 1, MASK_ID + 2)
    assert tokenizer.decode([MASK_ID, MASK_ID + 1]) == ""


def test_entries_reach_to_the_last_added_token(folder: Path) -> None:
    put(folder / ADDED, {"xyz_Latn": 8300})
    assert len(opened(folder)) == opened(folder, vocab_size=8301).vocab_size == 8301
    with pytest.raises(CheckpointError, match="has 8301 entries, the model's embedding only 8300 rows"):
        opened(folder, vocab_size=8300)
    assert opened(folder).decode(range(8231, 8300)) == ""


def test_added_tokens_json_alone_says_nothing_of_kinds(folder: Path) -> None:
    put(folder / ADDED, {"foo": 8231, "<x>": 8232})
    put(folder / SPECIAL, {"additional_special_tokens": ["<x>"]})
    tokenizer = opened(folder)
    assert tokenizer.encode("foo<x>")[0] == 8231
    assert 8232 not in tokenizer.encode("foo<x>")
    assert tokenizer.decode([8231, 8232]) == "foo"
    assert not tokenizer.is_special(8231)
    assert tokenizer.is_special(8232)


@pytest.mark.parametrize("name", [CONFIG, SPECIAL, ADDED])
def test_files_without_a_vocabulary_are_refused(name: str, tmp_path: Path) -> None:
    put(tmp_path / "config.json", {})
    assert open_tokenizer(tmp_path) is None
    assert not has_tokenizer(tmp_path)
    put(tmp_path / name, {})
    assert has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds {name} and no vocabulary: expected sentencepiece"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [MODEL_FILE, "vocab.json", WHOLE])
def test_a_dangling_link_is_a_missing_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match=f"{name}: there is no such file"):
        open_tokenizer(tmp_path)
