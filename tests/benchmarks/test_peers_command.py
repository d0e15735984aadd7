# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m benchmarks.peers``: what peers are asked for, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import runner
from metrale.bench import peer_results
from metrale.bench.protocol import RUNS
from metrale.bench.shapes import SHAPES, write_checkpoint

TIMES = {"median": 2.0, "min": 1.0, "max": 3.0, "n": 5}
CASE = {"step_ms": TIMES, "total_ms": TIMES, "one_token_ms": TIMES, "tokens_per_s": 1.0}


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "peers.json"
    status = command.main(["--out", str(out), "--device", "cpu", "--dtype", "float32", "--commit", "abc", *words])
    assert peer_results.read(out)["benchmark"] == "peers"
    return status, json.loads(out.read_text(encoding="utf-8"))


def test_each_peer_gets_the_same_cases_and_our_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(name: str, arguments: list[str], seconds: float, python: str) -> dict[str, Any]:
        asked.append((name, arguments, seconds, python))
        models = dict(word.split("=") for word in arguments if "=" in word)
        for folder in models.values():
            assert Path(folder, "config.json").exists()
            assert np.load(Path(folder, "logits.npz"))["logits"].shape[0] == 2
        shapes = {name: {"cases": {"1": CASE}, "check": {"passed": True}} for name in models}
        return {"versions": {}, "shapes": shapes, "errors": [], "seconds": 1}

    monkeypatch.setattr(runner, "run", answer)
    given = tmp_path / "mine"
    write_checkpoint(given, SHAPES["tiny"], "float32")
    before = sorted(path.name for path in given.iterdir())
    words = ["--shape", "tiny", f"mine={given}", "--batches", "1,3", "--beams", "2", "--python", "ct2=/x/python"]
    status, report = run(tmp_path, *words, "--new-tokens", "9", "--seconds", "7")
    assert status == 0
    assert [name for name, *_ in asked] == ["ctranslate2", "transformers"]
    assert [python == "/x/python" for *_, python in asked] == [True, False]
    for _, arguments, seconds, _ in asked:
        text = " ".join(arguments)
        assert f"--beams 2 --beam-batches 1,3 --runs {RUNS} --source-len 32 --new-tokens 9" in text
        assert seconds == 7
    assert RUNS >= 5
    assert report["protocol"] == {"source_tokens": 32, "new_tokens": 9, "beams": 2, "dtype": "float32", "runs": RUNS}
    assert report["machine"]["commit"] == "abc"
    assert set(report["peers"]["ctranslate2"]["shapes"]) == {"tiny", "mine"}
    assert sorted(path.name for path in given.iterdir()) == before, "nothing is written beside a checkpoint's files"


def test_what_goes_wrong_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"versions": {}, "shapes": {"tiny": {"cases": {}}}, "errors": ["gone"], "seconds": 1}
    monkeypatch.setattr(runner, "run", lambda *_: bad)
    status, report = run(tmp_path, "--shape", "tiny", "--peers", "hf")
    assert status == 1
    assert report["problems"] == [
        "transformers: gone",
        "transformers, tiny: its logits are not compared with ours, or differ: None",
    ]


@pytest.mark.parametrize("words", [["--peers", "x", "a=b"], ["--python", "x=y", "a=b"], []])
def test_wrong_options_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--out", str(tmp_path / "x"), *words])
    assert ended.value.code == 2
