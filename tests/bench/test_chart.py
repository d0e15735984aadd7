# SPDX-License-Identifier: MIT OR Apache-2.0
"""The chart: what is drawn are the numbers of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.bench import chart, peer_results
from metrale.cli import main
from tests.bench.running import peers_file

pytest.importorskip("matplotlib", reason="the extra bench is not installed")


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each labelled line; what has a range is a container, whose first part is the line."""
    found = {container.get_label(): container.lines[0] for container in axes.containers}
    found |= {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    return {label: [(float(x), float(y)) for x, y in line.get_xydata()] for label, line in found.items()}


def points(report: dict[str, Any], column: str, beams: int, *path: str) -> list[tuple[float, float]]:
    found = []
    for case in report["cases"]:
        value: Any = case
        for key in path:
            value = value[key] if value is not None and key in value else None
        if case["beams"] == beams and value is not None:
            found.append((float(case[column]), float(value)))
    return found


def test_the_lines_are_the_numbers_of_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    peer_results.attach(report, peer_results.read(peers_file(tmp_path)))
    figure = chart.draw(report)
    steps, calls = figure.axes
    drawn = lines(steps)
    assert drawn == {
        "metrale, greedy": points(report, "batch", 1, "step_ms", "median"),
        "floor, greedy": points(report, "batch", 1, "floor_ms"),
        "CTranslate2, best, greedy": [(1.0, 4.0)],
        "transformers, best, greedy": [(1.0, 4.0)],
        "metrale, 2 beams": points(report, "batch", 2, "step_ms", "median"),
        "floor, 2 beams": points(report, "batch", 2, "floor_ms"),
        "CTranslate2, best, 2 beams": [(3.0, 6.0)],
    }
    assert lines(calls)["metrale, greedy"] == points(report, "batch", 1, "total_ms", "median")
    assert not [label for label in lines(calls) if label.startswith("floor")]
    assert (steps.get_xlabel(), steps.get_ylabel()) == ("batch size", "ms per step")
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(drawn)


def test_the_range_is_drawn_as_well(report: dict[str, Any]) -> None:
    steps, _ = chart.draw(report).axes
    (container,) = [one for one in steps.containers if one.get_label() == "metrale, greedy"]
    (bars,) = container.lines[2]
    for segment, case in zip(bars.get_segments(), report["cases"][:2], strict=True):
        step = case["step_ms"]
        assert segment[:, 1].tolist() == pytest.approx([step["min"], step["max"]])


@pytest.mark.parametrize(("axis", "column"), [("source", "source_tokens"), ("produced", "new_tokens")])
def test_a_sweep_has_its_own_axis(axis: str, column: str, report: dict[str, Any]) -> None:
    report["axis"] = axis
    case = report["cases"][0]
    report["cases"] = [{**case, column: 9}, {**case, column: 1, "step_ms": None, "floor_ms": None}, case]
    steps, calls = chart.draw(report).axes
    assert [x for x, _ in lines(steps)["metrale, greedy"]] == sorted([float(case[column]), 9.0])
    assert [x for x, _ in lines(calls)["metrale, greedy"]] == sorted([1.0, float(case[column]), 9.0])


def test_cases_that_were_not_timed_are_left_out(report: dict[str, Any]) -> None:
    for case in report["cases"]:
        case |= {"step_ms": None, "total_ms": None, "floor_ms": None}
    steps, calls = chart.draw(report).axes
    assert lines(steps) == lines(calls) == {}


def test_the_command_draws_a_saved_run(saved: Path, tmp_path: Path) -> None:
    out = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in out:
        assert main(["bench", "--from", str(saved), "--chart", str(path)]) == 0
    text = out[0].read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    assert ">metrale, greedy</text>" in text
    assert ">ms per step</text>" in text
    assert out[1].read_text(encoding="utf-8") == text, "the same report gives the same bytes"
    assert json.loads(saved.read_text(encoding="utf-8"))["benchmark"] == "metrale bench"
