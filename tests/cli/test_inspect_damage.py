# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale inspect`` on folders that are damaged or strange: all problems, and all that can be read nevertheless."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import metrale
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from metrale.cli import main
from metrale.cli.inspection import family
from tests.cli.inspecting import (
    DEMO,
    FC1,
    NORM,
    Damage,
    cut,
    drop,
    edit,
    inspect,
    remove,
    tensors,
    write,
)

DAMAGES: dict[str, tuple[list[Damage], list[tuple[str, str]]]] = {
    "no config": ([remove("config.json")], [("config", "config.json: there is no such file")]),
    "config cut": ([cut("config.json", 100)], [("config", "config.json: is not valid JSON")]),
    "config is a list": ([write("config.json", "[]")], [("config", "config.json: holds a JSON array")]),
    "another model": (
        [edit("config.json", model_type="bert")],
        [("config", 'config.json: model_type "bert" is not supported')],
    ),
    "wrong fields": (
        [edit("config.json", d_model="wide", encoder_layers=-1, activation_function="mish")],
        [("config", "d_model: expected"), ("config", "encoder_layers: expected"), ("config", "activation_function: e")],
    ),
    "generation cut": ([cut("generation_config.json", 9)], [("config", "generation_config.json: is not valid JSON")]),
    "generation's fields": (
        [edit("generation_config.json", num_beams=0, length_penalty="much")],
        [
            ("config", "generation_config.json: num_beams: expected"),
            ("config", "generation_config.json: length_penalty: expected"),
        ],
    ),
    "both configs": (
        [edit("config.json", encoder_layers=-1), write("generation_config.json", "")],
        [("config", "generation_config.json: is not valid JSON"), ("config", "config.json: encoder_layers: expected")],
    ),
    "an adapter": (
        [remove("config.json"), write("adapter_config.json", "{}")],
        [("config", "holds a LoRA adapter (adapter_config.json), not a model")],
    ),
    "no weights": ([remove("model.safetensors")], [("weights", "holds no weights: expected model.safetensors")]),
    "weights cut": (
        [cut("model.safetensors", 99_999)],
        [("weights", "model.safetensors: is not a complete safetensors file (99999 bytes)")],
    ),
    "weights empty": ([write("model.safetensors", "")], [("weights", "model.safetensors: is an empty file")]),
    "a pointer": (
        [write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")],
        [("weights", "model.safetensors: is a Git LFS pointer")],
    ),
    "a link to nothing": (
        [remove("model.safetensors"), lambda folder: (folder / "model.safetensors").symlink_to("../blobs/gone")],
        [("weights", "model.safetensors: there is no such file")],
    ),
    "tensors missing": (
        [tensors(drop(NORM, FC1))],
        [("weights", f"missing tensor '{NORM}'"), ("weights", f"missing tensor '{FC1}'")],
    ),
    "tensors of all kinds": (
        [
            tensors(
                lambda found: found.update(
                    {
                        NORM: np.ones(5, np.float32),
                        "classifier.weight": np.ones((2, 2), np.float16),
                        "model.encoder.layer_norm.bias": np.ones(256, np.int8),
                    }
                )
            )
        ],
        [
            ("weights", f"tensor '{NORM}': shape [5], expected [256]"),
            ("weights", "tensor 'model.encoder.layer_norm.bias': dtype i8"),
            ("weights", "unknown tensor 'classifier.weight'"),
        ],
    ),
    "another width": (
        [edit("config.json", encoder_ffn_dim=64)],
        [
            ("weights", f"'model.encoder.layers.{layer}.{name}': shape")
            for layer in range(6)
            for name in ("fc1.weight", "fc1.bias", "fc2.weight")
        ],
    ),
    "the tokenizer cut": (
        [cut("sentencepiece.bpe.model", 5000)],
        [("tokenizer", "sentencepiece.bpe.model: is not a whole SentencePiece model")],
    ),
    "too few rows": (
        [tensors(lambda found: found.update({"model.shared.weight": found["model.shared.weight"][:8000].copy()}))],
        [("tokenizer", "the tokenizer has 8231 entries, the model's embedding only 8000 rows")],
    ),
    "another tokenizer": (
        [write("added_tokens.json", '{"eng_Latn": 5}')],
        [("tokenizer", "has id 5, expected id ")],
    ),
    "everything": (
        [
            write("config.json", "{}"),
            write("generation_config.json", "no"),
            write("model.safetensors", "no"),
            write("sentencepiece.bpe.model", "no"),
        ],
        [
            ("config", "generation_config.json: is not valid JSON"),
            ("config", "config.json: model_type is missing"),
            ("weights", "model.safetensors: is not a complete safetensors file"),
            ("tokenizer", "sentencepiece.bpe.model: is not a whole SentencePiece model"),
        ],
    ),
}

NO_ARCHITECTURE = ("no config", "config cut", "config is a list", "an adapter", "everything")
WRONG_TENSORS = ("tensors missing", "tensors of all kinds", "another width")
"""Damages after which the weights can be described."""


@pytest.mark.parametrize("name", DAMAGES)
def test_every_problem_is_listed_under_its_part(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damages, expected = DAMAGES[name]
    for damage in damages:
        damage(folder)
    report, problems = inspect(folder, capsys)
    assert [part for part, _ in problems] == [part for part, _ in expected], problems
    for (_, problem), (_, sentence) in zip(problems, expected, strict=True):
        assert sentence in problem
    # what is whole is shown, whatever else is broken
    broken = {part for part, _ in problems}
    read = {part for part in ("config", "weights", "languages", "parameters", "memory") if report[part] is not None}
    assert (report["architecture"] is not None) == (name not in NO_ARCHITECTURE)
    assert ("config" in read) == ("config" not in broken or name == "generation cut")
    assert ("weights" in read) == ("weights" not in broken or name in WRONG_TENSORS)
    assert ("languages" in read) == ("tokenizer" not in broken)
    assert report["family"] == ("NLLB-200" if "languages" in read else None)
    assert ("parameters" in read) == ("memory" in read) == ("config" in read and "weights" not in broken)
    assert (report["device"]["kind"], report["dtype"]) == ("host", "float32")
    assert [file["name"] for file in report["files"]] == sorted(path.name for path in folder.iterdir())


def test_a_model_that_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = inspect(folder, capsys, code=0)
    assert (report["family"], report["architecture"]) == ("NLLB-200", "m2m_100")
    assert report["weights"] == {
        "files": ["model.safetensors"],
        "bytes": (DEMO / "model.safetensors").stat().st_size,
        "tensors": 179,
        "dtypes": {"bfloat16": {"tensors": 179, "values": 10_797_312}},
    }
    assert report["memory"]["fits"] is True
    assert report["values"] is None
    assert report["config"]["generation"]["max_length"] == 200  # as generation_config.json has it
    assert len(report["languages"]) == 202
    assert {file["use"] for file in report["files"]} == {"config", "weights", "tokenizer"}


def test_the_page_has_every_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").touch()
    tensors(lambda found: found.update({NORM: np.full(256, np.nan, np.float32)}))(folder)
    report, _ = inspect(folder, capsys, "--check-values")
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text("utf-8")
    table = page.split("## inspect")[1].split("\n## ")[0]
    nested = [report["problems"][0], report["weights"], report["values"], report["values"]["non_finite"][0]]
    nested += [report["vocabulary"], report["device"], report["memory"], report["files"][0]]
    for name in {*report, *(name for part in nested for name in part)}:
        assert f"`{name}`" in table, name


def test_what_loads_is_what_inspect_finds_no_fault_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"max_batch": 1, "max_source_len": 8, "max_new_tokens": 4}
    inspect(folder, capsys, code=0)
    metrale.load(folder, "host", **small).close()
    edit("config.json", decoder_layers=4)(folder)
    _, problems = inspect(folder, capsys)
    with pytest.raises(metrale.CheckpointError) as refused:
        metrale.load(folder, "host", **small)
    assert refused.value.problems == [problem for _, problem in problems]


def test_dtypes_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(found: dict[str, Any]) -> None:
        found[NORM] = found[NORM].astype(np.float32)
        found["model.encoder.layer_norm.bias"] = found["model.encoder.layer_norm.bias"].astype(np.float16)

    tensors(change)(folder)
    report, _ = inspect(folder, capsys, code=0)
    assert report["stored_dtypes"] == ["bfloat16", "float16", "float32"]
    assert report["weights"]["dtypes"] == {
        "bfloat16": {"tensors": 177, "values": 10_796_800},
        "float16": {"tensors": 1, "values": 256},
        "float32": {"tensors": 1, "values": 256},
    }


def test_files_that_are_not_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.fp16.safetensors", "README.md"):
        (folder / name).write_bytes(b"12345")
    (folder / "onnx").mkdir()
    (folder / "broken").symlink_to("nowhere")
    report, _ = inspect(folder, capsys, code=0)
    taken = "model.safetensors is taken"
    assert [file for file in report["files"] if file["use"] is None] == [
        {"name": "README.md", "bytes": 5, "use": None, "note": None},
        {"name": "broken", "bytes": None, "use": None, "note": None},
        {"name": "model.fp16.safetensors", "bytes": 5, "use": None, "note": taken},
        {"name": "onnx/", "bytes": None, "use": None, "note": None},
        {"name": "pytorch_model-00001-of-00002.bin", "bytes": 5, "use": None, "note": taken},
        {"name": "pytorch_model.bin", "bytes": 5, "use": None, "note": taken},
    ]
    main(["inspect", "--model", str(folder)])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("not used:"))
    assert "README.md (0.0 KiB), broken, model.fp16.safetensors (0.0 KiB; model.safetensors is taken), onnx/" in line


