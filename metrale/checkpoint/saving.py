# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of a checkpoint written as safetensors, chunk by chunk: nothing but a chunk of them is in memory.

The ``safetensors`` library writes a file from tensors that are in memory as a whole, so the header is written here:
eight bytes with its length, and JSON with each tensor's place.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from metrale.checkpoint.convert import convert
from metrale.checkpoint.folder import Checkpoint
from metrale.checkpoint.safetensors_file import INDEX, SINGLE
from metrale.checkpoint.tensor import FLOAT_DTYPES, TensorInfo

CHUNK_BYTES: Final = 16 << 20
_ALIGNMENT: Final = 8
_METADATA: Final = {"format": "pt"}  # transformers asks for it


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write: its name, and its tensors as they will be stored, in order."""

    name: str
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return sum(map(stored_bytes, self.tensors))


def stored_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of a tensor's elements."""
    return math.prod(tensor.shape) * FLOAT_DTYPES[tensor.dtype].itemsize


def plan_shards(tensors: Iterable[TensorInfo], dtype: str | None, shard_bytes: int) -> list[Shard]:
    """Return the files that tensors are to be written to, in order; one that is larger than a shard has its own.

    Parameters
    ----------
    tensors : iterable of TensorInfo
        Of readable dtypes.
    dtype : {"f32", "f16", "bf16"} or None
        How they will be stored; None is as they are.
    shard_bytes : int
        Most bytes of elements in a file of several tensors.
    """
    groups: list[list[TensorInfo]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        stored = TensorInfo(tensor.name, tensor.shape, dtype or tensor.dtype)
        size = stored_bytes(stored)
        if groups[-1] and size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(stored)
        room -= size
    if len(groups) == 1:
        return [Shard(SINGLE, _aligned(groups[0]))]
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return [Shard(name, _aligned(group)) for name, group in zip(names, groups, strict=True)]


def _aligned(tensors: list[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Put wide elements first, so that each begins at a multiple of its size."""
    return tuple(sorted(tensors, key=lambda tensor: -FLOAT_DTYPES[tensor.dtype].itemsize))


def save_shards(checkpoint: Checkpoint, shards: Sequence[Shard], folder: Path, advance: Callable[[int], None]) -> None:
    """Write files, and their index if they are several. They are on the disk itself on return.

    Parameters
    ----------
    checkpoint : Checkpoint
        Has the tensors, by the names that they are stored under.
    shards : sequence of Shard
        As `plan_shards` returns them.
    folder : Path
        An empty one.
    advance : callable
        Called after each chunk with the bytes that were written; what it raises ends the writing.

    Raises
    ------
    CheckpointError
        When a tensor cannot be read, or a value does not fit its dtype.
    OSError
        When a file cannot be written.
    """
    for shard in shards:
        with (folder / shard.name).open("xb", buffering=0) as file:
            _write_all(file, memoryview(_header(shard.tensors)))
            for tensor in shard.tensors:
                for _, rows in checkpoint.iter_chunks(tensor.name, CHUNK_BYTES):
                    values = rows
                    if rows.dtype != FLOAT_DTYPES[tensor.dtype]:
                        values = convert(rows, tensor.dtype, name=tensor.name, path=checkpoint.path)
                    data = values.reshape(-1).view(np.uint8).data
                    _write_all(file, data)
                    advance(len(data))
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": {tensor.name: shard.name for shard in shards for tensor in shard.tensors},
        }
        with (folder / INDEX).open("xb", buffering=0) as file:
            _write_all(file, memoryview(f"{json.dumps(index, indent=2)}\n".encode()))
            os.fsync(file.fileno())


def _header(tensors: Sequence[TensorInfo]) -> bytes:
    header: dict[str, Any] = {"__metadata__": _METADATA}
    end = 0
    for tensor in tensors:
        start, end = end, end + stored_bytes(tensor)
        header[tensor.name] = {
            "dtype": tensor.dtype.upper(),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
