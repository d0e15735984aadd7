# SPDX-License-Identifier: MIT OR Apache-2.0
"""A checkpoint folder: one safetensors file, or several with an index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.json_fields import shown
from metrale.checkpoint.json_file import read_json_object
from metrale.checkpoint.paths import require_folder
from metrale.checkpoint.safetensors_file import SafetensorsFile
from metrale.checkpoint.tensor import FLOAT_DTYPES, TensorInfo
from metrale.errors import CheckpointError, InvalidInput

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 64 << 20


Reader = Callable[[int, NDArray[Any]], None]
"""Reads elements from a place on: see `Checkpoint.reader`."""


class TensorFile(Protocol):
    """What a checkpoint asks of one of its files, whatever the format."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""

    def reader(self, name: str) -> Reader:
        """What `Checkpoint.reader` returns, without its checks."""

    def close(self) -> None:
        """Give the file back. Further calls do nothing."""


class Checkpoint:
    """The tensors of a checkpoint folder; a context manager. ``open_checkpoint`` makes one.

    Attributes
    ----------
    path : Path
        The folder.
    tensors : mapping of str to TensorInfo
        Every tensor by name.
    """

    def __init__(self, path: Path, files: list[TensorFile]) -> None:
        self.path = path
        self._files = files
        self._file_of = {name: file for file in files for name in file.tensors}
        self._closed = False
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: file.tensors[name] for name, file in self._file_of.items()}
        )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Arrays that were read stay valid; further calls do nothing."""
        self._closed = True
        for file in self._files:
            file.close()

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Copy rows ``[start, stop)`` of a tensor.

        Returns
        -------
        ndarray
            Shape ``(stop - start, *shape[1:])`` in the stored dtype (bfloat16 as ``ml_dtypes.bfloat16``), read-only.
            A scalar is one row and comes with shape ``()``.

        Raises
        ------
        InvalidInput
            When there is no such tensor, or the rows are not all in it.
        CheckpointError
            When the dtype cannot be read, or the checkpoint is closed.
        """
        info = self._readable(name)
        if not 0 <= start <= stop <= info.rows:
            raise InvalidInput("start, stop", f"0 <= start <= stop <= {info.rows} for {name!r}", f"{start}, {stop}")
        if not info.shape and start == stop:
            raise InvalidInput("start, stop", f"0, 1 for the scalar {name!r}", f"{start}, {stop}")
        rows: NDArray[Any] = np.empty((stop - start, *info.shape[1:]) if info.shape else (), FLOAT_DTYPES[info.dtype])
        self._file_of[name].reader(name)(start * info.row_elements, rows.reshape(-1))
        rows.setflags(write=False)
        return rows

    def reader(self, name: str) -> Reader:
        """Return what reads elements of a tensor, in C order, into an array that is there already.

        ``read(start, out)`` fills ``out``, one contiguous axis of the stored dtype, with elements ``start`` to
        ``start + len(out)``. Any thread may call it, also several at a time; the GIL is released while the file is
        read. It raises InvalidInput when the elements are not all in the tensor or ``out`` is another array, and
        CheckpointError when the file is not what it was any more, or the checkpoint is closed; what ``out`` holds then
        is unspecified.

        Raises
        ------
        InvalidInput
            When there is no such tensor.
        CheckpointError
            When the dtype cannot be read, or the checkpoint is closed.
        """
        info = self._readable(name)
        count, dtype, read = info.rows * info.row_elements, FLOAT_DTYPES[info.dtype], self._file_of[name].reader(name)

        def read_checked(start: int, out: NDArray[Any]) -> None:
            if not 0 <= start <= start + len(out) <= count:
                raise InvalidInput("start", f"a range inside the {count} elements of {name!r}", f"{start}, {len(out)}")
            if out.dtype != dtype or out.ndim != 1 or not out.flags.c_contiguous:
                raise InvalidInput("out", f"one contiguous axis of {dtype}", f"{out.dtype} {out.shape}")
            read(start, out)

        return read_checked

    def iter_chunks(self, name: str, max_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield a tensor as ``(first_row, rows)``, in order, each chunk of at most ``max_bytes`` or of one row.

        Nothing but the chunk is in anonymous memory. A ``for`` loop still holds its last chunk while the next one is
        read, so two are alive for a moment.

        Raises
        ------
        InvalidInput, CheckpointError
            As ``read_rows``; raised by the first step.
        """
        if max_bytes <= 0:
            raise InvalidInput("max_bytes", "a positive number of bytes", max_bytes)
        info = self._readable(name)
        row_bytes = max(1, info.row_elements * FLOAT_DTYPES[info.dtype].itemsize)
        step = max(1, max_bytes // row_bytes)
        for start in range(0, info.rows, step):
            yield start, self.read_rows(name, start, min(start + step, info.rows))

    def _readable(self, name: str) -> TensorInfo:
        if self._closed:
            raise CheckpointError(self.path, "the checkpoint is closed")
        info = self.tensors.get(name)
        if info is None:
            raise InvalidInput("name", "a tensor of this checkpoint", name)
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                self.path, f"tensor {name!r} has dtype {info.dtype}; only {', '.join(FLOAT_DTYPES)} are read"
            )
        return info


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder: ``model.safetensors``, or shards with ``model.safetensors.index.json``.

    With both, the single file is taken, as transformers does. An index must name exactly the tensors that its shards
    hold; its ``metadata`` is not read.

    Raises
    ------
    CheckpointError
        When there is no such folder, no weights in it, a file that is truncated or corrupt, or an index that names a
        file outside the folder or disagrees with its shards. Every reason is listed.
    """
    folder = require_folder(path)
    # lexists: a dangling link, as an interrupted download leaves it, is a file that is missing, not an absent form.
    if os.path.lexists(folder / SINGLE):
        return Checkpoint(folder, [SafetensorsFile(folder / SINGLE)])
    if os.path.lexists(folder / INDEX):
        return Checkpoint(folder, list(_open_shards(folder)))
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            folder,
            "holds only pytorch_model.bin weights, a format that is not read yet. Convert them to safetensors, for "
            "example with transformers: AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise CheckpointError(folder, f"holds no weights: expected {SINGLE} or {INDEX}")


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    wanted = _read_index(folder)
    files: list[SafetensorsFile] = []
    problems: list[str] = []
    for shard, names in wanted.items():
        try:
            file = SafetensorsFile(folder / shard)
        except CheckpointError as error:
            problems += [f"{shown(shard)}: {problem}" for problem in error.problems]
            continue
        files.append(file)
        problems += [f"{INDEX} places {name!r} in {shown(shard)}, which lacks it" for name in names - set(file.tensors)]
        problems += [
            f"{shown(shard)} holds {name!r}, which {INDEX} does not place there" for name in set(file.tensors) - names
        ]
    if problems:
        for file in files:
            file.close()
        raise CheckpointError(folder, sorted(problems))
    return files


def _read_index(folder: Path) -> dict[str, set[str]]:
    """Return the tensor names that the index places in each shard."""
    placed = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(folder / INDEX, "weight_map: expected an object that names the file of each tensor")
    wanted: dict[str, set[str]] = {}
    problems: set[str] = set()
    for name, shard in placed.items():
        if isinstance(shard, str) and _stays_inside(shard):
            wanted.setdefault(shard, set()).add(name)
        else:
            problems.add(f"weight_map: {shown(shard)} is not the name of a file inside the folder")
    if problems:
        raise CheckpointError(folder / INDEX, sorted(problems))
    return wanted


def _stays_inside(shard: str) -> bool:
    # Judged by the name alone: download caches keep the files themselves elsewhere, behind symbolic links.
    # A backslash or a colon would mean a folder or a drive on Windows.
    pure = PurePosixPath(shard)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and not set(shard) & set("\\:\0")
