# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model in a folder of a test's own, changes of it, and what ``metrale inspect`` says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from metrale.cli import main
from metrale.demo import demo_model_path

DEMO = demo_model_path()
FILES = ("config.json", "generation_config.json", "model.safetensors", "sentencepiece.bpe.model", "tokenizer.json")
KEYS = {
    *("ok", "problems", "model", "family", "architecture", "parameters", "stored_dtypes", "weights", "values"),
    *("vocabulary", "languages", "config", "device", "dtype", "limits", "memory", "files"),
}
"""What scripts count on: docs/command.md has it, too."""

Damage = Callable[[Path], None]


def linked_demo(tmp_path: Path) -> Path:
    """The demo model, by links: a test that changes a file puts one of its own in the place."""
    made = tmp_path / "model"
    made.mkdir()
    for name in (*FILES, "tokenizer_config.json"):
        (made / name).symlink_to(DEMO / name)
    return made


def write(name: str, data: str | bytes) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def edit(name: str, **fields: object) -> Damage:
    def change(folder: Path) -> None:
        write(name, json.dumps({**json.loads((folder / name).read_bytes()), **fields}))(folder)

    return change


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Damage:
    return lambda folder: write(name, (folder / name).read_bytes()[:size])(folder)


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the tensors of the weights."""

    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        (folder / "model.safetensors").unlink()
        save_file(found, folder / "model.safetensors")

    return rewrite


def inspect(
    folder: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 3
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the report and its problems, which must agree with the exit code, the text and standard error."""
    arguments = ["inspect", "--device", "host", "--model", str(folder), *options]
    assert main([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert set(report) == KEYS
    assert report["ok"] == (not report["problems"]) == (code == 0)
    problems = [(problem["part"], problem["problem"]) for problem in report["problems"]]
    assert main(arguments) == code
    text, err_of_text = capsys.readouterr()
    assert err_of_text == err
    lines = text.splitlines()
    if not problems:
        assert err == ""
        assert not any("problem" in line for line in lines)
        return report, problems
    assert lines[-len(problems) :] == [f"- {part}: {problem}" for part, problem in problems]
    assert lines[-len(problems) - 1] == (f"{len(problems)} problems:" if len(problems) > 1 else "1 problem:")
    said = f"{len(problems)} problems, which the output lists" if len(problems) > 1 else ": ".join(problems[0])
    assert err == f"metrale: error: {folder}: {' '.join(said.split())}\n"
    return report, problems


def drop(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: [found.pop(name) for name in names]


NORM = "model.encoder.layer_norm.weight"
FC1 = "model.decoder.layers.2.fc1.weight"
