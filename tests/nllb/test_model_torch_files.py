# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model of ``pytorch_model.bin`` translates as the one of safetensors does, however its tensors are stored."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import metrale
from metrale.nllb.weights import EMBEDDING, TIED_NAMES
from tests.checkpoint.torch_files import Storage, Tensor, view, write_bin, write_bin_shards
from tests.nllb.decoding import DEMO, GOLDEN, greedy_together

Arrays = dict[str, NDArray[Any]]


def single(folder: Path, arrays: Arrays) -> None:
    """As it is, with the tied matrices and what transformers leaves aside, as the official files have them."""
    shared = view(arrays[EMBEDDING])
    tied = dict.fromkeys(TIED_NAMES, shared)
    positions = {"model.encoder.embed_positions.weights": np.zeros((5, 256), np.float32)}
    write_bin(folder / "pytorch_model.bin", {**arrays, **tied, **positions, "epoch": 7})


def sharded(folder: Path, arrays: Arrays) -> None:
    write_bin_shards(folder, arrays, 3)


def in_one_storage(folder: Path, arrays: Arrays) -> None:
    """Every tensor is a part of one storage, every other matrix with its columns one after another."""
    parts, tensors = [], {}
    storage = Storage(np.concatenate([array.reshape(-1) for array in arrays.values()]))
    at = 0
    for index, (name, array) in enumerate(arrays.items()):
        strides = (1, array.shape[0]) if array.ndim == 2 and index % 2 else view(array).strides
        parts.append((array.T if array.ndim == 2 and index % 2 else array).reshape(-1))
        tensors[name] = Tensor(storage, array.shape, strides, at)
        at += array.size
    storage.values[...] = np.concatenate(parts)
    write_bin(folder / "pytorch_model.bin", tensors, metadata=False)


def in_float64(folder: Path, arrays: Arrays) -> None:
    write_bin(folder / "pytorch_model.bin", {name: array.astype(np.float64) for name, array in arrays.items()})


@pytest.mark.parametrize("write", [single, sharded, in_one_storage, in_float64])
def test_the_golden_ids(tmp_path: Path, write: Callable[[Path, Arrays], None]) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    write(tmp_path, load_file(DEMO / "model.safetensors"))
    cases = GOLDEN[:16]
    with metrale.load(tmp_path, "host", "float32", max_batch=16, max_source_len=64, max_new_tokens=64) as model:
        assert greedy_together(model, cases) == [case.ids for case in cases]
