# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays that the tests of every form of weights store and read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.arrays import Arrays


@pytest.fixture
def arrays() -> Arrays:
    values = np.random.default_rng(3).standard_normal((7, 5))
    return {
        "a": values.astype(np.float32),
        "b": values.astype(np.float16),
        "c": values.astype(ml_dtypes.bfloat16),
        "d": values,
        "vector": values[0].astype(ml_dtypes.bfloat16),
        "cube": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "scalar": np.array(2.5, np.float32),
        "no_rows": np.zeros((0, 4), np.float16),
        "no_columns": np.zeros((3, 0), np.float32),
    }
