# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion between the three floating-point formats of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.tensor import FLOAT_DTYPES
from metrale.errors import CheckpointError, InvalidInput


def convert(array: NDArray[Any], dtype: str, *, name: str = "tensor", path: object = "checkpoint") -> NDArray[Any]:
    """Return ``array`` in another floating-point format, rounded once to nearest even.

    Infinities and NaNs that are in the array stay what they are.

    Parameters
    ----------
    array : ndarray of float32, float16 or bfloat16
        Any shape. It is returned itself when it has the wanted dtype already.
    dtype : {"f32", "f16", "bf16"}
        The wanted dtype.
    name, path : str
        The tensor and the checkpoint that an error names.

    Raises
    ------
    CheckpointError
        When a finite value is too large for the wanted dtype (65,520 and above for ``"f16"``).
    InvalidInput
        When either dtype is not one of the three.
    """
    target = FLOAT_DTYPES.get(dtype)
    if target is None:
        raise InvalidInput("dtype", f"one of {', '.join(FLOAT_DTYPES)}", dtype)
    if array.dtype == target:
        return array
    if array.dtype not in FLOAT_DTYPES.values():
        raise InvalidInput("array", "float32, float16 or bfloat16", str(array.dtype))
    # Casts of NaNs and of too large values warn; NaNs are right as they are, and overflow is looked for below.
    with np.errstate(all="ignore"):
        converted = array.astype(target)
        overflow = np.isinf(converted)
        if overflow.any():  # the usual case ends here, without a mask of the input
            overflow &= np.isfinite(array)
    if overflow.any():
        largest = float(np.abs(array[overflow].astype(np.float64)).max())
        raise CheckpointError(
            path,
            f"tensor {name!r}: {np.count_nonzero(overflow)} finite values do not fit in {dtype} "
            f"(the largest is {largest:g}); load it in another dtype",
        )
    return converted
