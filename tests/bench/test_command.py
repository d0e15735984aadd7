# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale bench`` on the host: its JSON and its table, what it refuses, and that wrong results are not timed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import metrale
from metrale.bench import beams, cases, check, measuring, running, serving
from metrale.bench.report import NOT_TIMED
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.cli import main
from tests.bench.running import CASES, SHORT, SMALL, bench, by_case, peers_file, traced

SPREAD = {"median", "min", "max", "n"}


def test_the_report_says_what_ran_where(report: dict[str, Any]) -> None:
    assert report["machine"]["commit"] == "abc"
    assert report["machine"]["packages"]["numpy"]
    assert report["device"]["kind"] == "host"
    assert report["dtype"] == "float32"
    assert report["axis"] == "batch"
    assert report["options"]["runs"] == 2
    assert report["model"]["name"] == "tiny"
    assert report["model"]["random_weights"]
    assert report["model"]["memory_bytes"]["weights"] > 0
    assert report["floors"]["origin"] == "measured in this run"
    assert report["problems"] == []
    assert report["seconds"] > 0


def test_every_case_is_checked_and_timed(report: dict[str, Any]) -> None:
    found = by_case(report)
    assert list(found) == CASES
    for (_, width), case in found.items():
        assert case["check"]["passed"]
        assert case["check"]["finite"]
        assert {"alone", "pair", "float32"} <= set(case["check"])
        assert ("search" if width > 1 else "same_ids_fed") in case["check"]
        for key in ("step_ms", "total_ms", "one_token_ms"):
            assert set(case[key]) == SPREAD
            assert case[key]["min"] <= case[key]["median"] <= case[key]["max"]
        assert case["total_ms"]["n"] == 2
        assert case["tokens_per_s"] > 0
        assert case["ratio_to_floor"] == pytest.approx(case["step_ms"]["median"] / case["floor_ms"], abs=0.01)
        assert case["device_step_ms"] is None, "the host runs work when it is enqueued"
        assert case["layers"] is None, "which nobody asked for"
        assert (case["engine_busy"] is None) == (width > 1), "the engine serves requests that choose an id in each step"
        if width == 1:
            assert set(case["engine_busy"]) == {"share", "gap_us", "steps"}
            assert 0 < case["engine_busy"]["share"]["median"] <= 1
            assert case["engine_busy"]["share"]["n"] == 2
    assert found[3, 1]["floor_ms"] > found[1, 1]["floor_ms"]


def test_five_calls_are_timed_where_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Nothing:
        def __init__(self, gpu: Any, folder: Path, dtype: str, cases: Any, runs: int, found: Any, **_: Any) -> None:
            seen.append(runs)

        def entries(self, note: Any) -> Any:
            yield from ()

    monkeypatch.setattr(running, "Run", Nothing)
    for words in ([], ["--quick"], ["--quick", "--runs", "9"]):
        assert main(["bench", "--device", "host", "--shape", "tiny", "-q", *words]) == 0
    assert seen == [5, 2, 9]


def test_wrong_rows_of_a_batch_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = check.forced_logits

    def wrong(model: Any, size: int = 2, source_tokens: int = 32) -> Any:
        logits = original(model, size, source_tokens)
        return logits[:, :, ::-1] if size == 3 else logits

    monkeypatch.setattr(check, "forced_logits", wrong)
    status, report = bench(tmp_path)
    assert status == 1
    found = by_case(report)
    for key, case in found.items():
        assert case["check"]["passed"] == (key[0] == 1)
        assert all((case[name] is None) == (key[0] == 3 or NOT_TIMED[name] is case[name]) for name in NOT_TIMED)
    assert found[3, 1]["total_ms"] is None
    assert found[1, 1]["total_ms"] is not None
    out, err = capsys.readouterr()
    assert len([line for line in out.splitlines() if "not timed" in line]) == 2
    errors = [line for line in err.splitlines() if line.startswith("metrale: error: ")]
    assert len(errors) == 2
    assert "batch 3, greedy, 6 to 8 tokens: the results are wrong, so nothing was timed" in errors[0]


