# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale inspect`` and the command line around the commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import metrale
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from metrale.cli import main
from metrale.demo import demo_model_path
from tests.checkpoint.torch_files import write_bin

DEMO = demo_model_path()


def test_the_demo_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 64, "max_new_tokens": 32}
    options = [text for name, value in limits.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["inspect", "--model", str(DEMO), "--json", "--device", "host", "--dtype", "float16", *options]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert report["parameters"] == 10_797_312  # as the model's README has it
    assert report["stored_dtypes"] == ["bfloat16"]
    assert report["vocabulary"] == {"rows": 8240, "tokenizer_entries": 8231}
    assert len(report["languages"]) == 202
    assert report["languages"][:2] == ["ace_Arab", "ace_Latn"]
    assert (report["config"]["d_model"], report["config"]["decoder_layers"]) == (256, 3)
    assert report["device"]["kind"] == "host"
    assert report["limits"] == limits
    plan = metrale.memory_plan(DEMO, "host", "float16", **limits)
    assert report["memory"] == {
        "weights": plan.weights,
        "kv": plan.kv,
        "logits": plan.logits,
        "workspace": plan.workspace,
        "adapters": 0,
        "total": plan.total,
        "fits": True,
    }


def test_a_model_of_pytorch_s_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    arrays = load_file(DEMO / "model.safetensors")
    write_bin(tmp_path / "pytorch_model.bin", {name: array.astype(np.float64) for name, array in arrays.items()})
    assert main(["inspect", "--model", str(tmp_path), "--json", "--device", "host"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["parameters"], report["stored_dtypes"]) == (10_797_312, ["float64"])


class Gpu(HostBackend):
    """Says that it is a GPU, whose products run best with some workspace."""

    def kind(self) -> Any:
        return "cuda"

    def name(self) -> str:
        return "a GPU"

    def limits(self) -> Limits:
        return replace(super().limits(), compute_capability=(9, 0), gemm_workspace_bytes=32 << 20)


def test_the_plan_is_for_the_device_that_would_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_host = metrale.memory_plan(DEMO, "host", "bfloat16", max_batch=4)
    asked: list[str] = []

    def open_fake(name: str) -> Gpu:
        asked.append(name)
        return Gpu()

    monkeypatch.setattr("metrale.factory.open_backend", open_fake)
    monkeypatch.setenv("METRALE_DEVICE", "cuda:3")
    assert main(["inspect", "--model", str(DEMO), "--json", "--max-batch", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert asked == ["cuda:3"]
    assert (report["device"]["kind"], report["device"]["name"], report["dtype"]) == ("cuda", "a GPU", "bfloat16")
    # a step's decoder and the encoder beside it each have what products run best with
    assert report["memory"]["workspace"] == on_host.workspace + 2 * (32 << 20)
    assert report["memory"]["kv"] == on_host.kv
    assert main(["inspect", "--model", str(DEMO), "--device", "cuda"]) == 0
    assert "device:      a GPU, " in capsys.readouterr().out
    assert asked[1:] == ["cuda"]


def test_the_demo_model_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    out, err = capsys.readouterr()
    for part in ("10,797,312", "bfloat16", "8,240 rows", "202", "6 layers", "3 layers", "MiB", "max_batch 32"):
        assert part in out
    assert "demo model" in err


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    assert main(["inspect", "--model", str(tmp_path)]) == 0
    assert "no tokenizer: token ids only" in capsys.readouterr().out
    assert main(["inspect", "--model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["languages"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["inspect", "--model", "no/such"], 3, "no/such"),
        (["inspect", "--max-batch", "-1"], 2, "--max-batch: expected an int of 1 to 2,147,483,647, got -1"),
        (["inspect", "--device", "cuda:x"], 2, "--device: expected auto, host, cuda or cuda:N, got 'cuda:x'"),
        (["--debug"], 2, "COMMAND (see metrale --help)"),
        (["bake"], 2, "'bake'"),
    ],
)
def test_errors(arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("metrale: error: ")
    assert part in err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"metrale {metrale.__version__}\n"
    for command in ((), ("translate",), ("inspect",), ("bench",), ("doctor",)):
        assert main([*command, "--help"]) == 0
        assert " ".join(["usage: metrale", *command]) in capsys.readouterr().out
