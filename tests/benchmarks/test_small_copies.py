# SPDX-License-Identifier: MIT OR Apache-2.0
"""The benchmark of small copies goes through on the host, and notices a wrong copy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import small_copies


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(small_copies, "COPIES", 3)
    monkeypatch.setattr(sys, "argv", ["small_copies", "--device", "host", "--repeats", "1", "--out", str(path)])
    code = small_copies.main()
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_every_size_is_timed_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = run(tmp_path / "a.json", monkeypatch)
    assert (code, report["problems"]) == (0, [])
    assert [(one["direction"], one["nbytes"]) for one in report["copies"]] == [
        (direction, size) for direction in small_copies.DIRECTIONS for size in small_copies.SIZES
    ]
    for one in report["copies"]:
        assert one["kernel_us"] > 0
        assert {name: set(way) for name, way in one["ways"].items()} == {
            "backend": {"stream_us", "copies_alone_us", "host_us"}
        }


def test_a_copy_that_does_nothing_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = small_copies.Bench.ways

    def with_nothing(bench: small_copies.Bench, direction: str, size: int) -> dict[str, small_copies.Copy]:
        return {**ways(bench, direction, size), "nothing": lambda stream: None}

    monkeypatch.setattr(small_copies.Bench, "ways", with_nothing)
    code, report = run(tmp_path / "b.json", monkeypatch)
    assert code == 1
    assert len(report["problems"]) == len(small_copies.DIRECTIONS) * len(small_copies.SIZES)
    assert all(", nothing: " in one and "bytes are wrong" in one for one in report["problems"])