def test_other_results_than_float32s_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = check.exact_logits
    monkeypatch.setattr(
        running, "exact_logits", lambda *given: {key: rows * 1.01 for key, rows in original(*given).items()}
    )
    status, report = bench(tmp_path, "--beams", "0")
    assert status == 1
    assert all(case["total_ms"] is None for case in report["cases"])
    assert all(not case["check"]["float32"]["passed"] for case in report["cases"])
    assert all(case["check"]["alone"]["passed"] for case in report["cases"])


@pytest.mark.parametrize(("module", "name", "wrong"), [(serving, "generate", (1, 1)), (beams, "generate", (1, 2))])
def test_other_ids_or_sums_are_not_timed(
    module: Any, name: str, wrong: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(module, name)

    def changed(*given: Any) -> Any:
        ms, found = original(*given)
        if module is serving:
            found[2][0] += 1
        else:
            found[0].logprobs[2] += 0.01
        return ms, found

    monkeypatch.setattr(module, name, changed)
    status, report = bench(tmp_path, "--batches", "1")
    assert status == 1
    for key, case in by_case(report).items():
        assert (case["total_ms"] is None) == (key == wrong)
    (problem,) = report["problems"]
    assert "the results are wrong" in problem


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no more")

    monkeypatch.setattr(measuring, "step_floor_us", broken)
    status, report = bench(tmp_path, "--batches", "1")
    assert status == 1
    assert report["problems"] == ["batch 1, greedy, 6 to 8 tokens: RuntimeError: no more"]
    greedy, searched = report["cases"]
    assert greedy["check"]["passed"]
    assert greedy["total_ms"] is None
    assert searched["total_ms"] is not None


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = measuring.measure

    def stopped(model: Any, case: Any, *rest: Any) -> Any:
        if case.batch == 3:
            raise KeyboardInterrupt
        return original(model, case, *rest)

    monkeypatch.setattr(running, "measure", stopped)
    status, report = bench(tmp_path)
    assert status == 130
    assert list(by_case(report)) == [(1, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_run_that_is_terminated_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> Any:
        assert len(list(tmp_path.rglob("config.json"))) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(running, "measure", stopped)
    monkeypatch.setattr("metrale.cli.bench.work_folder", lambda shapes, dtype: tmp_path)
    with pytest.raises(SystemExit) as ended:
        bench(tmp_path)
    assert ended.value.code == 143
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_float32_has_no_room_for_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = SimpleNamespace(total=1 << 60)
    monkeypatch.setattr("metrale.memory_plan", lambda folder, gpu, dtype, **limits: plan)
    status, report = bench(tmp_path, "--batches", "1", "--beams", "0")
    assert status == 0
    assert report["float32_check"] is False
    assert "float32" not in report["cases"][0]["check"]
    assert "not compared with float32" in capsys.readouterr().err


@pytest.mark.parametrize("sweep", ["source", "produced"])
def test_a_sweep_goes_through_lengths(sweep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SWEEPS", {sweep: (4, 1, 9) if sweep == "produced" else (4, 9)})
    out = tmp_path / "out.json"
    words = ["--device", "host", "--shape", "tiny", "--quick", "-q", *SHORT]
    assert main(["bench", *words, "--sweep", sweep, "--json", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["axis"] == sweep
    lengths = [(case["source_tokens"], case["new_tokens"]) for case in report["cases"]]
    assert lengths == ([(4, 8), (9, 8)] if sweep == "source" else [(6, 4), (6, 1), (6, 9)])
    assert {(case["batch"], case["beams"]) for case in report["cases"]} == {(1, 1)}
    for case in report["cases"]:
        assert case["total_ms"] is not None
        assert (case["step_ms"] is None) == (case["floor_ms"] is None) == (case["new_tokens"] == 1)


def test_a_folder_is_measured_and_left_as_it_is(tmp_path: Path) -> None:
    folder, out = tmp_path / "mine", tmp_path / "out.json"
    write_checkpoint(folder, SHAPES["tiny"], "float16")
    before = sorted(path.name for path in folder.iterdir())
    words = ["--device", "host", "--quick", "-q", "--batches", "2", "--beams", "0", *SHORT, "--json", str(out)]
    assert main(["bench", f"{folder}/", *words]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["model"]["name"] == "mine"
    assert not report["model"]["random_weights"]
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("wanted", [False, True])
def test_the_same_bits_in_any_batch(wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that is timed is one that computes them, and the JSON says so."""
    out, loaded, load = tmp_path / "out.json", list[Any](), metrale.load

    def noted(*args: Any, **options: Any) -> Any:
        loaded.append(options["batch_invariant"])
        return load(*args, **options)

    monkeypatch.setattr(metrale, "load", noted)
    words = ["--device", "host", "--shape", "tiny", "--quick", "-q", "--batches", "2", "--beams", "0", *SHORT]
    assert main(["bench", *words, "--json", str(out), *(["--batch-invariant"] if wanted else [])]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["options"]["batch_invariant"] is wanted
    assert set(loaded) == {wanted}
    assert report["problems"] == []


@pytest.mark.parametrize("given", ["org/name", "org/name@main"])
def test_a_model_of_the_hub_is_called_by_its_id(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder in the cache has a revision for a name."""
    folder, out = tmp_path / "0123abcd", tmp_path / "out.json"
    write_checkpoint(folder, SHAPES["tiny"], "float32")
    monkeypatch.setattr("metrale.cli.model_options.resolve", lambda path, **_: folder)
    words = ["--device", "host", "--quick", "-q", "--batches", "1", "--beams", "0", *SHORT, "--json", str(out)]
    for option in ([given], ["--model", given]):
        assert main(["bench", *option, *words]) == 0
        assert json.loads(out.read_text(encoding="utf-8"))["model"]["name"] == given


def test_the_demo_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "host", "--quick", "--batches", "1", "--beams", "0", "--source-len", "4", "--new-tokens", "4"]
    assert main(["bench", *words, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["model"]["name"] == "demo_model"
    assert not report["model"]["random_weights"]
    assert "demo model" in err


def test_peers_stand_beside_a_saved_run(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], report: dict[str, Any]
) -> None:
    merged = tmp_path / "merged.json"
    words = ["--from", str(saved), "--peers", str(peers_file(tmp_path)), "--json", str(merged)]
    assert main(["bench", *words]) == 0
    out, err = capsys.readouterr()
    found = by_case(json.loads(merged.read_text(encoding="utf-8")))
    ours = by_case(report)
    theirs = found[1, 1]["peers"]["ctranslate2"]
    assert theirs["step_ms"] == {"best": 4.0, "median": 8.0, "n": 5}
    assert theirs["ratio_best"] == pytest.approx(4 / ours[1, 1]["step_ms"]["min"], rel=1e-3)
    assert theirs["ratio_median"] == pytest.approx(8 / ours[1, 1]["step_ms"]["median"], rel=1e-3)
    assert {key: sorted(case["peers"]) for key, case in found.items()} == {
        (1, 1): ["ctranslate2", "transformers"],
        (3, 1): [],
        (1, 2): [],
        (3, 2): ["ctranslate2"],
    }
    header, _, *lines = out.splitlines()
    assert "CTranslate2, best (median)" in header
    assert " 4 (8) |" in lines[0]
    assert " 6 (12) |" in lines[3]
    assert "note: transformers: batch 3: gone" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shapes": {}}, "ctranslate2: there is nothing of tiny, but of no model"),
        ({"shapes": {"tiny": {"cases": {}, "check": None}}}, "ctranslate2: its results were not compared with ours"),
        ({"shapes": {"tiny": {"cases": {}, "check": {"passed": False}}}}, "ctranslate2: its results were not compared"),
        ({"shapes": {"tiny": {"cases": {}, "check": {"passed": True}}}}, "none of its cases is one of this run"),
    ],
)
def test_what_one_should_know_of_peers_is_said(
    changes: dict[str, Any], said: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--from", str(saved), "--peers", str(peers_file(tmp_path, **changes))]) == 0
    assert said in capsys.readouterr().err


def test_a_peer_of_another_type_is_said(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = peers_file(tmp_path)
    path.write_text(path.read_text("utf-8").replace("float32", "float16"), encoding="utf-8")
    assert main(["bench", "--from", str(saved), "--peers", str(path)]) == 0
    assert "the peers computed in float16, and this run in float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x", "--shape", "tiny"], "--shape: expected none when a MODEL is given"),
        (["x", "--model", "y"], "--model: expected none when a MODEL is given"),
        (["--shape", "7B"], "--shape"),
        (["--batches", "0"], "--batches"),
        (["--batches", "1,x"], "--batches"),
        (["--beams", "1"], "--beams"),
        (["--beams", "65"], "--beams"),
        (["--source-len", "2"], "--source-len: expected at least 3, got 2"),
        (["--new-tokens", "0"], "--new-tokens: expected at least 1, got 0"),
        (["--runs", "0"], "--runs: expected at least 1, got 0"),
        (["--sweep", "width"], "--sweep"),
        (["--chart", "x.png"], "--chart: expected a file whose name ends with .svg"),
        (["--from", "x.json", "--shape", "tiny"], "--shape: expected none with --from"),
        (["--from", "x.json", "y"], "MODEL: expected none with --from"),
        (["--from", "x.json", "--batches", "3"], "--batches: expected none with --from"),
        (["--from", "x.json", "--trace", "y"], "--trace: expected none with --from"),
        (["--from", "x.json", "--batch-invariant"], "--batch-invariant: expected none with --from"),
        (["--from", "no-such.json"], "no-such.json"),
        (["--peers", "no-such.json"], "no-such.json"),
        (["--device", "tpu"], "--device: expected auto, host, cuda or cuda:N"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--from", "[", "Expecting value"),
        ("--from", "[]", "expected a JSON object"),
        ("--from", "{}", "expected a report of metrale bench"),
        ("--from", '{"benchmark": "metrale bench", "format": 99}', "expected format 1, got 99"),
        ("--from", 100_000 * "[", "nested too deeply"),
        ("--from", '{"benchmark": "metrale bench", "format": 1}', "model: expected an object, got None"),
        ("--peers", "{}", "protocol: expected an object, got None"),
        ("--peers", '{"peers": {"a": {}}, "protocol": {}}', "protocol.source_tokens: expected a number"),
    ],
)
def test_files_that_hold_something_else(
    option: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    assert main(["bench", option, str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{option}: {path}: " in err
    assert said in err


def test_a_place_for_the_json_is_looked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it measures")

    monkeypatch.setattr(running, "Run", never)
    assert main(["bench", *SMALL, "--json", str(tmp_path / "none" / "out.json")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_chart_without_matplotlib_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metrale.bench.chart.find_spec", lambda name: None)
    assert main(["bench", *SMALL, "--chart", str(tmp_path / "x.svg")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "metrale: error: --chart: matplotlib is not installed: pip install 'metrale[bench]'"


@pytest.mark.gpu
def test_on_a_gpu_steps_are_timed_on_the_device_too(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cuda", "--dtype", "float16", "--shape", "tiny", "--batches", "1,3", "--beams", "2", "--quick"]
    trace = tmp_path / "trace.jsonl"
    assert main(["bench", *words, *SHORT, "--json", str(out), "--layers", "--trace", str(trace)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["device"]["kind"] == "cuda"
    assert {"driver_version", "clocks.sm"} <= set(report["device"]["nvidia_smi"])
    assert {"driver_version", "clocks.sm"} <= set(report["device"]["nvidia_smi_after"])
    assert report["model"]["weights_may_stay_in_l2"]
    assert list(by_case(report)) == CASES
    for case in report["cases"]:
        assert set(case["device_step_ms"]) == set(case["host_enqueue_ms"]) == SPREAD
        assert case["device_step_ms"]["min"] > 0
        assert case["device_ratio_to_floor"] > 1
        assert case["layers"]["graph_ms"] > case["layers"]["floor_ms"] > 0
        if case["beams"] == 1:
            assert 0 < case["engine_busy"]["share"]["median"] <= 1
    for key, lines in traced(trace).items():
        launches = [line for line in lines if line["op"] is not None]
        assert len(launches) == by_case(report)[key]["layers"]["launches"]
        assert all(line["grid"] and line["block"] for line in launches if line["kind"] == "kernel")
