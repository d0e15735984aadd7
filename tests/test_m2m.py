# SPDX-License-Identifier: MIT OR Apache-2.0
"""A checkpoint of M2M-100, from text to text: the demo model under other ids translates as it does under its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrale import Translator, UnknownLanguage, demo_model_path, load
from metrale.cli import main
from metrale.nllb.languages import near_languages
from metrale.nllb.m2m_languages import M2M_LANGUAGE_NAMES
from tests.nllb.m2m_folder import CODES, m2m_folder, m2m_rows, m2m_vocabulary
from tests.translating import CASES

SOME = CASES[::4]
OPTIONS = {"device": "host", "dtype": "float32", "max_batch": 8, "max_source_len": 64, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return m2m_folder(tmp_path_factory.mktemp("m2m"))


@pytest.fixture(scope="module")
def translator(folder: Path) -> Iterator[Translator]:
    with Translator(folder, source="en", target="__fr__", **OPTIONS) as translator:
        yield translator


def m2m_code(code: str) -> str:
    (near,) = near_languages(code, CODES, 1)
    return near


def test_texts_are_those_of_the_same_model(translator: Translator) -> None:
    texts = [case["text"] for case in SOME]
    pairs = [(m2m_code(case["src_lang"]), m2m_code(case["tgt_lang"])) for case in SOME]
    assert len(set(pairs)) > 3
    results = translator.translate(texts, [source for source, _ in pairs], [target for _, target in pairs])
    # Of this family transformers leaves out the spaces around a text, which a left-out <unk> may leave.
    assert [result.text for result in results] == [case["greedy"]["text"].strip() for case in SOME]
    assert [(result.source_lang, result.target_lang) for result in results] == pairs
    back = m2m_rows(m2m_vocabulary())
    special = set(range(4)) | set(range(8028, 8231))
    own = [[back[number] for number in result.token_ids] for result in results]
    assert own == [[number for number in case["greedy"]["ids"] if number not in special] for case in SOME]


def test_default_languages_and_other_spellings(translator: Translator) -> None:
    text = "The garage door is open."
    default = translator.translate(text)
    assert (default.source_lang, default.target_lang) == ("en", "fr")
    spelt = translator.translate(text, "__en__", ["fr"])
    assert spelt == default
    assert translator.languages == CODES
    with pytest.raises(UnknownLanguage, match=r"target: .*did you mean de\?"):
        translator.translate(text, "en", "deu_Latn")


def test_beams_and_scores(translator: Translator) -> None:
    result = translator.translate("I have no time.", target="de", num_beams=4, return_scores=True)
    with Translator(demo_model_path(), **OPTIONS) as demo:
        expected = demo.translate("I have no time.", "eng_Latn", "deu_Latn", num_beams=4, return_scores=True)
        scored = demo.score("I have no time.", expected.text, "eng_Latn", "deu_Latn")
    assert result.text == expected.text
    # What NLLB-200's other languages have of the probability, a part in a thousand, goes to the tokens that are left.
    assert result.score == pytest.approx(expected.score, abs=2e-3)
    assert translator.score("I have no time.", result.text, "en", "de").score == pytest.approx(scored.score, abs=2e-3)


def test_ids_alone(folder: Path) -> None:
    with load(folder, **OPTIONS, target="de") as model:  # type: ignore[arg-type]
        assert model.tokenizer is not None
        assert model.languages.target == model.tokenizer.language_id("de") == 8028 + CODES.index("de")


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["translate", "--model", str(folder), "--device", "host"]
    text = "The garage door is open."
    assert main([*command, "--to", "fr", text]) == 0
    assert capsys.readouterr().out == "La porte du garage est ouverte.\n"
    assert main([*command, "--from", "en", "--to", "fr", "--json", text]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["source_lang"], line["target_lang"]) == ("en", "fr")
    assert main([*command, "--to", "fra_Latn", text]) == 2
    assert "--to: " in (error := capsys.readouterr().err)
    assert "did you mean fr?" in error


def test_the_command_lists_the_languages_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--model", str(folder), "--list-languages"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{code}  {name}" for code, name in M2M_LANGUAGE_NAMES.items()]
    assert main(["inspect", "--model", str(folder), "--json", "--device", "host"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (len(report["languages"]), report["family"]) == (100, "M2M-100")
    assert report["vocabulary"] == {"rows": 8136, "tokenizer_entries": 8128}


def test_bad_words_are_words_of_the_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words").write_text("porte\n", encoding="utf-8")
    command = ["translate", "--model", str(folder), "--device", "host", "--to", "fr"]
    assert main([*command, "--bad-words", str(tmp_path / "words"), "The garage door is open."]) == 0
    assert "porte" not in capsys.readouterr().out


def test_tokenizer_json_alone_translates(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        shutil.copy(demo_model_path() / name, tmp_path)
    with Translator(tmp_path, **OPTIONS) as translator:
        results = translator.translate(
            [case["text"] for case in SOME],
            [case["src_lang"] for case in SOME],
            [case["tgt_lang"] for case in SOME],
        )
    assert [result.text for result in results] == [case["greedy"]["text"] for case in SOME]
