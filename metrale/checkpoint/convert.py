# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion between the three floating-point formats of checkpoints."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.tensor import FLOAT_DTYPES
from metrale.errors import CheckpointError, InvalidInput

_BLOCK: Final = 1 << 16
"""Elements converted at a time: a block is still in the processor's cache when it is looked through for infinities."""

_INFINITY: Final = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}
"""The bits of infinity. Those of every finite number are less, those of NaN more, when the sign is left out."""


def convert(
    array: NDArray[Any],
    dtype: str,
    *,
    out: NDArray[Any] | None = None,
    name: str = "tensor",
    path: object = "checkpoint",
) -> NDArray[Any]:
    """Return ``array`` in another floating-point format, rounded once to nearest even.

    Infinities and NaNs that are in the array stay what they are.

    Parameters
    ----------
    array : ndarray of float32, float16 or bfloat16
        Any shape. Without ``out``, it is returned itself when it has the wanted dtype already.
    dtype : {"f32", "f16", "bf16"}
        The wanted dtype.
    out : ndarray, optional
        Where to put the result: C-contiguous, of the array's shape and the wanted dtype. A new array otherwise.
    name, path : str
        The tensor and the checkpoint that an error names.

    Returns
    -------
    ndarray
        ``out``, if given. What it holds after an error is unspecified.

    Raises
    ------
    CheckpointError
        When a finite value is too large for the wanted dtype (65,520 and above for ``"f16"``).
    InvalidInput
        When either dtype is not one of the three, or ``out`` does not fit.
    """
    target = FLOAT_DTYPES.get(dtype)
    if target is None:
        raise InvalidInput("dtype", f"one of {', '.join(FLOAT_DTYPES)}", dtype)
    if array.dtype not in FLOAT_DTYPES.values():
        raise InvalidInput("array", "float32, float16 or bfloat16", str(array.dtype))
    if out is None:
        if array.dtype == target:
            return array
        out = np.empty(array.shape, target)
    elif out.dtype != target or out.shape != array.shape or not out.flags.c_contiguous:
        raise InvalidInput("out", f"contiguous {target} {array.shape}", f"{out.dtype} {out.shape}")
    with np.errstate(all="ignore"):  # NaNs and overflow warn; the former are right, the latter is looked for
        if array.dtype == target or target.itemsize > array.dtype.itemsize:
            np.copyto(out, array)  # every value of a 16-bit format is one of float32
        elif _cast(array.reshape(-1), out.reshape(-1)):
            _refuse_overflow(array, out, dtype, name, path)
    return out


def _cast(values: NDArray[Any], out: NDArray[Any]) -> bool:
    """Convert one axis to a 16-bit format; return whether an infinity came out."""
    infinity, bits = _INFINITY[out.dtype], out.view(np.uint16)
    scratch = np.empty(min(_BLOCK, len(out)), dtype=np.uint16)
    found = False
    for start in range(0, len(out), _BLOCK):
        block = slice(start, start + _BLOCK)
        np.copyto(out[block], values[block], casting="unsafe")
        magnitude = np.bitwise_and(bits[block], 0x7FFF, out=scratch[: len(bits[block])])
        found = found or bool(magnitude.max() >= infinity and (magnitude == infinity).any())
    return found


def _refuse_overflow(array: NDArray[Any], converted: NDArray[Any], dtype: str, name: str, path: object) -> None:
    """Raise CheckpointError when a finite value became an infinity."""
    overflow = np.isinf(converted) & np.isfinite(array)
    if overflow.any():
        largest = float(np.abs(array[overflow].astype(np.float64)).max())
        raise CheckpointError(
            path,
            f"tensor {name!r}: {np.count_nonzero(overflow)} finite values do not fit in {dtype} "
            f"(the largest is {largest:g}); load it in another dtype",
        )
