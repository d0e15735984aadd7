# SPDX-License-Identifier: MIT OR Apache-2.0
"""The element types of device memory: short names, NumPy dtypes, sizes and C types."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import ml_dtypes
import numpy as np

from gpu_runtime.errors import told

FLOAT_TYPES: Final = ("f32", "f16", "bf16")
"""Element types that kernels are instantiated over; the suffix of every entry point."""

NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    # what no kernel takes, and others bring or ask for
    "bool": np.dtype(np.bool_),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "u16": np.dtype(np.uint16),
    "f64": np.dtype(np.float64),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
}

CTYPES: Final[dict[str, Any]] = {
    "f32": ctypes.c_float,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
"""C types of scalar kernel parameters."""

INTEGER_RANGE: Final[dict[str, tuple[int, int]]] = {
    "i32": (-(1 << 31), (1 << 31) - 1),
    "i64": (-(1 << 63), (1 << 63) - 1),
    "u32": (0, (1 << 32) - 1),
    "u64": (0, (1 << 64) - 1),
}

_LONG_NAMES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def itemsize(dtype: str) -> int:
    """Return the size of one element in bytes."""
    return NUMPY[dtype].itemsize


def long_name(dtype: str) -> str:
    """Return the name that people write (``"float32"``) for a short one (``"f32"``)."""
    return _LONG_NAMES[dtype]


def short_name(name: str) -> str:
    """Return ``"f32"``, ``"f16"`` or ``"bf16"`` for a short or a long name.

    Raises
    ------
    ValueError
        When the name is neither.
    """
    for short, long in _LONG_NAMES.items():
        if name in (short, long):
            return short
    raise ValueError(f"dtype: expected one of {', '.join(_LONG_NAMES.values())}, got {name!r}")


def element_type(dtype: Any) -> str:
    """Return the short name of what a caller gave as an element type: a short name, a long one, or a NumPy dtype.

    Raises
    ------
    ValueError
        When device memory has no such type.
    """
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        if dtype is None:  # which is NumPy's word for float64
            raise KeyError(dtype)
        return _NAMES[NUMPY["bf16"] if dtype == "bfloat16" else np.dtype(dtype)]
    except (TypeError, KeyError):
        known = ", ".join(NUMPY)
        raise ValueError(f"dtype: expected one of {known}, or a NumPy dtype of these, got {told(dtype)}") from None


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the short name of a NumPy dtype. `KeyError` when device memory has no such type."""
    return _NAMES[dtype]


_NAMES: Final = {numpy_type: name for name, numpy_type in NUMPY.items()}
