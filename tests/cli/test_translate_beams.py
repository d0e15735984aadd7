# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale translate`` with beams, constraints, prefixes and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import main
from metrale.demo import demo_model_path
from tests.cli.conftest import FakeTranslator, Feed
from tests.test_translator_adapters import demo_adapter

GOLDEN: list[dict[str, Any]] = json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))["cases"]
GERMAN = [case for case in GOLDEN if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "deu_Latn")][:3]
HELLO = GOLDEN[0]
QUICK = ("--device", "host", "--max-source-len", "64", "--max-new-tokens", "48", "--max-batch", "4", "-q")


def translate(*arguments: object, to: str = "fra_Latn") -> int:
    return main(["translate", *map(str, (*QUICK, "--to", to, *arguments))])


@pytest.mark.parametrize(
    ("options", "recorded"), [([], "beam4"), (["--early-stopping", "true"], "beam4_early_stopping")]
)
def test_golden_translations(feed: Feed, capsys: pytest.CaptureFixture[str], options: list[str], recorded: str) -> None:
    feed("\n".join([*(case["text"] for case in GERMAN), ""]).encode())
    assert translate("--beam", 4, "--scores", *options, to="deu_Latn") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [text for _, text in lines] == [case[recorded]["text"] for case in GERMAN]
    # recorded with five digits, printed with four
    assert [float(score) for score, _ in lines] == pytest.approx([case[recorded]["score"] for case in GERMAN], abs=1e-4)


def test_an_n_best_list_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate("--beam", 3, "--n-best", 2, "--json", "--scores", "--attention", HELLO["text"]) == 0
    line = json.loads(capsys.readouterr().out)
    first, second = line["hypotheses"]
    assert (first["text"], first["score"]) == (line["text"], line["score"])
    assert first["score"] > second["score"]
    assert len(first["token_logprobs"]) == len(first["token_ids"]) == len(line["attention"])
    assert [sum(row) for row in line["attention"]] == pytest.approx([1] * len(first["token_ids"]), abs=1e-5)
    assert translate("--beam", 3, "--n-best", 2, "--json", "") == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["hypotheses"], "attention" in line) == ([], False)


def test_a_prefix_and_bad_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "words.txt"
    words.write_text("combien\r\n\naujourd'hui\n", encoding="utf-8")
    options = ["--target-prefix", "Bonjour,", "--bad-words", words]
    assert translate(*options, HELLO["text"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Bonjour,")
    assert "combien" not in text
    assert "combien" in HELLO["greedy"]["text"]


def test_ids_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--suppress-tokens", "120,117", "--forced-eos", "--max-new-tokens", "6", "--json"]
    assert translate(*options, HELLO["text"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert not {120, 117} & set(line["token_ids"])
    assert (line["finish_reason"], len(line["token_ids"])) == ("eos", 4)


def test_an_adapter_holds_for_all_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    law = f"law={demo_adapter(tmp_path / 'law', 0)}"
    sea = f"sea={demo_adapter(tmp_path / 'sea', 1)}"
    found = []
    for options in ([], ["--adapter", law], ["--adapter", sea, "--adapter", law, "--use-adapter", "law"]):
        assert translate("--json", "--scores", *options, HELLO["text"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1] == found[2]
    assert (found[1]["adapter"], "adapter" in found[0]) == ("law", False)
    assert found[0]["text"] == HELLO["greedy"]["text"]
    assert abs(found[0]["score"] - found[1]["score"]) > 1e-2


def test_only_the_adapter_in_use_is_loaded(fakes: list[FakeTranslator], tmp_path: Path) -> None:
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "adapter_config.json").touch()
    options = ["--adapter", "sea=no/such/folder", "--adapter", f"law={tmp_path / 'law'}", "--use-adapter", "law"]
    assert translate(*options, "--max-lora-rank", 8, "x") == 0
    assert fakes[0].options["adapters"] == {"law": tmp_path / "law"}
    assert fakes[0].options["max_lora_rank"] == 8
    assert fakes[0].arguments[0]["adapter"] == "law"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--length-penalty", "2"], 2, "--length-penalty has no effect without --beam above 1"),
        (["--early-stopping", "never"], 2, "--early-stopping has no effect without --beam above 1"),
        (["--n-best", "2", "--json"], 2, "--n-best has no effect without --beam above 1"),
        (["--n-best", "2", "--beam", "3"], 2, "--n-best has no effect without --json"),
        (["--n-best", "4", "--beam", "3", "--json"], 2, "--n-best: expected 1 to 3, the number of beams, got 4"),
        (["--beam", "0"], 2, "--beam: expected an int of 1 to 64, got 0"),
        (["--beam", "x"], 2, "--beam"),
        (["--beam", "5"], 2, "--max-batch: expected at least 5, a lane for each --beam, got 4"),
        (["--beam", "3", "--temperature", "1"], 2, "--temperature has no effect with --beam"),
        (["--beam", "3", "--length-penalty", "nan"], 2, "--length-penalty: expected"),
        (["--beam", "3", "--length-penalty", "999"], 2, "--length-penalty: expected one whose power of 48"),
        (["--beam", "3", "--early-stopping", "maybe"], 2, "--early-stopping"),
        (["--attention"], 2, "--attention has no effect without --json"),
        (["--target-prefix", " "], 2, "--target-prefix: expected a text, got ' '"),
        (["--target-prefix", "oui " * 60], 2, "--max-new-tokens with the language and --target-prefix: expected at mo"),
        (["--bad-words", "no/such/file"], 2, "no/such/file: No such file or directory"),
        (["--bad-words", "/dev/null"], 2, "--bad-words: /dev/null has no words"),
        (["--bad-words", ""], 2, "--bad-words: expected a file, got ''"),
        (["--suppress-tokens", "2", "--forced-eos"], 2, "--forced-eos: expected an id that is not among suppress_tok"),
        (["--suppress-tokens", "5,x"], 2, "--suppress-tokens: expected ids with commas between them, got '5,x'"),
        (["--suppress-tokens", "8240"], 2, "--suppress-tokens: expected ids in [0, 8240), got 8240"),
        (["--suppress-tokens=-1"], 2, "--suppress-tokens: expected"),
        (["--adapter", "law"], 2, "--adapter: expected NAME=DIR, got 'law'"),
        (["--adapter", "law=no/such"], 3, "no/such: "),
        (["--adapter", "law=a", "--adapter", "law=b"], 2, "--adapter: expected different names"),
        (["--adapter", "law=a", "--adapter", "sea=b"], 2, "--use-adapter is required to choose one of law, sea"),
        (["--adapter", "law=a", "--use-adapter", "sea"], 2, "--use-adapter: expected one of law, got 'sea'"),
        (["--use-adapter", "law"], 2, "--use-adapter has no effect without --adapter NAME=DIR"),
        (["--max-lora-rank", "4"], 2, "--max-lora-rank has no effect without --adapter NAME=DIR"),
    ],
)
def test_what_is_refused_leaves_an_output_alone(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.txt"
    output.write_text("before\n")
    assert translate("--output", output, "--overwrite", *arguments, "x") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("metrale: error: ")
    assert says in err
    assert output.read_text() == "before\n"
