# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checkpoint says about one tensor, and the dtypes that can be read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.file_bytes import FilePlace

FLOAT_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "f32": np.dtype(np.float32),
        "f16": np.dtype(np.float16),
        "bf16": np.dtype(ml_dtypes.bfloat16),
        "f64": np.dtype(np.float64),
    }
)
"""The dtypes whose data can be read, by their names in this project."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the checkpoint's header describes it.

    Attributes
    ----------
    name : str
        Its name in the checkpoint.
    shape : tuple of int
        Its dimensions; the first one counts rows.
    dtype : str
        A name of `FLOAT_DTYPES`; any other dtype has the name that safetensors gives it, in lower case, and cannot be
        read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def rows(self) -> int:
        """Rows along the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements in one row."""
        count = 1
        for dimension in self.shape[1:]:
            count *= dimension
        return count


Reader = Callable[[int, NDArray[Any]], None]
"""Reads elements from a place on: see `metrale.checkpoint.Checkpoint.reader`."""


class TensorFile(Protocol):
    """What a checkpoint asks of one of its files, whatever the format."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""

    def reader(self, name: str) -> Reader:
        """What `metrale.checkpoint.Checkpoint.reader` returns, without its checks."""

    def stored_at(self, name: str) -> FilePlace | None:
        """What `metrale.checkpoint.Checkpoint.stored_at` returns."""

    def place(self, name: str) -> Hashable:
        """Return what tells which bytes of the file a tensor is: equal for tensors that are the same ones."""

    def close(self) -> None:
        """Give the file back. Further calls do nothing."""
