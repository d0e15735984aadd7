# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights in several files, with an index that says which tensor is in which: one form of it for every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from metrale.checkpoint.json_fields import shown
from metrale.checkpoint.json_file import read_json_object
from metrale.checkpoint.tensor import TensorFile
from metrale.errors import CheckpointError


def open_shards(folder: Path, index: str, open_file: Callable[[Path], TensorFile]) -> list[TensorFile]:
    """Open every file that an index names.

    Raises
    ------
    CheckpointError
        When the index cannot be read, names a file outside the folder, or disagrees with the files about the tensors
        that they hold, or a file cannot be opened. Every reason is listed.
    """
    wanted = _read_index(folder / index)
    files: list[TensorFile] = []
    problems: list[str] = []
    for shard, names in wanted.items():
        try:
            file = open_file(folder / shard)
        except CheckpointError as error:
            problems += [f"{shown(shard)}: {problem}" for problem in error.problems]
            continue
        files.append(file)
        problems += [f"{index} places {name!r} in {shown(shard)}, which lacks it" for name in names - set(file.tensors)]
        problems += [
            f"{shown(shard)} holds {name!r}, which {index} does not place there" for name in set(file.tensors) - names
        ]
    if problems:
        for file in files:
            file.close()
        raise CheckpointError(folder, sorted(problems))
    return files


def _read_index(path: Path) -> dict[str, set[str]]:
    """Return the tensor names that the index places in each shard."""
    placed = read_json_object(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(path, "weight_map: expected an object that names the file of each tensor")
    wanted: dict[str, set[str]] = {}
    problems: set[str] = set()
    for name, shard in placed.items():
        if isinstance(shard, str) and _stays_inside(shard):
            wanted.setdefault(shard, set()).add(name)
        else:
            problems.add(f"weight_map: {shown(shard)} is not the name of a file inside the folder")
    if problems:
        raise CheckpointError(path, sorted(problems))
    return wanted


def _stays_inside(shard: str) -> bool:
    # Judged by the name alone: download caches keep the files themselves elsewhere, behind symbolic links.
    # A backslash or a colon would mean a folder or a drive on Windows.
    pure = PurePosixPath(shard)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and not set(shard) & set("\\:\0")
