# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion of the floating-point formats of checkpoints to those that models are computed in."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.tensor import FLOAT_DTYPES
from metrale.errors import CheckpointError, InvalidInput

_BLOCK: Final = 1 << 20
"""Elements converted at a time. A smaller block would be nearer to the processor when it is looked through for
infinities, but several threads that convert would wait for each other between its steps."""

TARGETS: Final = ("f32", "f16", "bf16")

_INFINITY: Final = {FLOAT_DTYPES["f16"]: 0x7C00, FLOAT_DTYPES["bf16"]: 0x7F80, FLOAT_DTYPES["f32"]: 0x7F80_0000}
"""The bits of infinity. Those of every finite number are less, those of NaN more, when the sign is left out."""
_BITS: Final[dict[int, type[np.unsignedinteger[Any]]]] = {2: np.uint16, 4: np.uint32}


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
    array : ndarray of float32, float16, bfloat16 or float64
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
        When either dtype is none of these, or ``out`` does not fit.
    """
    if dtype not in TARGETS:
        raise InvalidInput("dtype", f"one of {', '.join(TARGETS)}", dtype)
    target = FLOAT_DTYPES[dtype]
    if array.dtype not in FLOAT_DTYPES.values():
        raise InvalidInput("array", "float32, float16, bfloat16 or float64", str(array.dtype))
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
    """Convert one axis to a narrower format; return whether an infinity came out."""
    infinity, bits = _INFINITY[out.dtype], out.view(_BITS[out.itemsize])
    without_sign = (1 << (8 * out.itemsize - 1)) - 1
    scratch = np.empty(min(_BLOCK, len(out)), dtype=bits.dtype)
    twice = values.dtype == np.float64 and out.dtype == FLOAT_DTYPES["bf16"]  # ml_dtypes goes through float32
    found = False
    for start in range(0, len(out), _BLOCK):
        block = slice(start, start + _BLOCK)
        np.copyto(out[block], _rounded_to_odd(values[block]) if twice else values[block], casting="unsafe")
        magnitude = np.bitwise_and(bits[block], without_sign, out=scratch[: len(bits[block])])
        found = found or bool(magnitude.max() >= infinity and (magnitude == infinity).any())
    return found


def _rounded_to_odd(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return float64 as float32, of the two neighbours of what is between them always the one with an odd last bit.

    Rounding that to nearest even gives what rounding the exact value once does: a tie stays distinct from what is
    nearly one, because float32 has more than two bits more than the formats that are rounded to.
    """
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    between = back != values  # also of a NaN, which stays one with an odd last bit
    bits = near.view(np.uint32)
    bits -= between & (np.abs(back) > np.abs(values))  # the neighbour that is nearer to zero
    bits |= between
    return near


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
