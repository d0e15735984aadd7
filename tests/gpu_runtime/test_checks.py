# SPDX-License-Identifier: MIT OR Apache-2.0
"""Numbers at the border: what is accepted, what becomes of it, what is refused."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pytest

from gpu_runtime import checks


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_integer_becomes_a_plain_int(value: Any) -> None:
    number = checks.integer("n", value, 0, 7)
    assert type(number) is int
    assert number == 7


@pytest.mark.parametrize("value", [7.0, "7", None, True, np.bool_(True), np.float32(7), [7], np.arange(2), 7j])
def test_integer_refuses_other_types_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^n: expected an integer, got"):
        checks.integer("n", value)


@pytest.mark.parametrize(
    ("low", "high", "text"), [(8, None, "at least 8"), (None, 6, "at most 6"), (8, 9, "8 to 9"), (1, 6, "1 to 6")]
)
def test_integer_names_its_bounds(low: int | None, high: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=f"^n: expected {text}, got 7$"):
        checks.integer("n", 7, low, high)


@pytest.mark.parametrize("value", [2, 0.5, np.float16(0.5), np.float64(2), np.int32(-3), decimal.Decimal("0.25")])
def test_float32_keeps_what_it_can_hold(value: Any) -> None:
    assert checks.float32("f", value) == float(value)


def test_float32_rounds_as_the_device_will() -> None:
    assert checks.float32("f", 0.1) == float(np.float32(0.1)) != 0.1
    assert checks.float32("f", 1e-46) == 0.0
    assert checks.float32("f", (1 << 24) + 1) == 1 << 24


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_float32_keeps_infinities(value: float) -> None:
    assert checks.float32("f", value) == value


def test_float32_keeps_nan() -> None:
    assert math.isnan(checks.float32("f", math.nan))


@pytest.mark.parametrize("value", [1e39, -1e300, 10**400, 3.4028236e38])
def test_float32_refuses_finite_values_that_would_become_infinite(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^f: expected a number that float32 can hold"):
        checks.float32("f", value)


@pytest.mark.parametrize("value", ["1.5", b"1", None, True, np.bool_(False), 1j, [1.0], np.zeros(3)])
def test_float32_refuses_what_is_not_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^f: expected a number, got"):
        checks.float32("f", value)
