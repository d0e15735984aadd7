# SPDX-License-Identifier: MIT OR Apache-2.0
"""One safetensors file, memory-mapped, read by rows.

The ``safetensors`` library parses and checks the header and maps the file; a slice copies only the rows asked for, in
bfloat16 too, so nothing here maps memory itself. bfloat16 reaches NumPy through ``ml_dtypes``. Checked with versions
0.4.5, 0.5.3, 0.6.2, 0.7.0 and 0.8.0 of the library: 0.4.5 is the oldest one to use. From 0.5 on it refuses slices of an
empty tensor and in 0.8 any slice of a scalar, so both are read without slicing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from metrale.checkpoint.paths import is_lfs_pointer, require_file
from metrale.checkpoint.tensor import FLOAT_DTYPES, TensorInfo
from metrale.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HEAD_BYTES = 64

_MOST_HEADER: Final = 8 << 20
"""Bytes of a header that is read: some 70,000 tensors. The library would take a hundred megabytes, with a million."""


class SafetensorsFile:
    """An open safetensors file.

    Parameters
    ----------
    path : Path
        The file. It must keep its length while it is open: it is mapped.

    Raises
    ------
    CheckpointError
        When the file is missing, truncated, or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        try:
            _refuse_large_header(path)
            self._handle = cast("Any", safe_open(path, framework="numpy"))  # the library's methods are not annotated
            names: list[str] = list(self._handle.keys())
        except SafetensorError as error:
            raise CheckpointError(path, _why_unreadable(path, error)) from error
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
        self._tensors = {name: self._describe(name) for name in names}

    def _describe(self, name: str) -> TensorInfo:
        header = self._handle.get_slice(name)
        return TensorInfo(name, tuple(header.get_shape()), str(header.get_dtype()).lower())

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""
        return MappingProxyType(self._tensors)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Copy rows ``[start, stop)`` of a tensor of a readable dtype. The caller has checked the arguments."""
        info = self._tensors[name]
        try:
            if not info.shape:
                return np.asarray(self._handle.get_tensor(name))
            if start == stop or info.row_elements == 0:
                return np.empty((stop - start, *info.shape[1:]), FLOAT_DTYPES[info.dtype])
            rows: NDArray[Any] = self._handle.get_slice(name)[start:stop]
        except SafetensorError as error:
            raise CheckpointError(self.path, f"tensor {name!r} cannot be read: {error}") from error
        return rows

    def close(self) -> None:
        """Unmap the file. Further calls do nothing."""
        self._handle.__exit__(None, None, None)


def _refuse_large_header(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if _MOST_HEADER < length <= path.stat().st_size - 8:  # a header that is not all there is the library's to refuse
        raise CheckpointError(path, f"has a header of {length} bytes, and at most {_MOST_HEADER} are read")


def _why_unreadable(path: Path, error: SafetensorError) -> str:
    size = path.stat().st_size
    if size == 0:
        return "is an empty file, expected safetensors data"
    with path.open("rb") as file:
        if is_lfs_pointer(file.read(_HEAD_BYTES)):
            return "is a Git LFS pointer, not the data: fetch it with `git lfs pull`"
    return f"is not a complete safetensors file ({size} bytes): {error}"
