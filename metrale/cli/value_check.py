# SPDX-License-Identifier: MIT OR Apache-2.0
"""NaNs and infinities among the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint import FLOAT_DTYPES, Checkpoint

_CHUNK_BYTES: Final = 16 << 20


class NonFinite(NamedTuple):
    """How many values of a tensor are no numbers, or infinite."""

    nan: int
    inf: int


def tensor_bytes(checkpoint: Checkpoint, name: str) -> int:
    """Return the bytes of a tensor's values; 0 when its dtype is none that can be read."""
    info = checkpoint.tensors[name]
    dtype = FLOAT_DTYPES.get(info.dtype)
    return 0 if dtype is None else info.rows * info.row_elements * dtype.itemsize


def check_values(checkpoint: Checkpoint, advance: Callable[[int], None]) -> dict[str, NonFinite]:
    """Read every tensor whose dtype can be read; return those with values that are not finite.

    Parameters
    ----------
    checkpoint : Checkpoint
    advance : callable
        Called with the bytes read since its last call.

    Raises
    ------
    CheckpointError
        When a tensor cannot be read.
    """
    found = {}
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FLOAT_DTYPES:
            continue
        counts = NonFinite(0, 0)
        for _, rows in checkpoint.iter_chunks(name, _CHUNK_BYTES):
            here = count_non_finite(rows)
            counts = NonFinite(counts.nan + here.nan, counts.inf + here.inf)
            advance(rows.nbytes)
        if any(counts):
            found[name] = counts
    return found


def count_non_finite(values: NDArray[Any]) -> NonFinite:
    """Count the NaNs and the infinities of an array of a floating-point dtype, bfloat16 included.

    By their bits, which is fast for every dtype: without the sign, those of infinity are above those of every number,
    and those of every NaN above those of infinity.
    """
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    infinity = np.array(np.inf, values.dtype).reshape(1).view(unsigned)[0]
    magnitude = np.ascontiguousarray(values).reshape(-1).view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    if not magnitude.size or magnitude.max() < infinity:
        return NonFinite(0, 0)
    return NonFinite(int(np.count_nonzero(magnitude > infinity)), int(np.count_nonzero(magnitude == infinity)))
