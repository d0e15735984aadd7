# SPDX-License-Identifier: MIT OR Apache-2.0
"""One safetensors file, read by rows.

The ``safetensors`` library parses and checks the header. The format leaves no holes, so where a tensor's data are
follows from the order in which the library gives the names; they are read from there directly, by any thread, into
memory that is there already. bfloat16 reaches NumPy through ``ml_dtypes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from gpu_runtime.errors import told
from metrale.checkpoint.file_bytes import FileBytes, FilePlace
from metrale.checkpoint.paths import is_lfs_pointer, require_file
from metrale.checkpoint.strided import MAX_DIMENSIONS
from metrale.checkpoint.tensor import FLOAT_DTYPES, Reader, TensorInfo
from metrale.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_HEAD_BYTES: Final = 64

_BITS: Final = (
    {"bool": 8, "u8": 8, "i8": 8, "u16": 16, "i16": 16, "f16": 16, "bf16": 16, "u32": 32, "i32": 32, "f32": 32}
    | {"u64": 64, "i64": 64, "f64": 64, "c64": 64, "f4": 4, "f6_e2m3": 6, "f6_e3m2": 6}
    | {"f8_e4m3": 8, "f8_e5m2": 8, "f8_e8m0": 8, "f8_e4m3fnuz": 8, "f8_e5m2fnuz": 8}
)
"""Bits of an element of every dtype of the format."""

_MOST_HEADER: Final = 8 << 20
"""Bytes of a header that is read: some 70,000 tensors. The library would take a hundred megabytes, with a million."""


class SafetensorsFile:
    """An open safetensors file.

    Parameters
    ----------
    path : Path
        The file.

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
            with cast("Any", safe_open(path, framework="numpy")) as handle:  # its methods are not annotated
                infos = [_describe(handle, name) for name in handle.offset_keys()]
        except SafetensorError as error:
            raise CheckpointError(path, _why_unreadable(path, error)) from error
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
        self._tensors = {info.name: info for info in infos}
        self._bytes = FileBytes(path)
        self._offsets = _offsets(path, infos)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""
        return MappingProxyType(self._tensors)

    def reader(self, name: str) -> Reader:
        """Return what fills an array with elements from a place on, in C order; the arguments must be right."""
        base, itemsize, read = self._offsets[name], FLOAT_DTYPES[self._tensors[name].dtype].itemsize, self._bytes.read
        return lambda start, out: read(base + start * itemsize, out.view(np.uint8))

    def stored_at(self, name: str) -> FilePlace:
        """Return where the tensor's elements are, one after another in C order."""
        return FilePlace(self._bytes, self._offsets[name])

    def place(self, name: str) -> int:
        """Return the tensor's first byte, which no other tensor with elements has."""
        return self._offsets[name]

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._bytes.close()


def _describe(handle: Any, name: str) -> TensorInfo:
    header = handle.get_slice(name)
    return TensorInfo(name, tuple(header.get_shape()), str(header.get_dtype()).lower())


def _offsets(path: Path, infos: list[TensorInfo]) -> dict[str, int]:
    """Return where in the file each tensor begins; ``infos`` are all of them, in the order of their data."""
    with path.open("rb") as file:
        at = 8 + int.from_bytes(file.read(8), "little")
    offsets = {}
    for info in infos:
        if info.dtype not in _BITS:
            raise CheckpointError(path, f"tensor {info.name!r}: dtype {info.dtype} is not known")
        _refuse_shape(path, info)
        offsets[info.name] = at
        at += info.rows * info.row_elements * _BITS[info.dtype] // 8
    if at != path.stat().st_size:
        raise CheckpointError(path, f"has {path.stat().st_size} bytes, expected {at} by its header")
    return offsets


def _refuse_shape(path: Path, info: TensorInfo) -> None:
    """Refuse a tensor that no array can be, which takes no bytes of the file where a dimension is 0."""
    reach = math.prod(max(extent, 1) for extent in info.shape) * _BITS[info.dtype] // 8
    if len(info.shape) > MAX_DIMENSIONS or reach >= 1 << 63:
        shape = told(list(info.shape))
        raise CheckpointError(path, f"tensor {info.name!r}: shape {shape} is larger than any array")


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
