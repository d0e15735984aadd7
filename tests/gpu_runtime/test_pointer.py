# SPDX-License-Identifier: MIT OR Apache-2.0
"""DevicePtr."""

from __future__ import annotations

import copy
import ctypes
import json
import pickle
from typing import Any

import numpy as np
import pytest

from gpu_runtime import DevicePtr


def test_is_an_int() -> None:
    ptr = DevicePtr(0x7F00_0000_1000)
    assert isinstance(ptr, int)
    assert ptr == 0x7F00_0000_1000
    assert hash(ptr) == hash(0x7F00_0000_1000)
    assert {ptr: 1}[DevicePtr(0x7F00_0000_1000)] == 1
    assert type(int(ptr)) is int
    assert json.dumps(ptr) == str(0x7F00_0000_1000)


def test_null() -> None:
    assert DevicePtr() == DevicePtr.NULL == 0
    assert DevicePtr.NULL.is_null
    assert not DevicePtr(1).is_null


@pytest.mark.parametrize("address", [0, 1, (1 << 64) - 1, np.int8(3), np.uint64((1 << 64) - 1), DevicePtr(9)])
def test_accepts_every_integer_that_fits(address: Any) -> None:
    assert DevicePtr(address) == int(address)


@pytest.mark.parametrize("address", [-1, 1 << 64, np.int32(-5)])
def test_refuses_what_does_not_fit(address: Any) -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\*\*64\)"):
        DevicePtr(address)


@pytest.mark.parametrize("address", [1.0, "16", None, b"1", True, False, np.bool_(True), np.float64(1), [1]])
def test_refuses_what_is_not_an_integer(address: Any) -> None:
    with pytest.raises(TypeError, match="expected an integer"):
        DevicePtr(address)


def test_arithmetic() -> None:
    ptr = DevicePtr(0x1000)
    moved = (ptr + 64, 64 + ptr, ptr.offset(64), ptr + np.int32(64), ptr - (-64), ptr.offset(-64) + 128)
    assert all(type(one) is DevicePtr and one == 0x1040 for one in moved)
    assert type(ptr - 16) is DevicePtr
    distance = DevicePtr(0x1040) - ptr
    assert distance == 64
    assert type(distance) is int
    assert ptr - DevicePtr(0x1040) == -64
    assert type(ptr * 2) is int
    ptr += 8
    assert repr(ptr) == "DevicePtr(0x1008)"


def test_offsets_are_exact_past_32_bits() -> None:
    assert DevicePtr(1 << 47).offset(8400 * 256256 * 4) == (1 << 47) + 8400 * 256256 * 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ptr: ptr + ptr,
        lambda ptr: 5 - ptr,
        lambda ptr: ptr + 1.0,
        lambda ptr: ptr - 1.0,
        lambda ptr: ptr + True,
        lambda ptr: ptr.offset("8"),
        lambda ptr: ptr + np.arange(3),
    ],
)
def test_meaningless_arithmetic_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wrong(DevicePtr(0x1000))


@pytest.mark.parametrize("wrong", [lambda: DevicePtr(8) - 9, lambda: DevicePtr((1 << 64) - 1) + 1])
def test_results_stay_addresses(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected an address"):
        wrong()


def test_text_is_hexadecimal() -> None:
    ptr = DevicePtr(255)
    assert repr(ptr) == str(ptr) == f"{ptr}" == "DevicePtr(0xff)"
    assert f"{ptr:#x}" == "0xff"


@pytest.mark.parametrize("address", [0, (1 << 64) - 1])
def test_copies_are_pointers(address: int) -> None:
    ptr = DevicePtr(address)
    for other in (copy.copy(ptr), copy.deepcopy(ptr), pickle.loads(pickle.dumps(ptr))):
        assert type(other) is DevicePtr
        assert other == ptr


def test_passes_to_c_unchanged() -> None:
    convert = ctypes.pythonapi.PyLong_AsVoidPtr
    convert.restype, convert.argtypes = ctypes.c_void_p, [ctypes.py_object]
    assert convert(DevicePtr((1 << 64) - 2)) == (1 << 64) - 2
    assert ctypes.c_void_p(DevicePtr(1 << 40)).value == 1 << 40


def test_has_no_room_for_attributes() -> None:
    ptr: Any = DevicePtr(1)
    with pytest.raises(AttributeError):
        ptr.owner = object()
