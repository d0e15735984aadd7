# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale convert``: what is written is what was read, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from metrale.checkpoint import FLOAT_DTYPES, convert, open_checkpoint
from metrale.cli import main
from metrale.cli.console import Console
from metrale.nllb.weights import EMBEDDING, TIED_NAMES
from tests.checkpoint.torch_files import Storage, Tensor, view, write_bin, write_sparse_bin
from tests.cli.process import ROOT
from tests.reference.tiny import tensor_shapes, tiny_config, tiny_tensors, write_tiny

Arrays = dict[str, NDArray[Any]]
OTHERS = ("README.md", "LICENSE", "sentencepiece.bpe.model", "tokenizer_config.json", "chat_template.jinja")
NOT_COPIED = ("pytorch_model.bin", "flax_model.msgpack", ".cache.json", "pytorch_model.bin.index.json", "run.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny checkpoint with files beside its weights."""
    folder = write_tiny(tmp_path / "source", 5)
    for name in (*OTHERS, *NOT_COPIED):
        (folder / name).write_text(f"contents of {name}")
    (folder / "onnx").mkdir()
    return folder


def make_bin(folder: Path, tensors: dict[str, Any] | None = None) -> Arrays:
    """Turn a tiny checkpoint into one of PyTorch's form; return its tensors."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_bin(folder / "pytorch_model.bin", tensors or arrays)
    return arrays


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def read(folder: Path) -> Arrays:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read_rows(name, 0, info.rows) for name, info in checkpoint.tensors.items()}


def beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_every_tensor_and_file_is_there(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = make_bin(source)
    target = tmp_path / "target"
    assert run(source, target) == 0
    out, err = capsys.readouterr()
    assert (
        out
        == f"{target}: {len(arrays)} tensors as float32, {sum(a.nbytes for a in arrays.values()):,} bytes in 1 file\n"
    )
    assert err == ""
    copied = {"config.json", "generation_config.json", *OTHERS}
    assert {path.name for path in target.iterdir()} == {"model.safetensors", *copied}
    for name in copied:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    written = load_file(target / "model.safetensors")
    assert written.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array, strict=True)
    with safe_open(target / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert beside(target) == ["source", "target"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float64"])
def test_another_element_type(tmp_path: Path, stored: str, dtype: str) -> None:
    folder = write_tiny(tmp_path / "source", 5)
    arrays: Arrays = tiny_tensors(5, tiny_config())
    given = {
        name: array.astype(str(FLOAT_DTYPES["bf16"]) if stored == "bfloat16" else stored)
        for name, array in arrays.items()
    }
    (folder / "model.safetensors").unlink()
    write_bin(folder / "pytorch_model.bin", given)
    target = tmp_path / "target"
    assert run(folder, target, "--dtype", dtype) == 0
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    written = read(target)
    for name, array in given.items():
        assert written[name].tobytes() == convert(array, short).tobytes()
        assert written[name].dtype == FLOAT_DTYPES[short]
    config = json.loads((folder / "config.json").read_text())
    expected = config | {key: dtype for key in ("dtype", "torch_dtype") if key in config or key == "dtype"}
    assert json.loads((target / "config.json").read_text()) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "float16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "float16", "torch_dtype": "float16"}),
        ({}, {"dtype": "float16"}),
    ],
)
def test_the_configuration_says_the_element_type(
    tmp_path: Path, source: Path, keys: dict[str, str], expected: dict[str, str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(config | keys))
    assert run(source, tmp_path / "half", "--dtype", "float16") == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == config | expected
    assert run(source, tmp_path / "kept") == 0
    assert json.loads((tmp_path / "kept" / "config.json").read_text()) == config | keys


def test_tensors_of_several_types_stay_what_they_are(tmp_path: Path, source: Path) -> None:
    arrays = {
        name: array.astype(FLOAT_DTYPES[list(FLOAT_DTYPES)[index % len(FLOAT_DTYPES)]])
        for index, (name, array) in enumerate(tiny_tensors(5, tiny_config()).items())
    }
    make_bin(source, arrays)
    assert run(source, tmp_path / "target") == 0
    written = read(tmp_path / "target")
    for name, array in arrays.items():
        assert (written[name].dtype, written[name].tobytes()) == (array.dtype, array.tobytes())
    header = places(tmp_path / "target" / "model.safetensors")
    for name, (start, _) in header.items():
        assert start % arrays[name].itemsize == 0


def places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the file has each tensor, behind its header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    return {name: tuple(entry["data_offsets"]) for name, entry in header.items()}


def test_tied_matrices_are_stored_once(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = make_bin(source)
    shared = view(arrays[EMBEDDING])
    write_bin(
        source / "pytorch_model.bin", {**arrays, **dict.fromkeys(TIED_NAMES, shared), "final_logits_bias": np.zeros(3)}
    )
    assert run(source, tmp_path / "target", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == sorted({"final_logits_bias", *TIED_NAMES} - {EMBEDDING})
    assert read(tmp_path / "target").keys() == arrays.keys()


@pytest.mark.parametrize("size", [1, 4000, 20_000, 10**9])
def test_shards(tmp_path: Path, source: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, target = load_file(source / "model.safetensors"), tmp_path / "target"
    assert run(source, target, "--shard-size", size, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert report["weights"] == files
    assert (report["tensors"], report["bytes"]) == (len(arrays), sum(array.nbytes for array in arrays.values()))
    assert report["stored_dtypes"] == ["float32"]
    if size == 10**9:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": report["bytes"]}
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert index["weight_map"].keys() == arrays.keys()
        sizes = [sum(array.nbytes for array in load_file(target / name).values()) for name in files]
        assert all(sizes)
        assert all(total <= size or len(places(target / name)) == 1 for total, name in zip(sizes, files, strict=True))
        assert all(one + two > size for one, two in pairwise(sizes))
    written = read(target)
    for name, array in arrays.items():
        assert written[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("7B", 7), ("2KB", 2000), ("3 mb", 3_000_000), ("2GiB", 2 << 30), ("1TB", 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    from metrale.cli.convert import _size

    assert _size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5XB", "1.5GB", "GB", "0GB", "9" * 16])
def test_what_is_no_size(tmp_path: Path, source: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, tmp_path / "target", f"--shard-size={text}") == 2
    assert "--shard-size: expected a size above 0" in capsys.readouterr().err
    assert beside(source) == ["source"]


def test_a_value_that_does_not_fit(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = make_bin(source)
    arrays["model.encoder.layer_norm.weight"][3] = 1e6
    write_bin(source / "pytorch_model.bin", arrays)
    assert run(source, tmp_path / "target", "--dtype", "float16") == 3
    message = "tensor 'model.encoder.layer_norm.weight': 1 finite values do not fit in f16 (the largest is 1e+06)"
    assert message in capsys.readouterr().err
    assert beside(source) == ["source"]


def test_a_target_that_is_there(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = beside(source)
    for name in ("full", "file", "link", "dangling", "source", "missing/target", "file/target"):
        assert run(source, tmp_path / name) == 2
    assert run(source, "") == 2
    errors = capsys.readouterr().err
    assert "full has files in it" in errors
    for name in ("file", "link", "dangling"):
        assert f"DST: expected a new folder, {tmp_path / name} is none" in errors
    assert "DST: expected a new folder, got ''" in errors
    assert beside(source) == before
    (tmp_path / "empty").mkdir()
    assert run(source, f"{tmp_path}/empty/", "--quiet") == 0
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert capsys.readouterr() == ("", "")


def test_a_model_that_is_none(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = make_bin(source)
    arrays.pop("model.encoder.layer_norm.weight")
    write_bin(source / "pytorch_model.bin", arrays)
    assert run(source, tmp_path / "target") == 3
    assert "missing tensor 'model.encoder.layer_norm.weight'" in capsys.readouterr().err
    assert run(tmp_path / "none", tmp_path / "target") == 3
    assert beside(source) == ["source"]


def test_a_disk_that_is_too_small(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = sum(array.nbytes for array in load_file(source / "model.safetensors").values())
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert run(source, tmp_path / "target") == 2
    assert f"bytes, and {needed:,} are free there" in capsys.readouterr().err
    assert beside(source) == ["source"]
    free.free = needed + sum(path.stat().st_size for path in source.iterdir())
    assert run(source, tmp_path / "target") == 2  # all but the folder's own blocks
    free.free += 1 << 20
    assert run(source, tmp_path / "target") == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_nothing_is_left(
    tmp_path: Path,
    source: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(number, signal.default_int_handler)  # a runner in the background may ignore it
    seen: list[str] = []

    def advance(self: Console, count: int = 1) -> None:
        if not seen:
            seen.extend(beside(source))
            os.kill(os.getpid(), number)
            time.sleep(0.2)  # the signal is handed to a thread

    monkeypatch.setattr(Console, "advance", advance)
    try:
        assert run(source, tmp_path / "target") == 128 + number
    finally:
        signal.signal(number, before)
    assert [name.split(".")[1] for name in seen if name != "source"] == ["target"]  # hidden, and not yet itself
    assert f"interrupted; {tmp_path / 'target'} was not written" in capsys.readouterr().err
    assert beside(source) == ["source"]


def test_somebody_else_makes_the_target(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def advance(self: Console, count: int = 1) -> None:
        (tmp_path / "target").mkdir(exist_ok=True)
        (tmp_path / "target" / "theirs").touch()

    monkeypatch.setattr(Console, "advance", advance)
    assert run(source, tmp_path / "target") == 2
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["theirs"]
    assert beside(source) == ["source", "target"]
    assert "target" in capsys.readouterr().err


def test_a_bar_of_bytes(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[object, ...]] = []
    counts: list[int] = []
    monkeypatch.setattr(Console, "can_draw", True)
    monkeypatch.setattr(Console, "draw", lambda self, *arguments: drawn.append(arguments))
    monkeypatch.setattr(Console, "advance", lambda self, count=1: counts.append(count))
    total = sum(array.nbytes for array in load_file(source / "model.safetensors").values())
    assert run(source, tmp_path / "target") == 0
    assert drawn == [(total, 0, "B")]
    assert sum(counts) == total
    assert run(source, tmp_path / "again", "--no-progress") == 0
    assert len(drawn) == 1


CHILD = """
import resource, sys
from metrale.cli import main

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(["convert", *sys.argv[2:]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is limited by Linux's RLIMIT_DATA")
@pytest.mark.parametrize("limit", [100 << 20, 20 << 20])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, limit: int) -> None:
    """An embedding of 300 MiB, nearly all of it a hole in the file; a limit below a few chunks is noticed."""
    rows, width = 76_800, 1024
    overrides = {"d_model": width, "vocab_size": rows, "encoder_layers": 1, "decoder_layers": 1}
    config = tiny_config(**overrides)
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = Storage(np.zeros(1, np.float32))
    tensors = {name: Tensor(one, shape, [0] * len(shape)) for name, shape in tensor_shapes(config)}
    hole = Storage(np.zeros(0, np.float32), claimed=rows * width)
    tensors[EMBEDDING] = Tensor(hole, (rows, width), (width, 1))
    write_sparse_bin(tmp_path / "pytorch_model.bin", tensors, hole)
    command = [sys.executable, "-c", CHILD, str(limit), str(tmp_path), str(tmp_path / "target"), "--dtype", "float16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    if limit == 20 << 20:
        assert (done.returncode, "out of memory" in done.stderr) == (3, True)
        assert not list(tmp_path.glob("*target*"))
        return
    assert done.returncode == 0, done.stderr
    with open_checkpoint(tmp_path / "target") as checkpoint:
        assert checkpoint.tensors[EMBEDDING].shape == (rows, width)
