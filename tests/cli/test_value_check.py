# SPDX-License-Identifier: MIT OR Apache-2.0
"""Counting NaNs and infinities by their bits, against NumPy's own predicates."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from metrale.cli.value_check import NonFinite, count_non_finite

DTYPES = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_of_16_bits(dtype: Any) -> None:
    """Of wider formats, those whose lowest and highest bits vary."""
    size = np.dtype(dtype).itemsize
    words = np.zeros((1 << 16, size // 2), np.uint16)
    words[:, -1] = np.arange(1 << 16)
    words[::3, 0] |= 1  # NaNs that differ from infinity in their last bit alone
    values = words.reshape(-1).view(dtype)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    expected = NonFinite(int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    assert expected.nan > 0
    assert count_non_finite(values) == expected
    assert count_non_finite(values.reshape(256, 256)[:, ::2]) == count_non_finite(values[::2].copy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_almost_infinite(dtype: Any) -> None:
    largest = ml_dtypes.finfo(dtype).max  # type: ignore[no-untyped-call]
    assert count_non_finite(np.array([largest, -largest, 0.0, -0.0], dtype)) == (0, 0)
    assert count_non_finite(np.array([np.inf, -np.inf, np.nan], dtype)) == (1, 2)
    assert count_non_finite(np.zeros((0, 4), dtype)) == (0, 0)
    assert count_non_finite(np.array(np.nan, dtype)) == (1, 0)
