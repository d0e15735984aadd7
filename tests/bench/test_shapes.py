# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random checkpoints: complete, readable by everybody, the same each time, and of the real models' sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.ctranslate2_model import mapped
from metrale.bench import shapes
from metrale.bench.shapes import LAST_NORM, SHAPES, parameters, split, tensors, write_checkpoint
from metrale.checkpoint import open_checkpoint
from metrale.nllb.config import NllbConfig
from metrale.nllb.weights import match_weights

TINY = SHAPES["tiny"]


@pytest.mark.parametrize(
    ("name", "millions"), [("600M", 615), ("1.3B", 1371), ("3.3B", 3345), ("418M", 484), ("1.2B", 1239)]
)
def test_sizes_are_those_of_the_published_models(name: str, millions: int) -> None:
    """NLLB-200's and M2M-100's: the published files hold this many, to the million, the tied matrix counted once."""
    assert round(parameters(SHAPES[name]) / 1e6) == millions


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_of_several_shards_is_complete(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "SHARD_BYTES", 100_000)
    size = write_checkpoint(tmp_path, TINY, dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    config = NllbConfig.from_dir(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        found = match_weights(config, checkpoint)
        assert dict(found.shapes) == tensors(TINY)
        stored = {name: checkpoint.read_rows(name, 0, shape[0]) for name, shape in found.shapes.items()}
    assert sum(values.nbytes for values in stored.values()) == size
    for name, values in stored.items():
        exact = values.astype(np.float64)
        centre = 1.0 if name.endswith("norm.weight") and name != LAST_NORM else 0.0
        deviation = 1.0 if name == LAST_NORM else shapes.DEVIATION
        # The mean of n values has a deviation of 1/sqrt(n): five of them are met once in two million draws.
        assert abs(exact.mean() - centre) < 5 * deviation / math.sqrt(exact.size), name
        assert abs(exact.std() / deviation - 1) < 5 / math.sqrt(2 * exact.size) + 0.01, name  # 0.01: bfloat16 near 1
    for name, values in mapped(tmp_path).items():
        assert values.dtype == stored[name].dtype
        assert values.tobytes() == stored[name].tobytes()


def test_tensors_and_rows_differ_and_each_writing_is_the_same(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_checkpoint(tmp_path / folder, TINY, "float16")
    first, second = (mapped(tmp_path / folder) for folder in ("a", "b"))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    assert len({values.tobytes() for values in first.values()}) == len(first)
    embedding = first["model.shared.weight"]
    assert len(np.unique(embedding.view(np.uint16), axis=0)) == len(embedding)


def test_values_go_round_the_pool(tmp_path: Path) -> None:
    pool = np.arange(7, dtype=np.uint16)
    with (tmp_path / "values").open("wb", buffering=0) as file:
        shapes._write_values(file, pool, 17, 5)
    assert np.fromfile(tmp_path / "values", dtype=np.uint16).tolist() == [(5 + i) % 7 for i in range(17)]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHARD_BYTES", 100)
    given = {"a": (10,), "b": (500,), "c": (20,), "d": (20,), "e": (20,)}
    assert [list(shard) for shard in split(given, 2)] == [["a"], ["b"], ["c", "d"], ["e"]]


def test_checkpoints_go_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes.work_folder(["tiny"], "float16", tmp_path) == tmp_path
    usage = type("Usage", (), {"free": 13e9})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/disk")
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert shapes.work_folder(["600M"], "float16", None) == Path("/dev/shm")
    assert shapes.work_folder(["600M", "3.3B"], "float16", None) == Path("/disk")
