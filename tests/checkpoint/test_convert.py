# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversion between float formats: one rounding to nearest even, and overflow is never silent."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from metrale.checkpoint import FLOAT_DTYPES, convert
from metrale.checkpoint.convert import TARGETS
from metrale.errors import CheckpointError, InvalidInput


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 65,536 elements, so that arrays of several blocks are small."""
    monkeypatch.setattr(sys.modules["metrale.checkpoint.convert"], "_BLOCK", 1 << 16)


def every_value(dtype: str) -> NDArray[Any]:
    """All 65,536 values of a 16-bit format."""
    return np.arange(1 << 16, dtype=np.uint16).view(FLOAT_DTYPES[dtype])


def fitting(values: NDArray[Any], largest: float) -> NDArray[Any]:
    with np.errstate(invalid="ignore"):  # some of the NaNs are signalling
        wide = values.astype(np.float64)
    return np.asarray(values[np.isnan(wide) | np.isinf(wide) | (np.abs(wide) <= largest)])


def nearest_even(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round finite float32 values by search among all values of a 16-bit format, in float64, ties to the even code."""
    infinity = int(np.array(np.inf, FLOAT_DTYPES[dtype]).view(np.uint16))
    table = np.arange(infinity, dtype=np.uint16).view(FLOAT_DTYPES[dtype]).astype(np.float64)
    wide = np.abs(values.astype(np.float64))
    above = np.minimum(np.searchsorted(table, wide), len(table) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = table[above] - wide, wide - table[below]
    even_above = above % 2 == 0
    magnitude = np.where((to_above < to_below) | ((to_above == to_below) & even_above), above, below)
    return np.asarray((magnitude | np.where(np.signbit(values), 0x8000, 0)).astype(np.uint16).view(FLOAT_DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sixteen_bits_survive_a_round_trip_through_f32(dtype: str) -> None:
    values = every_value(dtype)
    back = convert(convert(values, "f32"), dtype)
    nan = np.isnan(values.astype(np.float32))
    np.testing.assert_array_equal(back.view(np.uint16)[~nan], values.view(np.uint16)[~nan])
    assert np.isnan(back.astype(np.float32))[nan].all()


@pytest.mark.parametrize(("dtype", "largest"), [("f16", 65504.0), ("bf16", 3.3895313892515355e38)])
def test_f32_rounds_to_the_nearest_and_ties_to_even(dtype: str, largest: float) -> None:
    random = np.random.default_rng(7)
    grid = fitting(every_value(dtype).astype(np.float32), largest)
    grid = np.sort(grid[np.isfinite(grid)])
    # Halfway points between neighbours are exact in float32, and one step to each side decides the direction.
    halfway = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)
    values = np.concatenate(
        [grid, halfway, np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(-np.inf))]
    )
    values = np.concatenate([values, random.standard_normal(4096).astype(np.float32)])
    got = convert(values, dtype)
    assert got.dtype == FLOAT_DTYPES[dtype]
    expected = nearest_even(values, dtype)
    nonzero = expected.astype(np.float32) != 0  # the sign of a zero is compared below
    np.testing.assert_array_equal(got.view(np.uint16)[nonzero], expected.view(np.uint16)[nonzero])
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got.astype(np.float32)), np.signbit(values))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_f64_is_rounded_once(dtype: str) -> None:
    """Values beside a tie by less than float32 can tell: rounded to float32 first, they would become the tie."""
    with np.errstate(invalid="ignore"):  # some of the NaNs are signalling
        grid = fitting(every_value(dtype), 6e4).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    halfway = (grid[:-1] + grid[1:]) / 2
    near = [halfway * (1 + sign * step) for sign in (-1, 1) for step in (2.0**-52, 2.0**-40, 2.0**-26, 2.0**-23)]
    values = np.concatenate([grid, halfway, *near, [1e-300, -1e-300, 5e-324]])
    got = convert(values, dtype)
    np.testing.assert_array_equal(got.astype(np.float64), nearest_even(values, dtype).astype(np.float64))
    np.testing.assert_array_equal(np.signbit(got.astype(np.float32)), np.signbit(values))


def test_f64_rounds_to_f32() -> None:
    values = np.array([1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 1 + 3 * 2.0**-24, -(2.0**-150), -(2.0**-149)])
    expected = np.array([1, 1 + 2.0**-23, 1 + 2.0**-22, -0.0, -(2.0**-149)])
    got = convert(values, "f32")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.astype(np.float64), expected)
    assert np.signbit(got[3])


