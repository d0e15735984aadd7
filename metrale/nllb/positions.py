# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sinusoidal positions, computed and never learned."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def sinusoidal(first: int, count: int, width: int) -> NDArray[np.float32]:
    """Return the rows of positions ``first`` to ``first + count - 1``.

    Row p is ``[sin(p * w_i) | cos(p * w_i)]`` with ``w_i = exp(-i * ln(10000) / (width // 2 - 1))`` for
    ``i < width // 2``, and a final zero when ``width`` is odd: the layout of fairseq, which NLLB inherits, and not the
    interleaved one of Vaswani et al. (2017), section 3.5. The table has no end.

    Returns
    -------
    ndarray
        float32 ``[count, width]``. Computed in float64 and rounded once: the angle of a float32 product would be off
        by 3e-5 at position 500.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half) * (-math.log(10000.0) / (half - 1)))
    angles = np.arange(first, first + count)[:, None] * frequencies
    table = np.zeros((count, width), dtype=np.float32)
    table[:, :half] = np.sin(angles)
    table[:, half : 2 * half] = np.cos(angles)
    return table
