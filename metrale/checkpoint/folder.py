# SPDX-License-Identifier: MIT OR Apache-2.0
"""A checkpoint folder: one file of weights, or several with an index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint import safetensors_file, torch_file
from metrale.checkpoint.file_bytes import FilePlace
from metrale.checkpoint.paths import require_folder
from metrale.checkpoint.safetensors_file import SafetensorsFile
from metrale.checkpoint.shards import open_shards
from metrale.checkpoint.tensor import FLOAT_DTYPES, Reader, TensorFile, TensorInfo
from metrale.checkpoint.torch_file import TorchFile
from metrale.errors import CheckpointError, InvalidInput

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """One form of weights: the names of its single file and its index, and what opens a file."""

    single: str
    index: str
    open_file: Callable[[Path], TensorFile]


FORMS: Final = (
    Form(safetensors_file.SINGLE, safetensors_file.INDEX, SafetensorsFile),
    Form(torch_file.SINGLE, torch_file.INDEX, TorchFile),
)
"""In the order in which they are looked for."""


class Checkpoint:
    """The tensors of a checkpoint folder; a context manager. ``open_checkpoint`` makes one.

    Attributes
    ----------
    path : Path
        The folder.
    tensors : mapping of str to TensorInfo
        Every tensor by name.
    """

    def __init__(self, path: Path, files: Sequence[TensorFile]) -> None:
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

    def stored_at(self, name: str) -> FilePlace | None:
        """Return where in a file a tensor's elements are, one after another in C order; None when they are not.

        Raises
        ------
        InvalidInput
            When there is no such tensor.
        CheckpointError
            When the dtype cannot be read, or the checkpoint is closed.
        """
        self._readable(name)
        return self._file_of[name].stored_at(name)

    def are_one(self, first: str, second: str) -> bool:
        """Return whether two tensors are the same bytes of a file, in the same shape: nothing need be read to know it.

        PyTorch saves tied matrices so, once.

        Raises
        ------
        InvalidInput
            When there is no such tensor.
        CheckpointError
            When a dtype cannot be read, or the checkpoint is closed.
        """
        infos = [self._readable(name) for name in (first, second)]
        if infos[0].shape != infos[1].shape or infos[0].dtype != infos[1].dtype:
            return False
        files = [self._file_of[name] for name in (first, second)]
        return files[0] is files[1] and files[0].place(first) == files[0].place(second)

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
        step = max(1, max_bytes // row_bytes) if info.row_elements else info.rows  # no bytes in any number of rows
        for start in range(0, info.rows, step or 1):
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
    """Open a checkpoint folder: one file of weights, or shards with an index, in safetensors' or PyTorch's form.

    Of several, the first of ``model.safetensors``, ``model.safetensors.index.json``, ``pytorch_model.bin`` and
    ``pytorch_model.bin.index.json`` is taken, as transformers does. An index must name exactly the tensors that its
    shards hold; its ``metadata`` is not read. Nothing that is in a file is executed.

    Raises
    ------
    CheckpointError
        When there is no such folder, no weights in it, a file that is truncated, corrupt or holds anything but tensors,
        or an index that names a file outside the folder or disagrees with its shards. Every reason is listed.
    """
    folder = require_folder(path)
    # lexists: a dangling link, as an interrupted download leaves it, is a file that is missing, not an absent form.
    for form in FORMS:
        if os.path.lexists(folder / form.single):
            return Checkpoint(folder, [form.open_file(folder / form.single)])
        if os.path.lexists(folder / form.index):
            return Checkpoint(folder, open_shards(folder, form.index, form.open_file))
    expected = " or ".join(f"{form.single} or {form.index}" for form in FORMS)
    raise CheckpointError(folder, f"holds no weights: expected {expected}")
