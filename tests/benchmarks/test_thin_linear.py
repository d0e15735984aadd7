# SPDX-License-Identifier: MIT OR Apache-2.0
"""The benchmark of thin layers goes through on the host, and notices a wrong result."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import thin_linear
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import MINIMUM
from metrale.ops.gemv import VARIANTS as GEMV_VARIANTS
from metrale.ops.thin_linear import OP, VARIANTS

PLANS: Final = 2 * len(VARIANTS) + 2
"""Of `thin_linear`, and of `cluster_linear` where there are no clusters."""


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, dict[str, Any]]:
    command = ["thin_linear", "--device", "host", "--rows", "1", "3", "--repeats", "1", "--out", str(path), *options]
    monkeypatch.setattr(sys, "argv", command)
    code = thin_linear.main()
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_every_plan_of_every_layer_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = run(tmp_path / "a.json", monkeypatch)
    assert (code, report["problems"]) == (0, [])
    (width,) = thin_linear.WIDTHS["host"]
    layers = thin_linear.layers(width, thin_linear.HEAD_ROWS["host"])
    assert [(one["n"], one["k"]) for one in report["layers"]] == [(one.n, one.k) for one in layers]
    for layer in report["layers"]:
        for rows, case in layer["rows"].items():
            count = PLANS + (len(GEMV_VARIANTS) if rows == "1" else 0)
            assert len(case["thin_us"]) == len(case["thin_programmatic_us"]) == count
            assert case["chosen"].startswith("gemv ") is (rows == "1")
            assert case["chosen"] in case["thin_us"]
            assert case["chosen_cluster"] == "cluster 1"


def test_a_wrong_result_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**values: Any) -> None:
        OP.reference(**values)
        values["out"] += 1

    monkeypatch.setattr(thin_linear, "OP", replace(OP, reference=wrong))
    code, report = run(tmp_path / "b.json", monkeypatch, "--layers", "q, k, v", "head")
    assert code == 1
    assert len(report["problems"]) == 2 * (PLANS + len(GEMV_VARIANTS))
    assert "q, k, v 192x64, streamed 8w: error" in report["problems"][0]


def test_a_norm_goes_ahead_of_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with clusters, which here are asked for and not made."""
    large = replace(MINIMUM, compute_capability=(9, 0), sm_count=132, max_cluster=8)
    monkeypatch.setattr(HostBackend, "limits", lambda self: large)
    layer = next(one for one in thin_linear.layers(64, 320) if one.norm)
    with HostBackend() as gpu, ExitStack() as undo:
        bench = thin_linear.Bench(gpu, layer, "bf16", undo)
        ways = bench.ways(3)
        clusters = [f"{kind} {size}" for kind in ("cluster", "chained") for size in (1, 2, 4, 8)]
        assert [name for name in ways if name.startswith(thin_linear.CLUSTERS)] == clusters
        for name, way in ways.items():
            with gpu.launch_trace() as trace:
                bench.ours(3, way, programmatic=True, copies=2)(0)
            before = ["layer_norm_bf16"] if name in clusters else []
            assert [record.name for record in trace] == [*before, way.how.entry] * 2
