# SPDX-License-Identifier: MIT OR Apache-2.0
"""The files that a checkpoint's tensors are stored in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors.numpy import save_file

Tensors = Mapping[str, npt.NDArray[Any]]
SHARDS = 3


def _shards(folder: Path, tensors: Tensors, stem: str, suffix: str, write: Callable[[Tensors, Path], None]) -> None:
    """Deal the tensors out to `SHARDS` files, and write the index that says which has which."""
    names = list(tensors)
    placed: dict[str, str] = {}
    for at in range(SHARDS):
        file = f"{stem}-{at + 1:05}-of-{SHARDS:05}{suffix}"
        part = {name: tensors[name] for name in names[at::SHARDS]}
        write(part, folder / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": placed}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")


def _safetensors(tensors: Tensors, path: Path) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})


def _one(folder: Path, tensors: Tensors) -> None:
    _safetensors(tensors, folder / "model.safetensors")


def _several(folder: Path, tensors: Tensors) -> None:
    _shards(folder, tensors, "model", ".safetensors", _safetensors)


FORMS: dict[str, Callable[[Path, Tensors], None]] = {
    "safetensors": _one,
    "safetensors, sharded": _several,
}


def write_weights(folder: Path, tensors: Tensors, form: str) -> None:
    """Write the tensors in one of `FORMS`."""
    FORMS[form](folder, tensors)
