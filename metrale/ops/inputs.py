# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pieces of the random inputs that ops describe for their tests."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.op import AddressTable, Tolerance

Array = np.ndarray[Any, np.dtype[Any]]

ONE_ROUNDING: Final = Tolerance(f32=2e-6, f16=2**-11 + 1e-5, bf16=2**-8 + 1e-5)
"""For ops that compute in float32 and round once: the unit roundoff of the type, and a little for the float32 sums.

The largest float32 error over the edge shapes is 3.1e-7 on the host; 2e-6 leaves room for another order of summation.
"""

ATTENTION: Final = Tolerance(f32=1e-5, f16=2**-11 + 1e-5, bf16=2**-8 + 1e-5)
"""For attention: a score near 100, as the edge shapes have, is only exact to 100 * 2**-24 in float32 for each of the
few roundings on its way, and the softmax turns that absolute error into a relative one. The largest over the edge
shapes is 4.4e-6 on the host (with the BLAS kernels of an AVX2 processor)."""


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, mean: float = 0.0, std: float = 1.0
) -> Array:
    """Return normally distributed values, rounded to ``dtype``."""
    return (mean + std * rng.standard_normal(shape)).astype(dtypes.NUMPY[dtype])


def output(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an output to be written: a value that no kernel computes, so that an unwritten element shows."""
    return np.full(shape, -77, dtype=dtypes.NUMPY[dtype])


def spans(
    rng: np.random.Generator, rows: int, positions: int, stride: int, dtype: str, role: Any, *, regular: bool = True
) -> AddressTable:
    """Return a table of ``rows`` separate spans of ``positions`` KV rows, in shuffled order.

    ``regular`` spans start at multiples of the row pitch, as in a KV pool; the others start anywhere.
    """
    gaps = np.zeros(rows, dtype=np.int64) if regular else np.arange(1, rows + 1, dtype=np.int64)
    starts = np.arange(rows) * positions * stride + np.cumsum(gaps)
    pool = normal(rng, (int(starts[-1]) + positions * stride,), dtype)
    return AddressTable(pool, rng.permutation(starts), role)


def offsets(lengths: tuple[int, ...]) -> Array:
    """Return the ``cu_seqlens`` of packed sequences: int32 ``[n + 1]``, starting at 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
