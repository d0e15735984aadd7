# SPDX-License-Identifier: MIT OR Apache-2.0
"""``--resume``: it goes on where a run ended, with what that run was begun with, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import metrale
from metrale.cli import main
from metrale.cli.fingerprint import _files
from metrale.cli.journal import Journal
from metrale.demo import demo_model_path
from tests.cli.conftest import FakeTranslator, Feed

TEXTS = ["one", "two", "fail x", "", "five", "six", "seven"]
WRITTEN = ["ONE", "TWO", "", "", "FIVE", "SIX", "SEVEN"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def translate(source: Path, output: Path, *options: object) -> int:
    named = ["--input", source, "--output", output, "--to", "fra_Latn", *options]
    return main(["translate", *map(str, named)])


def record_of(output: Path) -> Path:
    return Path(f"{output}.resume")


def broken_off(source: Path, output: Path, after: int, *options: object) -> None:
    """Leave an output of so many lines, as a run does that meets a fault."""
    whole = source.read_bytes()
    source.write_text("".join(f"{text}\n" for text in [*TEXTS[:after], "fault", *TEXTS[after + 1 :]]))
    assert translate(source, output, *options) == 4
    source.write_bytes(whole)
    assert output.read_text().count("\n") == after
    assert record_of(output).exists()


@pytest.mark.parametrize("after", range(len(TEXTS)))
@pytest.mark.parametrize("partial", [b"", b"X", "Ż".encode()[:1], b"THREE without its end"])
def test_it_goes_on_behind_the_last_whole_line(
    source: Path,
    output: Path,
    fakes: list[FakeTranslator],
    capsys: pytest.CaptureFixture[str],
    after: int,
    partial: bytes,
) -> None:
    broken_off(source, output, after)
    output.write_bytes(output.read_bytes() + partial)
    capsys.readouterr()
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN
    assert fakes[1].texts == TEXTS[after:]
    assert fakes[1].arguments[0]["first_index"] == after
    err = capsys.readouterr().err
    assert (f"going on after {after} lines of {output}" in err) == (after > 0)
    assert err.splitlines()[-1] == "metrale: warning: 1 of 7 lines were not translated", "those before count as well"
    assert not record_of(output).exists()


def test_it_goes_on_any_number_of_times(source: Path, output: Path, fakes: list[FakeTranslator]) -> None:
    broken_off(source, output, 2)
    for after in (3, 3, 5):
        broken_off(source, output, after, "--resume")
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN


def test_without_an_output_it_begins(source: Path, output: Path, fakes: list[FakeTranslator]) -> None:
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN
    broken_off(source, output, 3, "--overwrite")
    output.unlink()  # its record is left behind
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN
    output.write_bytes(b"")  # as a run leaves it that ends before its record is there
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN


def test_a_finished_output_is_left_as_it_is(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate(source, output) == 1
    before = output.stat().st_mtime_ns
    capsys.readouterr()
    assert translate(source, output, "--resume") == 0
    assert f"note: {output} is finished" in capsys.readouterr().err
    assert output.stat().st_mtime_ns == before
    assert len(fakes) == 1, "no model was loaded for it"


def test_an_output_that_only_lacks_its_end_is_finished(
    source: Path, output: Path, fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines are written, and the process is killed before the record goes."""
    complete = Journal.complete
    monkeypatch.setattr("metrale.cli.journal.Journal.complete", lambda self: None)
    assert translate(source, output) == 1
    monkeypatch.setattr("metrale.cli.journal.Journal.complete", complete)
    assert record_of(output).exists()
    assert translate(source, output, "--resume") == 1
    assert fakes[1].texts == []
    assert output.read_text().splitlines() == WRITTEN
    assert not record_of(output).exists()


