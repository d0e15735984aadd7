# SPDX-License-Identifier: MIT OR Apache-2.0
"""The texts of `test_texts` against transformers itself, on machines that have it, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="asks the real one, where it is installed; records are always compared")
pytest.importorskip(
    "google.protobuf", reason="asks the real one, where it is installed; records are always compared"
)  # transformers reads SentencePiece's models with it

from tests.nllb.test_texts import JSON_KINDS, RECORD, SETS
from tests.nllb.texts import KINDS, opened, tokenizer_folder
from tests.nllb.their_tokenizers import TheirM2m, TheirNllb


@pytest.mark.filterwarnings("default")  # those of other libraries are theirs
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_transformers(kind: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(kind, tmp_path)
    theirs, ours = (TheirM2m if kind.startswith("m2m") else TheirNllb)(folder), opened(folder)
    for name, texts in SETS.items():
        differing = {}
        for one in texts:
            ids = theirs.ids(one.text)
            assert ours.encode(one.text) == theirs.pieces(one.text), one.key
            if classes := theirs.differences(one.text, ids):
                differing[one.key] = {"ids": ids, "classes": classes, "normalized": theirs.normalized(one.text)}
            else:
                assert ours.encode(one.text) == ids, one.key
        assert differing == RECORD[kind][name]["differing"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", JSON_KINDS)
def test_all_ids_of_tokenizer_json_are_transformers(kind: str, tmp_path: Path) -> None:
    theirs = TheirNllb(tokenizer_folder(kind.replace("json", "nllb"), tmp_path / "nllb"))
    ours = opened(tokenizer_folder(kind, tmp_path / "json"))
    for texts in SETS.values():
        for one in texts:
            assert ours.encode(one.text) == theirs.ids(one.text), one.key
