# SPDX-License-Identifier: MIT OR Apache-2.0
"""The evidence command refuses a machine that cannot give any, before it runs or writes anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import ROOT, gpu_evidence
from gpu_runtime.op import REGISTRY
from tests.ops.harness import cases_of


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a step was run")

    output = folder / "evidence.json"
    monkeypatch.setattr(gpu_evidence, "run", never)
    monkeypatch.setattr(sys, "argv", ["gpu_evidence", "--output", str(output), *options])
    with pytest.raises(SystemExit) as caught:
        gpu_evidence.main()
    assert caught.value.code == 2
    assert not output.exists()


def test_without_compute_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_evidence, "find_sanitizer", lambda: "compute-sanitizer")
    refused(tmp_path, monkeypatch)
    assert "compute-sanitizer is not found" in capsys.readouterr().err


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides those that there may be
    monkeypatch.setattr(gpu_evidence, "find_sanitizer", lambda: "/usr/bin/compute-sanitizer")
    refused(tmp_path, monkeypatch)
    assert "no GPU can be used: gpu_runtime.errors.BackendUnavailable: cuda: " in capsys.readouterr().err


def test_the_advice_leaves_out_all_that_needs_compute_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_evidence, "find_sanitizer", lambda: "compute-sanitizer")
    refused(tmp_path, monkeypatch, "--skip", "check", "--skip", "planted")
    err = capsys.readouterr().err
    assert "no GPU can be used" in err
    assert "compute-sanitizer" not in err


def test_every_file_of_tests_is_in_one_part() -> None:
    steps = gpu_evidence.tests("tests", "--gpu-arch", "compute_80")
    assert [step.name for step in steps] == [f"tests: {part}" for part in gpu_evidence.PARTS]
    taken: list[Path] = []
    for step in steps:
        words = step.command[len(gpu_evidence.PYTEST) + 2 :]
        assert step.command[len(gpu_evidence.PYTEST) :][:2] == ("--gpu-arch", "compute_80")
        given = [ROOT / word for word in words if not word.startswith("--")]
        without = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--")]
        assert all(path.exists() for path in [*given, *without])
        taken += [
            file
            for file in (ROOT / "tests").rglob("test_*.py")
            if any(file.is_relative_to(path) for path in given)
            and not any(file.is_relative_to(path) for path in without)
        ]
    everything = sorted((ROOT / "tests").rglob("test_*.py"))
    apart = [ROOT / path for path in (gpu_evidence.LAUNCH_COST, *gpu_evidence.LIVE)]
    assert sorted([*taken, *apart]) == everything


def test_no_test_of_an_op_is_left_out_by_racecheck() -> None:
    """But those of the product, whose kernels are not ours. None is taken twice."""
    (_, former), (_, beams) = gpu_evidence.FORMER, gpu_evidence.BEAMS
    without = [word.removeprefix("not ") for word in former.split(" and ")]
    taken: dict[str, set[int]] = {}
    for case in cases_of(list(REGISTRY)):
        name = f"test_result[cuda-{case.id}]"
        times = all(word not in name for word in without) + any(word in name for word in beams.split(" or "))
        taken.setdefault(name.split("-")[1], set()).add(times)
    assert taken == {op.spec.name: {0 if op.spec.library else 1} for op in REGISTRY}
