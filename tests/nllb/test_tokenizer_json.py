# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tokenizer from ``tokenizer.json`` alone: transformers' own ids, and what such a file may not hold."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale import CheckpointError, demo_model_path
from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from metrale.nllb.tokenizer.json_vocabulary import contained
from tests.nllb.m2m_folder import CODES
from tests.nllb.opened import opened

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text(encoding="ascii")
)
WHOLE: dict[str, Any] = json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
ENTRIES, FIRST_LANGUAGE, ROWS = 8231, 8028, 8240


MISPLACED = {**WHOLE["added_tokens"][9], "content": "x_y"}


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    put(path / "tokenizer.json", {**WHOLE, **changes})
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return opened(folder_of(tmp_path_factory.mktemp("json")), vocab_size=ROWS)


def test_ids_equal_transformers_in_every_recorded_text(tokenizer: Tokenizer) -> None:
    cases = RECORD["cases"]
    assert sum("difference" in case for case in cases) > 50
    wrong = [case["text"] for case in cases if tokenizer.encode_source(case["text"], case["language"]) != case["ids"]]
    assert wrong == []
    assert tokenizer.encode_batch([case["text"] for case in cases]) == [case["ids"][1:-1] for case in cases]


def test_text_equals_transformers(tokenizer: Tokenizer) -> None:
    cases = [case for case in RECORD["cases"] if "decoded" in case]
    assert [tokenizer.decode(case["ids"]) for case in cases] == [case["decoded"] for case in cases]
    assert [tokenizer.decode(ids) for ids, _ in RECORD["decode"]] == [text for _, text in RECORD["decode"]]


def test_layout(tokenizer: Tokenizer) -> None:
    assert tokenizer.languages == FLORES_200
    assert [tokenizer.language_id(code) for code in FLORES_200] == list(range(FIRST_LANGUAGE, ENTRIES - 1))
    assert (tokenizer.mask_id, len(tokenizer), tokenizer.vocab_size) == (ENTRIES - 1, ENTRIES, ROWS)
    nothing = [0, 1, 2, 3, *range(FIRST_LANGUAGE, ROWS)]
    assert [number for number in range(ROWS) if tokenizer.is_special(number)] == nothing
    assert tokenizer.decode(nothing) == ""


def test_what_is_cut_and_padded_is_the_models_concern(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>"}
    tokenizer = opened(folder_of(tmp_path, truncation=cut, padding={**pad, "pad_to_multiple_of": None}))
    assert len(tokenizer.encode("open the door" * 20)) > 40
    assert tokenizer.encode("a") == [10]


def test_m2m_languages(tmp_path: Path) -> None:
    tokens = [token for token in WHOLE["added_tokens"] if token["id"] < 4]
    like = WHOLE["added_tokens"][4]
    tokens += [{**like, "id": FIRST_LANGUAGE + i, "content": f"__{code}__"} for i, code in enumerate(CODES)]
    vocab = {piece: number for piece, number in WHOLE["model"]["vocab"].items() if number < FIRST_LANGUAGE}
    tokenizer = opened(folder_of(tmp_path, **changed("model", vocab=vocab), added_tokens=tokens))
    assert tokenizer.languages == CODES
    assert tokenizer.language_id("__fr__") == tokenizer.language_id("fr") == FIRST_LANGUAGE + 24
    assert tokenizer.mask_id is None


def test_m2m_by_name_needs_its_own_files(tmp_path: Path) -> None:
    put(folder_of(tmp_path) / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    with pytest.raises(CheckpointError, match=r"M2M-100's tokenizer is made of vocab\.json and sentencepiece"):
        opened(tmp_path)


def changed(part: str, **changes: Any) -> dict[str, Any]:
    return {part: {**WHOLE[part], **changes}}


def without(token: str) -> dict[str, Any]:
    vocab = {piece: number for piece, number in WHOLE["model"]["vocab"].items() if piece != token}
    added = [one for one in WHOLE["added_tokens"] if one["content"] != token]
    return {**changed("model", vocab=vocab), "added_tokens": added}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model: expected an object, got null"),
        (changed("model", type="WordPiece"), 'model: type is "WordPiece", expected "BPE"'),
        (changed("model", unk_token=None), 'unk_token is null, expected "<unk>"'),
        (changed("model", dropout=0.1), "dropout is 0.1, expected null"),
        (changed("model", byte_fallback=True), "byte_fallback is true, expected null"),
        (changed("model", vocab=[]), "vocab: expected an object"),
        (changed("model", merges=[["a", "no such piece"]]), "tokenizers library cannot use it"),
        (changed("model", merges=5), "tokenizers library cannot use it"),
        (changed("model", vocab={"<unk>": -3}), "tokenizers library cannot use it"),
        ({"normalizer": {"type": "Lowercase"}}, 'normalizer: expected one of .*, got "Lowercase"'),
        ({"normalizer": 7}, "normalizer: expected one of .*, got 7"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "tokenizers library cannot use it"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}]}}, "Sequence"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, "Replace has the pattern"),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "pre_tokenizer: expected one of Metaspace, WhitespaceSplit"),
        ({"decoder": {"type": "ByteLevel"}}, "decoder: expected one of Metaspace"),
        ({"added_tokens": 7}, "tokenizers library cannot use it"),
        (
            {"added_tokens": [*WHOLE["added_tokens"], {**WHOLE["added_tokens"][9], "content": "x_y"}]},
            '"x_y" has id 8033',
        ),
        (without("<pad>"), "'<pad>' has id null, expected 1"),
        (changed("model", vocab={**WHOLE["model"]["vocab"], "<s>": 1, "<pad>": 0}), "'<s>' has id 1, expected 0"),
        (changed("model", vocab={**WHOLE["model"]["vocab"], "far": 1 << 24}), "an id of 16777216, expected less"),
    ],
)
def test_files_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(folder_of(tmp_path, **changes))
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"eng_Latn": 8075}, '"eng_Latn" has id 8075, and 8074 by the vocabulary of'),
        ("added_tokens.json", {"xyz_Latn": 8231}, '"xyz_Latn" has id 8231, and tokenizer.json lacks it'),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": ["xyz_Latn"]},
            '"xyz_Latn", which tokenizer',
        ),
        ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}, "tokenizer_class is"),
    ],
)
def test_files_that_contradict_it(name: str, content: object, message: str, tmp_path: Path) -> None:
    put(folder_of(tmp_path) / name, content)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path)


