# SPDX-License-Identifier: MIT OR Apache-2.0
"""The protocol that all systems share, and the processes that peers run in: no failure is lost, none stops the run."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import protocol, runner
from benchmarks.peers.protocol import (
    EOS,
    FIRST_WORD,
    NEW_TOKENS,
    TOLERANCE,
    difference,
    forced_ids,
    log_probabilities,
    measure,
    sources,
    timings,
)
from benchmarks.peers.runner import cublas_12, gathered, run_module


def test_sources() -> None:
    few, many = sources(2, 32, 1000), sources(64, 32, 1000)
    assert few == many[:2], "the check's sources are the first of every batch"
    assert all(len(ids) == 32 and ids[0] == FIRST_WORD and ids[-1] == EOS for ids in many)
    words = [word for ids in many for word in ids[1:-1]]
    assert min(words) >= FIRST_WORD
    assert max(words) < 1000
    assert len(set(words)) > 500
    assert [len(ids) for ids in sources(3, 64, 1000)] == [64] * 3


def test_a_step_leaves_out_what_one_token_takes() -> None:
    found = timings(8, [10.0, 12.0, 50.0], [12.0 + 63 * 2.0, 12.0 + 63 * 3.0, 12.0 + 63 * 7.0])
    assert found["step_ms"] == {"median": 3.0, "min": 2.0, "max": 7.0, "n": 3}
    assert found["one_token_ms"]["median"] == 12.0
    assert found["tokens_per_s"] == pytest.approx(8 * 64 / 0.201, rel=1e-3)


def test_calls_are_warmed_up_before_they_are_timed() -> None:
    calls: list[int] = []
    found = measure(calls.append, 1, 4)
    assert calls == [NEW_TOKENS, NEW_TOKENS, 1] + 4 * [1] + 4 * [NEW_TOKENS]
    assert found["total_ms"]["n"] == 4


def test_difference() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3, 50))
    assert difference(rows, rows) == 0
    assert difference(np.zeros_like(rows), rows) == 1, "zeros pass under no tolerance"
    assert max(TOLERANCE.values()) < 1
    near = rows.copy()
    near[1, 2, 7] += 0.01 * np.abs(rows[1, 2]).max()
    assert difference(near, rows) == pytest.approx(0.01)
    near[0, 0, 0] = np.nan
    assert difference(near, rows) == math.inf


def test_log_probabilities() -> None:
    logits = np.log(np.array([[[1.0, 3.0], [9.0, 1.0]]]))
    assert np.allclose(np.exp(log_probabilities(logits, [[1, 0]])), [[0.75, 0.9]])


def test_forced_ids_are_words() -> None:
    ids = forced_ids(100)
    assert len(ids) == protocol.CHECK_SOURCES
    assert ids[0] != ids[1]
    assert all(len(one) == protocol.CHECK_STEPS and min(one) >= FIRST_WORD and max(one) < 100 for one in ids)


def test_gathered() -> None:
    found = gathered(
        [
            {"versions": {"a": "1"}},
            {"shape": "tiny", "load_s": 2.0},
            {"shape": "tiny", "check": {"passed": True}},
            {"shape": "tiny", "batch": 8, "result": {"x": 1}},
            {"shape": "tiny", "beams": 4, "batch": 8, "result": {"x": 2}},
            {"shape": "tiny", "batch": 64, "error": "OutOfMemory: no"},
            {"shape": "tiny", "beams": 4, "batch": 64, "error": "OutOfMemory: no"},
            {"shape": "big", "error": "ValueError: bad"},
            {"error": "ImportError: none"},
        ]
    )
    assert found == {
        "versions": {"a": "1"},
        "shapes": {
            "tiny": {"cases": {"8": {"x": 1}}, "beams": {"8": {"x": 2}}, "load_s": 2.0, "check": {"passed": True}}
        },
        "errors": [
            "tiny, batch 64: OutOfMemory: no",
            "tiny, 4 beams, batch 64: OutOfMemory: no",
            "big: ValueError: bad",
            "ImportError: none",
        ],
    }


def peer(folder: Path, text: str) -> dict[str, str]:
    """Write a module ``fake_peer`` and return an environment in which it is found."""
    (folder / "fake_peer.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


GOOD = """
import json, sys
print("noise")
print(json.dumps({"shape": "s", "batch": 1, "result": {"x": sys.argv[1]}}), flush=True)
"""


def test_a_good_peer(tmp_path: Path) -> None:
    found = run_module("fake_peer", ["word"], 60, peer(tmp_path, GOOD))
    assert found["shapes"] == {"s": {"cases": {"1": {"x": "word"}}}}
    assert found["errors"] == []
    assert found["seconds"] >= 0


def test_a_peer_that_hangs_is_stopped_and_its_results_are_kept(tmp_path: Path) -> None:
    found = run_module("fake_peer", ["word"], 6, peer(tmp_path, GOOD + "import time\ntime.sleep(600)\n"))
    assert found["shapes"] == {"s": {"cases": {"1": {"x": "word"}}}}
    assert found["errors"] == ["stopped after its limit of 6 s; later cases were not run"]
    assert found["seconds"] < 60


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise ValueError('broken')", "ended with exit status 1: .*ValueError: broken"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended with exit status -11"),
    ],
)
def test_a_peer_that_fails_says_why(tmp_path: Path, ending: str, said: str) -> None:
    found = run_module("fake_peer", ["word"], 60, peer(tmp_path, GOOD + ending))
    assert found["shapes"]["s"]["cases"]
    (error,) = found["errors"]
    assert re.search(said, error, re.DOTALL)


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    """A module of that name which raises what a missing one would, so that it is missing wherever the test runs."""
    (tmp_path / "ctranslate2.py").write_text("raise ModuleNotFoundError('No module named ctranslate2')\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    found = run_module(runner.MODULES["ctranslate2"], [f"tiny={tmp_path}", "--device", "cpu"], 120, environment)
    assert found["errors"] == ["ModuleNotFoundError: No module named ctranslate2"]


@pytest.mark.parametrize(("version", "linked"), [(12, False), (13, True)])
def test_cublas_is_found_under_the_name_that_is_asked_for(
    tmp_path: Path, version: int, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "some" / "lib"
    folder.mkdir(parents=True)
    for stem in ("libcublas", "libcublasLt"):
        (folder / f"{stem}.so.{version}").write_bytes(b"library")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/old")
    with cublas_12() as environment:
        first, *rest = environment["LD_LIBRARY_PATH"].split(os.pathsep)
        assert rest == ([str(folder), "/old"] if linked else ["/old"])
        for stem in ("libcublas", "libcublasLt"):
            assert Path(first, f"{stem}.so.12").read_bytes() == b"library"
