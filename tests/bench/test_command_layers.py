# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale bench --layers`` and ``--trace`` on the host: tables, lines, and what they do when something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metrale.bench import measuring
from metrale.bench.shapes import SHAPES
from metrale.cli import main
from tests.bench.running import CASES, SMALL, bench, by_case, traced

LAUNCHES = 12 * SHAPES["tiny"].layers + 4
"""Of a greedy step. Three copies go with it: two tables, and the ids."""


def test_layers_and_launches_are_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("of another run\n", encoding="utf-8")
    status, report = bench(tmp_path, "--layers", "--trace", str(trace))
    assert status == 0
    out, _ = capsys.readouterr()
    lines = traced(trace)
    assert list(lines) == CASES
    for key, case in by_case(report).items():
        layers = case["layers"]
        assert layers["launches"] == LAUNCHES + (key[1] > 1)
        assert sum(line["op"] is not None for line in lines[key]) == layers["launches"]
        assert sum(line["kind"] == "copy" for line in lines[key]) == 3, "two tables go, and ids or flags come"
        assert layers["floor_ms"] == pytest.approx(case["floor_ms"], rel=0.1), "it is the floor of about the same step"
    assert out.count("a step half way") == len(CASES)
    assert out.count("| cross-attention |") == len(CASES)
    assert main(["bench", "--from", str(tmp_path / "out.json"), "--layers"]) == 0
    assert capsys.readouterr().out == out
    assert main(["bench", "--from", str(tmp_path / "out.json")]) == 0
    assert "cross-attention" not in capsys.readouterr().out


def test_a_trace_alone_leaves_the_table_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    status, report = bench(tmp_path, "--trace", str(trace), "--batches", "1", "--beams", "0")
    assert status == 0
    assert report["cases"][0]["layers"]["launches"] == LAUNCHES
    assert len(traced(trace)[1, 1]) == LAUNCHES + 3
    assert "cross-attention" not in capsys.readouterr().out


def test_a_report_without_layers_has_none_to_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from", str(saved), "--layers"]) == 2
    assert "--layers: " in capsys.readouterr().err


def test_launches_that_fail_leave_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no more")

    monkeypatch.setattr("metrale.bench.breakdown.kind_us", broken)
    status, report = bench(tmp_path, "--layers", "--batches", "1", "--beams", "0")
    assert status == 1
    (case,) = report["cases"]
    assert case["total_ms"] is not None
    assert case["layers"] is None
    (problem,) = report["problems"]
    assert problem.endswith("the launches of a step were not timed: RuntimeError: no more")


def test_launches_of_no_op_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "unseen", lambda pieces: 2)
    status, report = bench(tmp_path, "--layers", "--batches", "1", "--beams", "0")
    assert status == 1
    assert report["problems"][0].endswith("2 launches of a step are of no op, and in no part of it")


def test_a_trace_needs_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--trace", str(tmp_path / "none" / "trace.jsonl")]) == 2
    assert "none" in capsys.readouterr().err