def test_an_output_of_unknown_origin_is_refused(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_text("ONE\nTWO\n")
    assert translate(source, output, "--resume") == 2
    assert "2 lines for 7 of the input, and no record (out.txt.resume)" in capsys.readouterr().err
    assert output.read_text() == "ONE\nTWO\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--from", "deu_Latn"], "--from was eng_Latn and is deu_Latn"),
        (["--to", "deu_Latn"], "--to was fra_Latn and is deu_Latn"),
        (["--json"], "--json was not given and is given"),
        (["--scores"], "--scores was not given and is given"),
        (["--dtype", "float16"], "the element type was float32 and is float16"),
        (["--max-new-tokens", "7"], "--max-new-tokens was 256 and is 7"),
        (["--max-source-len", "70"], "--max-source-len was 512 and is 70"),
        (["--timeout", "3"], "--timeout was not given and is 3.0"),
        (["--temperature", "0.5"], "--temperature was 0.0 and is 0.5"),
        (["--seed", "5"], "--seed was 0 and is 5"),
        (["--repetition-penalty", "1.5"], "--repetition-penalty was 1.0 and is 1.5"),
        (["--no-repeat-ngram", "2"], "--no-repeat-ngram was 0 and is 2"),
        (["--min-new-tokens", "2"], "--min-new-tokens was 0 and is 2"),
        (["--attention", "--json"], "--json was not given and is given; --attention was not given and is given"),
        (["--beam", "3"], "--beam was 1 and is 3"),
        (["--beam", "3", "--length-penalty", "2"], "--beam was 1 and is 3; --length-penalty was 1.0 and is 2.0"),
        (
            ["--beam", "3", "--early-stopping", "never"],
            "--beam was 1 and is 3; --early-stopping was false and is never",
        ),
        (["--target-prefix", "Oui"], "--target-prefix was not given and is Oui"),
        (["--suppress-tokens", "7,9"], "--suppress-tokens was not given and is 7,9"),
        (["--forced-eos"], "--forced-eos was not given and is given"),
        (["--temperature", "0.5", "--top-k", "3"], "--temperature was 0.0 and is 0.5; --top-k was 0 and is 3"),
    ],
)
def test_other_options_are_refused_by_name(
    source: Path,
    output: Path,
    fakes: list[FakeTranslator],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    broken_off(source, output, 3, "--dtype", "float32")
    before = output.read_bytes(), record_of(output).read_bytes()
    assert translate(source, output, "--resume", "--dtype", "float32", *options) == 2
    assert f"{output} cannot be gone on with: {says} (" in capsys.readouterr().err
    assert fakes[1].texts == []
    assert (output.read_bytes(), record_of(output).read_bytes()) == before
    assert translate(source, output, "--resume", "--dtype", "float32", "--max-batch", "3") == 1, (
        "the batch is no matter"
    )
    assert output.read_text().splitlines() == WRITTEN


@pytest.mark.parametrize("name", ["config.json", "sentencepiece.bpe.model", "model.safetensors"])
def test_another_model_is_refused(
    source: Path,
    output: Path,
    tmp_path: Path,
    fakes: list[FakeTranslator],
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model", ignore=shutil.ignore_patterns("recipe"))
    broken_off(source, output, 3)
    moved: Any = "--model", model
    data = bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    assert translate(source, output, "--resume", *moved) == 2
    assert f"cannot be gone on with: the model's {name} is another one (" in capsys.readouterr().err
    shutil.copy(demo_model_path() / name, model)
    (model / "README.md").write_text("Notes.")
    assert translate(source, output, "--resume", *moved) == 1, "the same model, elsewhere"


def test_weights_of_every_form_are_part_of_the_model(tmp_path: Path) -> None:
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    weights += ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    for name in ("config.json", *weights, "training_args.bin", "README.md"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in _files(tmp_path)] == ["config.json", *weights]


def test_other_bad_words_are_refused(
    source: Path, output: Path, tmp_path: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("Bonjour\n\nSalut\n")
    broken_off(source, output, 3, "--bad-words", words)
    words.write_text("Bonjour\nSalutations\n")
    assert translate(source, output, "--resume", "--bad-words", words) == 2
    assert "cannot be gone on with: --bad-words was 2 phrases, " in capsys.readouterr().err
    words.write_text("Bonjour\nSalut\n")
    assert translate(source, output, "--resume", "--bad-words", words) == 1, "the same words"


def test_another_adapter_is_refused(
    source: Path, output: Path, tmp_path: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("one")
    broken_off(source, output, 3, "--adapter", f"law={folder}")
    assert translate(source, output, "--resume") == 2
    assert "--adapter was law and is not given" in capsys.readouterr().err
    assert translate(source, output, "--resume", "--adapter", f"sea={folder}") == 2
    assert "cannot be gone on with: --adapter was law and is sea (" in capsys.readouterr().err
    moved = shutil.copytree(folder, tmp_path / "moved")
    (moved / "adapter_model.safetensors").write_text("two")
    assert translate(source, output, "--resume", "--adapter", f"law={moved}") == 2
    message = "cannot be gone on with: the adapter's adapter_model.safetensors is another one ("
    assert message in capsys.readouterr().err
    (moved / "adapter_model.safetensors").write_text("one")
    assert translate(source, output, "--resume", "--adapter", f"law={moved}") == 1, "the same adapter, elsewhere"


def test_another_version_is_refused(
    source: Path,
    output: Path,
    fakes: list[FakeTranslator],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken_off(source, output, 3)
    version = metrale.__version__
    monkeypatch.setattr(metrale, "__version__", "99.0")
    assert translate(source, output, "--resume") == 2
    assert f"the version of metrale was {version} and is 99.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "texts",
    [
        ["one", "2", *TEXTS[2:]],
        ["one two", *TEXTS[2:]],
        ["", *TEXTS],
        TEXTS[1:],
        TEXTS[:2],
        ["one", "two", "fail  x", *TEXTS[3:]],
    ],
)
def test_an_input_that_begins_otherwise_is_refused(
    source: Path,
    output: Path,
    fakes: list[FakeTranslator],
    capsys: pytest.CaptureFixture[str],
    texts: list[str],
) -> None:
    broken_off(source, output, 3)
    before = output.read_bytes()
    source.write_text("".join(f"{text}\n" for text in texts))
    assert translate(source, output, "--resume") == 2
    assert f"{source}: its first 3 lines are not those that {output} was made of" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_what_follows_in_the_input_may_change(source: Path, output: Path, fakes: list[FakeTranslator]) -> None:
    broken_off(source, output, 3)
    source.write_bytes("\r\n".join([*TEXTS[:3], "new", "more"]).encode())
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == [*WRITTEN[:3], "NEW", "MORE"]


@pytest.mark.parametrize("changed", ["ONE\n2\n\n", "ONE\nT", "XONE\nTWO\n\n", "one\nTWO\n\n", ""])
def test_an_output_that_was_changed_is_refused(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str], changed: str
) -> None:
    broken_off(source, output, 3)
    assert output.read_text() == "ONE\nTWO\n\n"
    output.write_text(changed)
    assert translate(source, output, "--resume") == 2
    assert f"{output}: is not as it was written, and cannot be gone on with" in capsys.readouterr().err
    assert output.read_text() == changed


def test_lines_that_nothing_confirms_are_made_again(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    broken_off(source, output, 3)
    output.write_text("ONE\nTWO\n\nnobody\nknows\nthese")
    capsys.readouterr()
    assert translate(source, output, "--resume") == 1
    assert f"2 lines at the end of {output} are not confirmed, and made again" in capsys.readouterr().err
    assert output.read_text().splitlines() == WRITTEN


@pytest.mark.parametrize("content", ["mine\n", "mine\nas well\n"])
def test_an_output_of_which_nothing_is_confirmed_is_refused(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """As after a kill between the record of ``--overwrite`` and the end of what was there before."""
    broken_off(source, output, 0)
    output.write_text(content)
    assert translate(source, output, "--resume") == 2
    assert f"{output}: is not as it was written" in capsys.readouterr().err
    assert output.read_text() == content


def test_lines_of_a_pipe_take_the_record_of_a_file_away(
    source: Path, output: Path, fakes: list[FakeTranslator], feed: Feed
) -> None:
    broken_off(source, output, 3)
    feed(b"other\n")
    assert main(["translate", "--to", "fra_Latn", "--output", str(output), "--overwrite"]) == 0
    assert output.read_text() == "OTHER\n"
    assert not record_of(output).exists()


def test_an_engine_that_stops_does_not_finish_an_output(
    source: Path, output: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = source.read_text()
    source.write_text("one\ntwo\nstopped\nfour\n")
    assert translate(source, output) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "metrale: error: the engine was stopped after 2 lines"
    source.write_text(whole)
    assert translate(source, output, "--resume") == 1
    assert output.read_text().splitlines() == WRITTEN
