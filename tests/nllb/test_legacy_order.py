# SPDX-License-Identifier: MIT OR Apache-2.0
"""The language after the text: on request alone, in the tokenizer and in the model."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from metrale import InvalidInput, Translator, demo_model_path
from metrale.cli import main
from metrale.nllb.source import framed
from tests.nllb.m2m_folder import m2m_tokenizer_folder
from tests.nllb.opened import opened
from tests.reference.nllb_float64 import NllbFloat64

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "more_tokenizer_cases.json").read_text(encoding="ascii")
)
OPTIONS: dict[str, Any] = {"device": "host", "dtype": "float32", "max_batch": 2, "max_source_len": 32}
TEXT = "The garage door is open."


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    """Return the demo model with a configuration that asks for the legacy order."""
    for name in ("config.json", "model.safetensors", "sentencepiece.bpe.model"):
        shutil.copy(demo_model_path() / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"legacy_behaviour": true}', encoding="utf-8")
    return tmp_path


def test_the_order() -> None:
    assert framed(9, [4, 5], 2, legacy_order=False) == (9, 4, 5, 2)
    assert framed(9, [4, 5], 2, legacy_order=True) == (4, 5, 2, 9)


def test_sources_equal_transformers(asking: Path) -> None:
    tokenizer = opened(asking, legacy_order=True)
    assert tokenizer.legacy_order
    assert len(RECORD["legacy"]) == 60
    for text, language, ids in RECORD["legacy"]:
        assert tokenizer.encode_source(text, language) == ids
    plain = opened(asking)
    assert (plain.legacy_order, plain.asks_legacy_order) == (False, True)
    assert plain.encode_source("a", "eng_Latn") == [8074, 10, 2]


def test_other_files_do_not_ask(tmp_path: Path) -> None:
    assert not opened(demo_model_path()).asks_legacy_order
    folder = m2m_tokenizer_folder(tmp_path, config={"legacy_behaviour": True})
    assert opened(folder).asks_legacy_order
    assert opened(folder, legacy_order=True).encode_source("a", "fr")[-1] == 8052


@pytest.mark.parametrize("legacy_order", [False, True])
def test_logits_are_those_of_the_mathematics(legacy_order: bool) -> None:
    with metrale.load(demo_model_path(), **OPTIONS, legacy_order=legacy_order) as model:
        assert model.legacy_order is legacy_order
        tokenizer = model.tokenizer
        assert tokenizer is not None
        assert tokenizer.legacy_order is legacy_order
        source = tokenizer.encode_source(TEXT, "eng_Latn")
        assert source.index(tokenizer.language_id("eng_Latn")) == (len(source) - 1 if legacy_order else 0)
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = tokenizer.language_id("eng_Latn"), tokenizer.language_id("deu_Latn")
        row = model.copy_logits_to_host(model.prefill(tokenizer.encode(TEXT), seq))
        expected = NllbFloat64.load(demo_model_path()).logits(source, [2, tokenizer.language_id("deu_Latn")])[-1]
        # float32 logits are within 1e-5 of 15
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=0, atol=3e-4)
        model.free_sequence(seq)


def test_the_order_matters_to_a_translation() -> None:
    with Translator(demo_model_path(), **OPTIONS, legacy_order=True, source="eng_Latn", target="fra_Latn") as legacy:
        odd = legacy.translate(TEXT, return_scores=True)
    with Translator(demo_model_path(), **OPTIONS, source="eng_Latn", target="fra_Latn") as translator:
        plain = translator.translate(TEXT, return_scores=True)
    assert plain.score is not None
    assert odd.score is not None
    assert abs(plain.score - odd.score) > 1e-4  # ten times what float32 may differ by


def test_a_checkpoint_that_asks_is_warned_of(asking: Path) -> None:
    with (
        pytest.warns(UserWarning, match=r"sets legacy_behaviour.* legacy_order=True applies it"),
        metrale.load(asking, **OPTIONS) as model,
    ):
        assert not model.legacy_order
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrale.load(asking, **OPTIONS, legacy_order=True).close()


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_anything_but_a_bool_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="legacy_order: expected True or False"):
        metrale.load(demo_model_path(), **OPTIONS, legacy_order=wrong)


@pytest.mark.filterwarnings("default")
def test_the_command(asking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["translate", "--model", str(asking), "--device", "host", "--to", "fra_Latn", "--scores", TEXT]
    assert main(command) == 0
    first, error = capsys.readouterr()
    assert "warning: " in error
    assert "legacy_behaviour" in error
    assert main([*command, "--legacy-order"]) == 0
    second, error = capsys.readouterr()
    assert "legacy_behaviour" not in error
    assert first != second
    pair = ["score", "--model", str(asking), "--device", "host", "--from", "eng_Latn", "--to", "fra_Latn"]
    (asking / "pair").write_text(f"{TEXT}\tLa porte du garage est ouverte.\n", encoding="utf-8")
    scores = []
    for option in ([], ["--legacy-order"]):
        assert main([*pair, "--input", str(asking / "pair"), *option]) == 0
        scores.append(capsys.readouterr().out)
    assert scores[0] != scores[1]
