# SPDX-License-Identifier: MIT OR Apache-2.0
"""The texts of `test_texts` against transformers itself, on machines that have it, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("google.protobuf")  # transformers reads SentencePiece's models with it

from tests.nllb.test_texts import RECORD, SETS
from tests.nllb.texts import DEMO, model_folder, opened
from tests.nllb.their_tokenizers import TheirNllb


@pytest.mark.filterwarnings("default")  # those of other libraries are theirs
@pytest.mark.parametrize("vocabulary", ["demo", "udhr"])
def test_ids_are_transformers(vocabulary: str, tmp_path: Path) -> None:
    folder = DEMO if vocabulary == "demo" else model_folder(vocabulary, tmp_path)
    theirs, ours = TheirNllb(folder), opened(folder)
    for kind, texts in SETS.items():
        differing = {}
        for one in texts:
            ids = theirs.ids(one.text)
            assert ours.encode(one.text) == theirs.pieces(one.text), one.key
            if classes := theirs.differences(one.text, ids):
                differing[one.key] = {"ids": ids, "classes": classes, "normalized": theirs.normalized(one.text)}
            else:
                assert ours.encode(one.text) == ids, one.key
        assert differing == RECORD[f"nllb {vocabulary}"][kind]["differing"]
