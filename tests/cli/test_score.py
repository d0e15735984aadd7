# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import main
from metrale.demo import demo_model_path
from tests.cli.conftest import Feed
from tests.test_translator_adapters import demo_adapter

GOLDEN: list[dict[str, Any]] = json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))["cases"]
FRENCH = [
    case
    for case in GOLDEN
    if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn") and len(case["beam4"]["ids"]) < 40
][:3]
QUICK = ("--device", "host", "--max-source-len", "64", "--max-new-tokens", "48", "--max-batch", "2", "-q")


def score(*arguments: object) -> int:
    return main(["score", *map(str, ("--from", "eng_Latn", "--to", "fra_Latn", *QUICK, *arguments))])


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    sources, targets = tmp_path / "sources", tmp_path / "targets"
    sources.write_text("".join(f"{case['text']}\n" for case in FRENCH), encoding="utf-8")
    targets.write_text("".join(f"{case['beam4']['text']}\n" for case in FRENCH), encoding="utf-8")
    return ["--source-file", str(sources), "--target-file", str(targets)]


def test_golden_scores(files: list[str], feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [case["beam4"]["score"] for case in FRENCH]
    assert len(expected) == 3
    assert score(*files) == 0
    # recorded with five digits, printed with four
    assert [float(line) for line in capsys.readouterr().out.splitlines()] == pytest.approx(expected, abs=1e-4)
    feed("".join(f"{case['text']}\t{case['beam4']['text']}\r\n" for case in FRENCH).encode())
    assert score("--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for case, line in zip(FRENCH, lines, strict=True):
        assert line["score"] == pytest.approx(case["beam4"]["score"], abs=1e-4)
        assert (line["source_text"], line["target_text"]) == (case["text"], case["beam4"]["text"])
        assert line["token_ids"] == case["beam4"]["ids"][2:]
        assert len(line["token_logprobs"]) == len(line["token_ids"])
        assert (line["truncated"], line["adapter"], line["error"]) == (False, None, None)
        assert (line["source_lang"], line["target_lang"]) == ("eng_Latn", "fra_Latn")


def test_a_pair_that_cannot_be_scored(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed(f"Yes.\tOui.\nYes.\t{'oui ' * 60}\n{'yes ' * 90}\tOui.\n".encode())
    assert score("--json") == 1
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(first) == list(second)
    assert (second["score"], second["token_ids"]) == (None, None)
    assert second["error"].startswith("target: expected a text of at most 47 tokens")
    assert (first["truncated"], third["truncated"]) == (False, True)
    feed(f"Yes.\tOui.\nYes.\t{'oui ' * 60}\n".encode())
    assert main(["score", "--from", "eng_Latn", "--to", "fra_Latn", "--device", "host", "--max-new-tokens", "48"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == ""
    assert "warning: pair 2: not scored: target: expected" in err
    assert err.splitlines()[-1] == "metrale: warning: 1 of 2 pairs were not scored"


def test_an_adapter(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(*files) == 0
    base = capsys.readouterr().out
    assert score(*files, "--adapter", f"law={demo_adapter(tmp_path / 'law', 0)}") == 0
    assert capsys.readouterr().out != base


def test_a_line_that_is_no_pair_ends_it_after_those_before(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed(b"Yes.\tOui.\nNo.\n")
    assert score() == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == "metrale: error: standard input, line 2: expected a text, a tab, its translation\n"


@pytest.mark.parametrize(("lines", "says"), [(2, "has 2 lines, fewer than "), (4, "has more lines than the 3 of ")])
def test_files_of_other_lengths(files: list[str], lines: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(files[-1]).write_text("Oui.\n" * lines)
    assert score(*files) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == min(lines, 3)
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--source-file", "a"], "--source-file and --target-file need each other"),
        (["--source-file", "no/such", "--target-file", "b"], "no/such: No such file"),
        (["--input", "no/such"], "no/such: No such file"),
        (["--input", ""], "--input: expected a file, got ''"),
        (["--source-file", "", "--target-file", "b"], "--source-file: expected a file, got ''"),
        (["--source-file", __file__, "--target-file", ""], "--target-file: expected a file, got ''"),
        (["--source-file", "a", "--target-file", "b", "--input", "c"], "--input: expected no file when --source-file"),
        (["--use-adapter", "law"], "--use-adapter has no effect"),
        (["--to", "french"], "--to: expected a language code"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed(b"a\tb\n")
    assert score(*arguments) == 2
    assert says in capsys.readouterr().err