def test_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 8231 entries, the model's embedding only 8230 rows"):
        opened(folder_of(tmp_path), vocab_size=ENTRIES - 1)


def test_every_reason_is_listed(tmp_path: Path) -> None:
    changes = {**changed("model", type="Unigram", dropout=1), "decoder": {"type": "Fuse"}}
    put(folder_of(tmp_path, **changes) / "tokenizer_config.json", {"tokenizer_class": "Other"})
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert len(caught.value.problems) == 4


def test_too_large_a_file_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"[" * ((64 << 20) + 1))
    with pytest.raises(CheckpointError, match="is larger than the"):
        opened(tmp_path)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the file with some bytes of its normaliser's table or of anything else replaced."""
    result = bytearray(data)
    begin = data.index(b"precompiled_charsmap") + 30
    for _ in range(rng.randint(1, 40)):
        at = rng.randrange(begin, begin + 300_000) if rng.random() < 0.8 else rng.randrange(len(data))
        result[at] = rng.choice(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
    return bytes(result)


def test_damage_is_found_or_harmless(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A library in Rust may panic, which is no Exception in Python: nothing but CheckpointError may come out."""
    data = json.dumps(WHOLE).encode()
    rng, refused = random.Random(3), 0
    texts = [case["text"] for case in RECORD["cases"][::40]]
    for _ in range(40):
        (tmp_path / "tokenizer.json").write_bytes(damaged(data, rng))
        try:
            tokenizer = opened(tmp_path)
            for text in texts:
                tokenizer.unknown_spans(text)
                assert all(0 <= number < len(tokenizer) for number in tokenizer.encode(text))
            tokenizer.decode(range(len(tokenizer)))
        except CheckpointError:
            refused += 1
    assert refused > 5
    capfd.readouterr()  # where it panicked, the library says so on standard error


class PanicException(BaseException):
    """What a panic is in Python."""


def test_a_panic_is_contained_and_an_interrupt_is_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="library cannot use it: index out of bounds"), contained(tmp_path):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), contained(tmp_path):
        raise KeyboardInterrupt


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[..., Any] = importlib.import_module

    def missing(name: str, *args: Any) -> Any:
        if name == "tokenizers":
            raise ModuleNotFoundError("No module named 'tokenizers'")
        return found(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(CheckpointError, match=r"pip install 'metrale\[tokenizers\]'"):
        opened(folder_of(tmp_path))
    assert len(opened(demo_model_path())) == ENTRIES, "SentencePiece's model needs no such package"


def test_the_library_is_imported_when_it_is_needed(tmp_path: Path) -> None:
    folder_of(tmp_path)
    program = (
        "import sys, metrale; from metrale.nllb.tokenizer import open_tokenizer; "
        "open_tokenizer(metrale.demo_model_path()); assert 'tokenizers' not in sys.modules; "
        f"open_tokenizer({str(tmp_path)!r}); assert 'tokenizers' in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_nothing_of_the_file_but_its_vocabulary_counts_beside_a_model(tmp_path: Path) -> None:
    assert open_tokenizer(folder_of(tmp_path, post_processor={"type": "Unheard of"})) is not None
