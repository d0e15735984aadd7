# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of a checkpoint written as safetensors: how they are put into files, and what the library makes of these."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from metrale.checkpoint import FLOAT_DTYPES, TensorInfo, open_checkpoint, plan_shards, save_shards
from metrale.errors import CheckpointError

SIZES = {"a": 40, "b": 60, "c": 100, "d": 100, "e": 4, "f": 0}


def planned(shard_bytes: int) -> list[str]:
    """Return the names in each file; sizes are bytes, in float16."""
    infos = [TensorInfo(name, (size // 2,), "f16") for name, size in SIZES.items()]
    return ["".join(tensor.name for tensor in shard.tensors) for shard in plan_shards(infos, None, shard_bytes)]


@pytest.mark.parametrize(
    ("shard_bytes", "expected"),
    [
        (1000, ["abcdef"]),
        (304, ["abcdef"]),
        (303, ["abcd", "ef"]),
        (200, ["abc", "def"]),
        (199, ["ab", "c", "def"]),
        (100, ["ab", "c", "d", "ef"]),
        (99, ["a", "b", "c", "d", "ef"]),
        (1, ["a", "b", "c", "d", "e", "f"]),
    ],
)
def test_files_are_filled_in_order_up_to_the_last_byte(shard_bytes: int, expected: list[str]) -> None:
    assert planned(shard_bytes) == expected


def test_sizes_are_those_of_what_is_stored() -> None:
    infos = [TensorInfo(name, (10,), "f32") for name in "abcd"]
    assert [shard.nbytes for shard in plan_shards(infos, "f16", 40)] == [40, 40]
    assert [shard.nbytes for shard in plan_shards(infos, None, 40)] == [40] * 4
    assert [shard.name for shard in plan_shards(infos, "bf16", 80)] == ["model.safetensors"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [shard.name for shard in plan_shards(infos, "f16", 40)] == names


def test_wide_elements_come_first() -> None:
    """An odd number of short ones would leave the wide ones behind them at odd places."""
    infos = [TensorInfo(f"{dtype}{index}", (3,), dtype) for index in (0, 1) for dtype in ("bf16", "f64", "f16", "f32")]
    (shard,) = plan_shards(infos, None, 1000)
    assert [tensor.name for tensor in shard.tensors] == [
        "f640",
        "f641",
        "f320",
        "f321",
        "bf160",
        "f160",
        "bf161",
        "f161",
    ]
    at = 0
    for tensor in shard.tensors:
        size = FLOAT_DTYPES[tensor.dtype].itemsize
        assert at % size == 0
        at += 3 * size


def test_two_files_and_their_index(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    arrays = {f"t{index}": random.standard_normal((5, 3)).astype(np.float32) for index in range(4)}
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    target = tmp_path / "target"
    target.mkdir()
    counts: list[int] = []
    with open_checkpoint(tmp_path) as checkpoint:
        infos = [checkpoint.tensors[name] for name in arrays]
        shards = plan_shards(infos, None, 130)
        save_shards(checkpoint, shards, target, counts.append)
    assert sum(counts) == 4 * 60 + 4
    first, second = (load_file(target / f"model-0000{number}-of-00002.safetensors") for number in (1, 2))
    assert (sorted(first), sorted(second)) == (["t0", "t1"], ["empty", "scalar", "t2", "t3"])
    for name, array in (first | second).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 60 + 4}
    with open_checkpoint(target) as checkpoint:  # which holds the index against the files
        assert set(checkpoint.tensors) == set(arrays)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        shards = plan_shards(checkpoint.tensors.values(), None, 100)
        with pytest.raises(FileExistsError):
            save_shards(checkpoint, shards, tmp_path, lambda count: None)


def test_a_value_that_does_not_fit(tmp_path: Path) -> None:
    save_file({"a": np.full(3, 1e6, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "target").mkdir()
    with open_checkpoint(tmp_path) as checkpoint:
        shards = plan_shards(checkpoint.tensors.values(), "f16", 100)
        with pytest.raises(CheckpointError, match="'a': 3 finite values do not fit"):
            save_shards(checkpoint, shards, tmp_path / "target", lambda count: None)