@pytest.mark.parametrize(("source", "target"), [("f16", "bf16"), ("bf16", "f16")])
def test_between_the_sixteen_bit_formats_there_is_one_rounding(source: str, target: str) -> None:
    values = fitting(every_value(source), 65504.0)
    finite = np.isfinite(values.astype(np.float32))
    got = convert(values, target).astype(np.float32)
    expected = nearest_even(values[finite].astype(np.float32), target).astype(np.float32)
    np.testing.assert_array_equal(got[finite], expected)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(values.astype(np.float32)))


def test_the_same_dtype_is_the_same_array() -> None:
    array = np.ones(3, np.float32)
    assert convert(array, "f32") is array


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65520.0, "f32", "f16"),  # halfway from the largest float16 to the next power of two: rounds away
        (-1e38, "f32", "f16"),
        (65536.0, "bf16", "f16"),
        (3.4e38, "f32", "bf16"),
        (3.4e38, "f64", "bf16"),
        (3.402823567797337e38, "f64", "f32"),  # more than half a step above the largest float32
        (-65520.0, "f64", "f16"),
    ],
)
def test_overflow_is_an_error_that_names_the_tensor(value: float, source: str, target: str) -> None:
    array = np.array([0.0, np.inf, value, np.nan]).astype(FLOAT_DTYPES[source])
    with pytest.raises(CheckpointError, match=r"'layer\.weight': 1 finite values do not fit in") as caught:
        convert(array, target, name="layer.weight", path="folder")
    assert caught.value.path == "folder"


def test_the_largest_fitting_value_infinities_and_nans_pass() -> None:
    array = np.array([65519.0, -65504.0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(convert(array, "f16"), np.array([65504, -65504, np.inf, -np.inf, np.nan], np.float16))


@pytest.mark.parametrize("source", list(FLOAT_DTYPES))
@pytest.mark.parametrize("target", TARGETS)
def test_into_an_array_that_is_given(source: str, target: str) -> None:
    """More than two blocks, the last one short; NaNs and infinities come through. The input is left alone."""
    values = np.random.default_rng(8).standard_normal((3, 50_001)).astype(FLOAT_DTYPES[source])
    values[0, 0], values[1, 40_000], values[2, -1] = np.nan, np.inf, -np.inf
    before = values.tobytes()
    values.setflags(write=False)
    out = np.full(values.shape, 77, FLOAT_DTYPES[target])
    assert convert(values, target, out=out) is out
    assert values.tobytes() == before
    expected = convert(values, target)
    assert out.tobytes() == expected.tobytes()
    finite = np.isfinite(values.astype(np.float32))
    got, exact = out[finite].astype(np.float64), values[finite].astype(np.float64)
    assert np.abs(got - exact).max() <= 2**-8 * np.abs(exact).max()  # the unit roundoff of bfloat16
    assert np.isnan(float(out[0, 0]))
    assert (float(out[1, 40_000]), float(out[2, -1])) == (np.inf, -np.inf)


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 131_072, 140_000])
@pytest.mark.parametrize(
    ("value", "source", "target"),
    [(-1e6, "f32", "f16"), (-3.4e38, "f32", "bf16"), (1e6, "bf16", "f16"), (1e39, "f64", "f32")],
)
def test_overflow_is_found_in_every_block(place: int, value: float, source: str, target: str) -> None:
    values = np.zeros(140_001, FLOAT_DTYPES[source])
    values[7] = np.inf
    values[70_000] = np.nan
    values[place] = value
    with pytest.raises(CheckpointError, match=r": 1 finite values do not fit in"):
        convert(values, target)


@pytest.mark.parametrize(
    "out", [np.empty(4, np.float16), np.empty((2, 2), np.float32), np.empty((2, 3, 1), np.float16)[:, :2, 0]]
)
def test_an_array_that_does_not_fit_is_refused(out: NDArray[Any]) -> None:
    with pytest.raises(InvalidInput, match="out: expected contiguous float16"):
        convert(np.zeros((2, 2), np.float32), "f16", out=out)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="dtype: expected one of f32, f16, bf16, got f64"):
        convert(np.ones(1, np.float32), "f64")
    for dtype in (np.longdouble, np.int8, ml_dtypes.float8_e4m3fn):
        with pytest.raises(InvalidInput, match="array: expected"):
            convert(np.ones(1, dtype), "f32")