def test_shards_and_their_index_are_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load_file(folder / "model.safetensors")
    names = sorted(found)
    placed: dict[str, str] = {}
    for number, part in enumerate((names[:90], names[90:]), 1):
        shard = f"model-{number}.safetensors"
        save_file({name: found[name] for name in part}, folder / shard)
        placed |= dict.fromkeys(part, shard)
    index = "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"weight_map": placed}))
    (folder / "model.safetensors").unlink()
    report, _ = inspect(folder, capsys, code=0)
    assert report["weights"]["files"] == [index, "model-1.safetensors", "model-2.safetensors"]
    assert report["weights"]["bytes"] == sum((folder / name).stat().st_size for name in report["weights"]["files"])
    assert not [file["name"] for file in report["files"] if file["use"] is None]
    (folder / "model-2.safetensors").write_bytes(b"")
    report, problems = inspect(folder, capsys)
    assert problems == [("weights", '"model-2.safetensors": is an empty file, expected safetensors data')]
    assert [file["use"] for file in report["files"] if "model-" in file["name"]] == ["weights", "weights"]
    (folder / index).write_text("{")
    _, problems = inspect(folder, capsys)
    assert [part for part, _ in problems] == ["weights"]


def test_the_vocabulary_of_m2m_100(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named by its file also when there is no tokenizer that can be used."""
    (folder / "vocab.json").write_bytes(b"no JSON")
    (folder / "sentencepiece.bpe.model").unlink()
    main(["inspect", "--model", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["family"] == "M2M-100"


@pytest.mark.parametrize(
    ("codes", "expected"), [(("en", "fr", "zh"), "M2M-100"), (("eng_Latn", "fra_Latn"), "NLLB-200")]
)
def test_the_family_is_told_by_language_codes(codes: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").touch()  # beside a tokenizer that can be used, its codes decide
    tokenizer: Any = SimpleNamespace(languages=codes)
    assert family(tokenizer, tmp_path) == expected


def test_languages_are_listed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DEMO), "--languages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  fra_Latn  French" in lines
    assert len([line for line in lines if line.startswith("  ")]) == 202
    assert main(["inspect", str(DEMO)]) == 0
    assert not any(line.startswith("  ") for line in capsys.readouterr().out.splitlines())


def test_a_folder_is_named_in_one_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(folder)
    assert main(["inspect", str(folder), "--model", str(folder)]) == 2
    assert "--model: expected none when a DIR is given" in capsys.readouterr().err


class Small(HostBackend):
    """A GPU with little free memory, whose blocks have few threads."""

    def kind(self) -> Any:
        return "cuda"

    def name(self) -> str:
        return "a small GPU"

    def free_memory(self) -> int:
        return 1 << 20

    def limits(self) -> Limits:
        return replace(super().limits(), compute_capability=(9, 0), max_grid=(64, 64, 64))


def test_memory_that_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metrale.factory.open_backend", lambda name: Small())
    report, problems = inspect(folder, capsys, "--max-batch", "4")
    assert [part for part, _ in problems] == ["memory", "memory"]
    assert problems[0][1].startswith(f"the model needs {report['memory']['total']:,} bytes (weights ")
    assert "1,048,576 are free on a small GPU" in problems[0][1]
    assert "is too large here" in problems[1][1]
    assert report["memory"]["fits"] is False
    assert report["device"]["free_bytes"] == 1 << 20
    main(["inspect", str(folder)])
    assert "; 1.0 MiB are free" in capsys.readouterr().out


def test_a_device_that_cannot_be_opened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("generation_config.json", "no")(folder)
    assert main(["inspect", "--json", "--device", "cuda:99", str(folder)]) == 3
    report = json.loads(capsys.readouterr().out)
    assert [problem["part"] for problem in report["problems"]] == ["config", "device"]
    assert "cuda" in report["problems"][1]["problem"]
    assert report["device"] is report["memory"] is report["dtype"] is None
    assert report["parameters"] == 10_797_312
    assert main(["inspect", "--device", "cuda:99", str(folder)]) == 3
    assert "device:      unknown" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["not there", "a file"])
def test_what_is_no_folder_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").touch()
    assert main(["inspect", "--json", str(tmp_path / text)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("metrale: error: ")


def test_a_name_with_a_line_break_stays_on_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "two\nlines").touch()
    assert main(["inspect", str(folder)]) == 0
    assert "two lines (0.0 KiB)" in capsys.readouterr().out
