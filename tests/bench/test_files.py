# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files that somebody has changed: whichever value is another one or gone, the file is shown or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale.bench import chart, peer_results
from metrale.bench.report import load
from metrale.bench.tables import cases_table, layers_tables
from tests.bench.running import peers_file

ROOT = Path(__file__).parents[2]
GONE = object()
WRONG: tuple[object, ...] = (None, -1, "x", [], {}, float("nan"), True, GONE)
UNSEEN = ("machine", "options", "floors", "seconds", "float32_check")


def nodes(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from nodes(inner, *path, key)


def changed(good: Any, place: tuple[Any, ...], wrong: object) -> Any:
    result = copy.deepcopy(good)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    if wrong is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = wrong
    return result


def outcomes(good: Any, path: Path, show: Any) -> set[str]:
    """Show every changed version of a file; anything but a ValueError is a fault."""
    found = set()
    for place in nodes(good):
        for wrong in WRONG if place[0] not in UNSEEN else ():
            path.write_text(json.dumps(changed(good, place, wrong)), encoding="utf-8")
            try:
                show(path)
                found.add("shown")
            except ValueError:
                found.add("refused")
    return found


def test_a_report(report: dict[str, Any], tmp_path: Path) -> None:
    peer_results.attach(report, peer_results.read(peers_file(tmp_path)))
    report["cases"] = report["cases"][:1]
    figures = {"calls": 1, "us": -0.5, "floor_us": 0.1, "ratio": -5, "weight_bytes": 1, "activation_bytes": 1}
    parts = [{"part": "norm", **figures, "kv_bytes": 0, "flop": 0}]
    report["cases"][0]["layers"] = {"launches": 1, "sum_of_ops_ms": 1, "graph_ms": 1, "floor_ms": 1, "parts": parts}

    def show(path: Path) -> None:
        found = load(path)
        cases_table(found)
        layers_tables(found)
        chart.series(found)

    assert outcomes(report, tmp_path / "report.json", show) == {"shown", "refused"}


def test_results_of_peers(report: dict[str, Any], tmp_path: Path) -> None:
    good = json.loads(peers_file(tmp_path).read_text(encoding="utf-8"))
    del good["peers"]["transformers"]

    def show(path: Path) -> None:
        found = copy.deepcopy(report)
        peer_results.attach(found, peer_results.read(path))
        cases_table(found)

    assert outcomes(good, tmp_path / "changed.json", show) == {"shown", "refused"}


def test_the_peers_of_another_benchmark_are_read_too(report: dict[str, Any]) -> None:
    """What `benchmarks.gpu_speed` wrote has the same peers in the same form."""
    found = peer_results.read(ROOT / "benchmarks" / "results" / "gpu_speed.json")
    report["model"]["name"], report["dtype"] = "600M", "float16"
    for case in report["cases"]:
        case |= {"source_tokens": 32, "new_tokens": 64}
    assert peer_results.attach(report, found) == []
    (case,) = [case for case in report["cases"] if case["peers"]]
    assert (case["batch"], case["beams"]) == (1, 1)
    assert set(case["peers"]) == {"ctranslate2", "transformers"}
    times = found["peers"]["ctranslate2"]["shapes"]["600M"]["cases"]["1"]["step_ms"]
    assert case["peers"]["ctranslate2"]["step_ms"] == {"best": times["min"], "median": times["median"], "n": times["n"]}


def test_reports_of_before_are_read(report: dict[str, Any], tmp_path: Path) -> None:
    """They have nothing of what cases need not have."""
    path = tmp_path / "report.json"
    for case in report["cases"]:
        del case["engine_busy"], case["layers"]
    path.write_text(json.dumps(report), encoding="utf-8")
    assert all(case["engine_busy"] is case["layers"] is None for case in load(path)["cases"])
    assert layers_tables(load(ROOT / "benchmarks" / "results" / "bench_demo_host.json")) == ""


@pytest.mark.parametrize("text", ["", "3", "null", "\x00", '"metrale bench"'])
def test_no_object(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    for read in (load, peer_results.read):
        with pytest.raises(ValueError, match=r"expected|Expecting"):
            read(path)
