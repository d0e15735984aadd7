# SPDX-License-Identifier: MIT OR Apache-2.0
"""The processes that peers run in: no failure is lost, none stops the run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.peers import runner
from benchmarks.peers.runner import cublas_12, gathered, run_module


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
