# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the command says of characters that the model does not know, and of translations that are loops."""

from __future__ import annotations

import json
import re

import pytest

from metrale.cli import main
from metrale.cli.console import Console
from metrale.cli.notices import MOST_OF_A_KIND, Notices
from metrale.translator import UnknownSpan
from tests.cli.conftest import FakeTranslator, Feed

QUICK = ("--device", "host", "--to", "fra_Latn", "--max-batch", "2")
FACE = "\U0001f600"


def lines(err: str) -> list[str]:
    return [line.removeprefix("metrale: ") for line in err.splitlines()]


def about(err: str) -> list[str]:
    """What is said of characters and of loops."""
    return [line for line in lines(err) if "does not know" in line or "repeats itself" in line]


def test_the_demo_model_does_not_know_kanji(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed("Hello\nThe 日本 door 語 is open 日本.\n".encode())
    assert main(["translate", *QUICK, "--json"]) == 0
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["unknown"], first["repeats"], second["repeats"]) == ([], False, False)
    assert [(one["start"], one["stop"], one["text"]) for one in second["unknown"]] == [
        (4, 6, "日本"),
        (12, 13, "語"),
        (22, 24, "日本"),
    ]
    text = second["source_text"]
    assert all(text[one["start"] : one["stop"]] == one["text"] for one in second["unknown"])
    assert {one["where"] for one in second["unknown"]} == {"source"}
    assert about(err) == ["note: line 2: the model does not know '日本', '語'"]
    assert main(["translate", *QUICK, "-q", "日本"]) == 0
    assert capsys.readouterr().err == ""


def test_a_prefix_is_spoken_of_once(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed("Hello\nHello 語\nHello\n".encode())
    assert main(["translate", *QUICK, "--json", "--target-prefix", "日 La"]) == 0
    out, err = capsys.readouterr()
    assert [[one["where"] for one in json.loads(line)["unknown"]] for line in out.splitlines()] == [
        ["target"],
        ["source", "target"],
        ["target"],
    ]
    assert about(err) == [
        "note: the model does not know '日' of --target-prefix",
        "note: line 2: the model does not know '語'",
    ]


def test_pairs(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed("Yes 語.\tOui.\nYes.\tOui 日本.\nYes.\tOui.\n".encode())
    options = ["--device", "host", "--from", "eng_Latn", "--to", "fra_Latn", "--max-batch", "2"]
    assert main(["score", *options, "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["unknown"] for line in out.splitlines()] == [
        [{"start": 4, "stop": 5, "text": "語", "where": "source"}],
        [{"start": 4, "stop": 6, "text": "日本", "where": "target"}],
        [],
    ]
    assert about(err) == [
        "note: pair 1: the model does not know '語'",
        "note: pair 2: the model does not know '日本'",
    ]
    feed("Yes 語.\tOui.\n".encode())
    assert main(["score", *options, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_real_loop(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--max-new-tokens", "40", "--suppress-tokens", "2", "--json", "--beam", "2"]
    assert main(["translate", *options, "Good morning."]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["repeats"] is True
    assert about(err) == ["warning: text 1: the translation repeats itself over and over"]
    assert "warning: text 1: the translation was stopped at 40 tokens (--max-new-tokens)" in lines(err)


def test_of_many_lines_a_few_are_named(
    feed: Feed, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    feed(f"a {FACE}\nloop\nb\n".encode() * 100)
    assert main(["translate", "--to", "fra_Latn"]) == 0
    said = about(capsys.readouterr().err)
    assert len(said) == 2 * MOST_OF_A_KIND + 2
    assert said[0] == f"note: line 1: the model does not know '{FACE}'"
    assert said[1] == "warning: line 2: the translation repeats itself over and over"
    assert (
        said[2 * MOST_OF_A_KIND - 1]
        == f"warning: line {3 * MOST_OF_A_KIND - 1}: the translation repeats itself over and over"
    )
    assert said[-2:] == [
        f"note: {100 - MOST_OF_A_KIND} more lines with characters that the model does not know",
        f"warning: {100 - MOST_OF_A_KIND} more lines whose translation repeats itself",
    ]
    feed(f"a {FACE}\nloop\n".encode() * 100)
    assert main(["translate", "--to", "fra_Latn", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("end", ["stopped", "fault", "caf\xe9"])
def test_the_number_of_the_others_comes_however_it_ends(
    end: str, feed: Feed, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    feed((f"{FACE}\n" * (MOST_OF_A_KIND + 1)).encode() + end.encode("latin-1") + b"\n")
    assert main(["translate", "--to", "fra_Latn"]) != 0
    assert "note: 1 more line with characters that the model does not know" in about(capsys.readouterr().err)


def test_texts_are_called_so(fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--to", "fra_Latn", *[FACE] * (MOST_OF_A_KIND + 2)]) == 0
    assert about(capsys.readouterr().err)[-1] == "note: 2 more texts with characters that the model does not know"


def test_exactly_so_many_need_no_sum(fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--to", "fra_Latn", *[FACE] * MOST_OF_A_KIND]) == 0
    assert len(about(capsys.readouterr().err)) == MOST_OF_A_KIND


def test_the_sum_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices(Console(quiet=False), "text")
    for _ in range(MOST_OF_A_KIND + 2):
        notices.unknown("text", [UnknownSpan(0, 1, "x")])
        notices.repeats("text")
    notices.end()
    notices.end()
    assert [line for line in lines(capsys.readouterr().err) if "more" in line] == [
        "note: 2 more texts with characters that the model does not know",
        "warning: 2 more texts whose translation repeats itself",
    ]


def said_of(capsys: pytest.CaptureFixture[str], *texts: str) -> str:
    notices = Notices(Console(quiet=False))
    notices.unknown("line 1", [UnknownSpan(0, len(text), text) for text in texts])
    notices.end()
    notices.end()
    (line,) = lines(capsys.readouterr().err)
    return line.removeprefix("note: line 1: the model does not know ")


def test_how_it_is_put(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_of(capsys, "a", "b", "a", "c", "b") == "'a', 'b', 'c'"
    assert said_of(capsys, "a", "b", "c", "d", "e", "d") == "'a', 'b', 'c' and 2 more"
    assert said_of(capsys, "語" * 21) == f"'{'語' * 20}'..."
    assert said_of(capsys, "語" * 20) == f"'{'語' * 20}'"
    # Nothing that moves a terminal's cursor, reorders the line or ends it.
    shown = said_of(capsys, "\x1b[2J\r\n\0", "\u202e\u2028\x85", "\U000e0001")
    assert re.fullmatch(r"[ -~]+", shown)
    assert r"\x1b[2J\r\n\x00" in shown


def test_no_spans_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices(Console(quiet=False))
    notices.unknown("line 1", [])
    notices.unknown("line 1", [UnknownSpan(0, 1, "x", "target")], of_prefix=True)
    notices.unknown("line 2", [UnknownSpan(0, 1, "x", "target")], of_prefix=True)
    notices.unknown("line 3", [UnknownSpan(0, 1, "x", "target")])
    notices.end()
    assert lines(capsys.readouterr().err) == [
        "note: the model does not know 'x' of --target-prefix",
        "note: line 3: the model does not know 'x'",
    ]
