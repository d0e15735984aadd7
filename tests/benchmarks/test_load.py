# SPDX-License-Identifier: MIT OR Apache-2.0
"""The benchmark of loading goes through all of its cases on the host, and says what a load does not keep."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_load


def test_all_cases_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "load.json"
    words = ["gpu_load", "--device", "host", "--shape", "tiny", "--runs", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_load.main() == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert [(case["stored"], case["dtype"]) for case in report["cases"]] == list(gpu_load.CASES)
    assert report["problems"] == []
    for case in report["cases"]:
        assert len(case["load_bytes_per_s"]) == len(case["copy_bytes_per_s"]) == len(case["send_bytes_per_s"]) == 2
        assert case["share"] >= case["share_with_setup"] > 0  # both rounded


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"share": 0.59}, ["0.59 of the rate of page-locked copies"]),
        ({"share": 0.59, "dtype": "float16"}, []),
        ({"whole": {"rss_anon_peak_bytes": 2**30 + 1001}}, ["1,073,742,825 bytes of anonymous memory"]),
        ({"whole": {"rss_anon_peak_bytes": None}}, []),
    ],
)
def test_what_is_not_kept(changed: dict[str, Any], words: list[str]) -> None:
    kept = {"stored": "float32", "dtype": "float32", "share": 0.6, "stored_bytes": 1000}
    case = {**kept, "whole": {"rss_anon_peak_bytes": 2**30 + 1000}, **changed}
    found = gpu_load.problems_of(case, on_gpu=True)
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))
    assert not [problem for problem in gpu_load.problems_of(case, on_gpu=False) if "copies" in problem]
