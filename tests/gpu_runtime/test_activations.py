# SPDX-License-Identifier: MIT OR Apache-2.0
"""The activations and the error function behind one of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gpu_runtime.gemm import ACTIVATIONS, erf
from tests.ops.oracles import ACTIVATIONS as EXACT


def test_erf() -> None:
    """Within 1e-15, a few units in the last place of 1; relatively so near zero, where erf(x) goes as x."""
    x = np.concatenate([np.linspace(-7, 7, 20001), [-2.0, 2.0, np.nextafter(2, 0), 6.0, 1e300, -1e300]])
    exact = np.array([math.erf(value) for value in x])
    assert np.abs(erf(x) - exact).max() <= 1e-15
    small = np.geomspace(1e-300, 0.5, 2000)
    exact = np.array([math.erf(value) for value in small])
    assert np.abs(erf(small) / exact - 1).max() <= 1e-15


def test_erf_is_odd_and_takes_every_value() -> None:
    assert erf(np.array([np.inf, -np.inf])).tolist() == [1, -1]
    assert np.isnan(erf(np.array([np.nan])))[0]
    assert math.copysign(1, float(erf(np.array(-0.0)))) == -1
    x = np.linspace(0, 7, 1001)
    assert np.array_equal(erf(-x), -erf(x))
    assert np.all(np.diff(erf(x)) >= -2e-16), "monotone to the last place, across the seam at 2 as well"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_erf_keeps_type_and_shape(dtype: Any) -> None:
    x = np.zeros((3, 0, 2), dtype=dtype)
    assert erf(x).dtype == dtype
    assert erf(x).shape == x.shape


@pytest.mark.parametrize("name", [name for name, function in ACTIVATIONS.items() if function])
def test_in_place_and_exact_in_float64(name: str) -> None:
    x = np.linspace(-30, 30, 4001)
    exact = np.array([EXACT[name](value) for value in x])
    function = ACTIVATIONS[name]
    assert function is not None
    function(x)
    # GELU's 1 + erf cancels for negative x, which leaves 2**-53 of 1, times |x| up to 30
    assert np.abs(x - exact).max() <= 30 * 2**-52


@pytest.mark.parametrize("name", [name for name, function in ACTIVATIONS.items() if function])
def test_large_values_do_not_overflow(name: str) -> None:
    x = np.array([-3e4, 3e4], dtype=np.float32)
    function = ACTIVATIONS[name]
    assert function is not None
    function(x)
    assert x.tolist() == [0, 3e4]
