# SPDX-License-Identifier: MIT OR Apache-2.0
"""A whole run of the GPU benchmark on the host: its JSON, its tables, and what it does when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_report, gpu_speed
from benchmarks.peers import runner
from metrale.bench import beams, check

SPREAD = {"median", "min", "max", "n"}


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out.json"
    status = gpu_speed.main(
        [
            *("--device", "host", "--only", "tiny", "--dtype", "float32", "--batches", "1,3", "--quick"),
            *("--commit", "abc", "--work", str(folder), "--out", str(out), *words),
        ]
    )
    return status, json.loads(out.read_text(encoding="utf-8"))


def peer_report(name: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """What a peer would report, made up; the checkpoint it is sent to must be there, with logits to compare with."""
    shape, _, folder = arguments[0].partition("=")
    assert shape == "tiny"
    assert np.load(Path(folder, "logits.npz"))["logits"].shape == (2, 4, 1000)
    assert 0 < seconds <= gpu_speed.PEER_SECONDS[name]
    step = {"median": 12.0, "min": 11.0, "max": 13.0, "n": 2}
    case = {"step_ms": step, "one_token_ms": step, "total_ms": step, "tokens_per_s": 1.0}
    assert arguments[arguments.index("--beams") + 1] == "4"
    assert arguments[arguments.index("--runs") + 1] == "2", "this run is a quick one; others have five"
    searched = {"beams": {"3": case}} if name == "ctranslate2" else {}
    shapes = {"tiny": {"cases": {"1": case}, **searched, "check": {"passed": name == "transformers"}}}
    return {
        "versions": {},
        "shapes": shapes,
        "errors": ["batch 3: gone"] if name == "ctranslate2" else [],
        "seconds": 1,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", peer_report)
        return run(tmp_path_factory.mktemp("run"))


def test_the_report_has_all_its_parts(finished: tuple[int, dict[str, Any]]) -> None:
    _, report = finished
    assert report["machine"]["commit"] == "abc"
    assert report["device"]["kind"] == "host"
    assert report["ceilings"]["read_gb_per_s"] > 0
    tiny = report["shapes"]["tiny"]
    assert tiny["check"]["passed"]
    assert tiny["check"]["float32"]["same_likeliest"] == "8 of 8"
    assert set(tiny["check"]["batches"]) == set(tiny["cases"]) == {"1", "3"}
    assert tiny["load"]["gb_per_s"] > 0
    for case in tiny["cases"].values():
        for name in ("total_ms", "one_token_ms", "step_ms", "host_enqueue_ms"):
            assert set(case["wall"][name]) == SPREAD
            assert case["wall"][name]["min"] <= case["wall"][name]["median"] <= case["wall"][name]["max"]
        assert case["wall"]["same_tokens_each_time"]
        assert case["wall"]["different_tokens"] > 10, "the last norm's weights have both signs, so tokens vary"
        assert set(case["device"]["step_device_ms"]) == SPREAD
        for part in ("decode", "encoder"):
            found = case[part]
            assert found["launches"] == sum(row["calls"] for row in found["ops"])
            assert found["weight_bytes"] == sum(row["weight_bytes"] * row["calls"] for row in found["ops"])
            assert found["floor_ms"] > 0
            assert ("parts" in found) == (part == "decode")
            assert found["graph_ms"] > 0
        assert sum(row["calls"] for row in case["decode"]["parts"]) == case["decode"]["launches"]
        serving = case["serving"]
        for times in (serving["fed"], serving["engine"]):
            assert set(times["step_ms"]) == SPREAD
            assert times["total_ms"]["min"] > 0
        assert set(serving["step_device_ms"]) == set(serving["host_enqueue_ms"]) == SPREAD
        assert isinstance(serving["busy"], float)
        assert 0 < serving["busy_by_events"]["share"]["median"] <= 1
        assert serving["busy_by_events"]["steps"] >= 64
        assert serving["graph_launches_per_step"] == 0, "which the host has no use for"
        assert serving["same_tokens_each_time"]
        assert case["launches_per_step"]["kernel"] + case["launches_per_step"]["gemm"] == case["decode"]["launches"]


def test_beam_search_is_measured_as_well(finished: tuple[int, dict[str, Any]]) -> None:
    _, report = finished
    searched = report["shapes"]["tiny"]["beams"]
    assert set(searched) == {"1", "3"}
    for size, case in searched.items():
        assert case["check"]["passed"]
        assert case["check"]["largest_log_probability_difference"] > 0, "two ways of summing, and not one and the same"
        assert case["wall"]["same_tokens_each_time"]
        assert case["wall"]["different_tokens"] > 10
        for found in (case["wall"]["step_ms"], *case["device"].values()):
            assert set(found) == SPREAD
        ops = {row["op"]: row for part in ("decode", "select") for row in case[part]["ops"]}
        assert ops["decode_attention self, beams"]["rows"] == ops["beam_candidates"]["rows"] == 4 * int(size)
        assert ops["decode_attention self, beams"]["calls"] == ops["decode_attention cross"]["calls"] == 2
        # Beams share their source's keys and values, and in the middle of a search most of their own.
        assert ops["decode_attention cross"]["kv_bytes"] == 2 * 32 * 64 * 4 * int(size)
        shared = ops["decode_attention self, beams"]["kv_bytes"] / (2 * 34 * 64 * 4 * int(size))
        assert 1 < shared < 4
        assert ops["beam_select"]["rows"] == int(size)
        assert case["select"]["launches"] == 2
        assert case["launches_per_step"]["select"]["copy"] == 2, "a table goes, and flags come"


def test_what_went_wrong_is_said_and_shows_in_the_status(finished: tuple[int, dict[str, Any]]) -> None:
    status, report = finished
    assert status == 1
    said = report["problems"]
    assert said[0] == "ctranslate2: batch 3: gone"
    assert said[1].startswith("ctranslate2, tiny: its logits are not compared with ours, or differ")
    assert len(said) == 2


def test_the_tables_show_every_case_and_the_peers(finished: tuple[int, dict[str, Any]]) -> None:
    _, report = finished
    first, second = [line for line in gpu_report.steps_table(report).splitlines() if "tiny" in line]
    assert first.startswith("| tiny batch 1")
    assert first.count("12 [11..13]") == 2
    assert second.count(" - |") == 3, "neither peer has this case, and so there is no ratio"
    assert "ctranslate2: batch 3: gone" in gpu_report.summary(report)
    tables = gpu_report.ops_tables(report)
    assert tables.count("### ") == 4 + 4
    assert "decode_attention cross" in tables
    assert tables.count("| cross-attention |") == 2
    assert "busy by events" in gpu_report.serving_table(report)
    assert "tiny, batch 3, 4 beams: selection" in tables
    first, second = gpu_report.beams_table(report).splitlines()[2:]
    assert first.startswith("| tiny batch 1, 4 beams")
    assert first.count(" - |") == 3
    assert "12 [11..13]" in second


def test_a_report_that_was_cut_short_still_has_tables(finished: tuple[int, dict[str, Any]]) -> None:
    _, report = finished
    cut = {**report, "shapes": {"tiny": {"cases": {}}, "600M": {"cases": {}}}, "peers": {}, "problems": []}
    assert gpu_report.beams_table(cut) == ""
    assert gpu_report.summary(cut).count("\n") >= 4
    only_peers = {**report, "shapes": {"tiny": {"cases": {}}}}
    assert "12 [11..13]" in gpu_report.steps_table(only_peers)


def test_wrong_logits_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = check.forced_logits

    def wrong(model: Any, size: int = 2) -> Any:
        logits = original(model, size)
        return logits[:, :, ::-1] if size == 3 else logits

    monkeypatch.setattr(check, "forced_logits", wrong)
    status, report = run(tmp_path, "--peers", "none")
    assert status == 1
    assert report["shapes"]["tiny"]["cases"] == {}
    assert "the logits are wrong, so nothing was timed" in report["problems"][0]
    assert report["shapes"]["tiny"]["check"]["batches"]["1"]["passed"]
    assert not list(tmp_path.glob("*/tiny")), "checkpoints are removed"


@pytest.mark.more
def test_a_search_with_other_log_probabilities_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = beams.generate

    def wrong(*arguments: Any) -> Any:
        ms, best = original(*arguments)
        best[0].logprobs[1] += 0.01
        return ms, best

    monkeypatch.setattr(beams, "generate", wrong)
    status, report = run(tmp_path, "--peers", "none", "--no-ops", "--batches", "3")
    assert status == 1
    first, second = report["problems"]
    assert first.startswith("tiny: batch 1, 4 beams: log-probabilities are not those of the same ids alone")
    assert second.startswith("tiny: batch 3, 4 beams: log-probabilities")


@pytest.mark.more
def test_without_beams(tmp_path: Path) -> None:
    status, report = run(tmp_path, "--peers", "none", "--no-ops", "--beams", "0", "--batches", "1")
    assert status == 0
    assert "beams" not in report["shapes"]["tiny"]


def test_a_model_that_fails_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("too small")

    monkeypatch.setattr("metrale.load", broken)
    status, report = run(tmp_path, "--peers", "hf")
    assert status == 1
    assert report["problems"] == [
        "tiny: MemoryError: too small",
        "the peers were not run: metrale gave them nothing to compare with",
    ]


@pytest.mark.parametrize("words", [["--only", "7B"], ["--batches", "x"], ["--peers", "nobody"], ["--beams", "1"]])
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_speed.parse(words)
    assert words[1] in capsys.readouterr().err
