# SPDX-License-Identifier: MIT OR Apache-2.0
"""The files that a checkpoint's tensors are stored in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save_file

from tests.checkpoint.torch_files import write_bin, write_bin_shards

Tensors = Mapping[str, npt.NDArray[Any]]
SHARDS = 3


def _safetensors(tensors: Tensors, path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


def _one(folder: Path, tensors: Tensors) -> None:
    _safetensors(tensors, folder / "model.safetensors")


def _several(folder: Path, tensors: Tensors) -> None:
    names = list(tensors)
    placed: dict[str, str] = {}
    for at in range(SHARDS):
        file = f"model-{at + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: tensors[name] for name in names[at::SHARDS]}
        _safetensors(part, folder / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _bin(folder: Path, tensors: Tensors) -> None:
    write_bin(folder / "pytorch_model.bin", tensors)


def _bins(folder: Path, tensors: Tensors) -> None:
    write_bin_shards(folder, tensors, SHARDS)


FORMS: dict[str, Callable[[Path, Tensors], None]] = {
    "safetensors": _one,
    "safetensors, sharded": _several,
    "bin": _bin,
    "bin, sharded": _bins,
}


def write_weights(folder: Path, tensors: Tensors, form: str) -> None:
    """Write the tensors in one of `FORMS`."""
    FORMS[form](folder, tensors)
