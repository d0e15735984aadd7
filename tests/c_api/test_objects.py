# SPDX-License-Identifier: MIT OR Apache-2.0
"""Addresses, streams and exceptions of Python in C, and back."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_uint64, py_object
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_runtime import errors
from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi import codes
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import stream_handle
from tests.c_api.library import Failed, Library
from tests.naming import named

TOP = (1 << 64) - 1


@pytest.fixture(scope="module")
def both(exports_path: Path) -> Library:
    """The header's functions, by each compiler. What is tested with it needs no table, so nothing is imported."""
    return Library(exports_path)


class Indexed:
    def __index__(self) -> int:
        return 0x1234


class Stream:
    def __init__(self, pair: Any) -> None:
        self.pair = pair

    def __cuda_stream__(self) -> Any:
        return self.pair


def array_interface(data: Any) -> Any:
    return SimpleNamespace(__cuda_array_interface__={"version": 3, "shape": (1,), "typestr": "<f4", "data": data})


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (0, 0),
        (5, 5),
        (1 << 63, 1 << 63),
        (TOP, TOP),
        (DevicePtr(TOP), TOP),
        (np.uint64(TOP), TOP),
        (Indexed(), 0x1234),
        (SimpleNamespace(ptr=TOP), TOP),
        (SimpleNamespace(ptr=DevicePtr(64)), 64),
        (array_interface((TOP, False)), TOP),
        (array_interface((0, True)), 0),
        (SimpleNamespace(ptr=1, __cuda_array_interface__={"data": (2, False)}), 2),
    ],
    ids=named,
)
def test_the_address_of_an_object(both: Library, value: Any, address: int) -> None:
    assert both.get(c_uint64, "pointer_from_object", value) == address


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (-1, "VALUE", r"pointer: expected an address in [0, 2**64), got -0x1"),
        (1 << 64, "VALUE", "pointer: expected an address"),
        (True, "TYPE", "pointer: expected an integer, got True"),
        (1.5, "TYPE", "pointer: expected an integer, or an object with __cuda_array_interface__"),
        ("5", "TYPE", "got '5'"),
        (None, "TYPE", "got None"),
        (SimpleNamespace(ptr=-1), "VALUE", "pointer: ptr: expected an address"),
        (SimpleNamespace(ptr="x"), "TYPE", "pointer: ptr: expected an integer"),
        (SimpleNamespace(ptr=lambda: 5), "TYPE", "pointer: ptr: expected an integer"),
        (array_interface(None), "TYPE", "expected data (address, read_only)"),
        (array_interface((1 << 64, False)), "VALUE", "pointer: __cuda_array_interface__: expected an address"),
        (SimpleNamespace(__cuda_array_interface__=5), "TYPE", "expected data (address, read_only)"),
        (type("Class", (), {"ptr": 5}), "TYPE", "pointer: expected an integer, or an object"),
    ],
    ids=named,
)
def test_what_is_no_address(both: Library, value: Any, kind: str, text: str) -> None:
    out = c_uint64(77)
    with pytest.raises(Failed) as caught:
        both.call("pointer_from_object", value, byref(out))
    assert caught.value.code == codes.CODES[kind][0]
    assert text in caught.value.text
    assert out.value == 77


@pytest.mark.parametrize("address", [0, 1, 1 << 63, TOP])
def test_an_object_of_an_address(both: Library, address: int) -> None:
    out = py_object()
    both.call("pointer_to_object", address, byref(out))
    assert type(out.value) is DevicePtr
    assert out.value == address


STREAMS = [
    *(0, 1, 2, 0x7F00, TOP, np.int64(3), DevicePtr(9), Indexed(), True, -1, 1 << 64, None, "1", 1.0, Stream),
    *(Stream(pair) for pair in ((0, 0), (0, 1), (0, 5), (0, TOP), (0, -1), (1, 5), (0,), [0, 5], None, ("0", 5))),
    SimpleNamespace(__cuda_stream__=5),
]


@pytest.mark.parametrize("stream", STREAMS, ids=[named(getattr(one, "pair", one)) for one in STREAMS])
def test_streams_follow_the_rules_of_python(both: Library, stream: Any) -> None:
    """Those of `gpu_runtime.streams`, errors and their words included; those have tests of their own."""
    expected: Any
    try:
        expected = stream_handle(stream)
    except (TypeError, ValueError) as error:
        expected = codes.described(error)
    got: Any
    try:
        got = both.get(c_uint64, "stream_from_object", stream)
    except Failed as failed:
        got = (failed.code, failed.text)
    assert got == expected


def test_handle_0_of_the_protocol_is_the_legacy_stream(both: Library) -> None:
    assert both.get(c_uint64, "stream_from_object", Stream((0, 0))) == 1
    assert both.get(c_uint64, "stream_from_object", 0) == 0


RAISED: list[BaseException] = [kind("said") for _, kind in codes.CODES.values() if kind is not errors.OutOfMemory]
RAISED += [errors.OutOfMemory("said", requested=1, live=2, limit=3), KeyError("said"), OSError(5, "said")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_the_code_of_an_exception(both: Library, error: BaseException) -> None:
    found = both.with_gil.take_exception(py_object(error))
    assert (found, both.last_error()) == codes.described(error)


def test_long_texts_are_cut(both: Library) -> None:
    both.with_gil.take_exception(py_object(ValueError("x" + "é" * 2000)))
    assert both.last_error() == "x" + "é" * 509
    both.function("fail")(5, ("y" + "é" * 2000).encode())
    assert both.last_error() == "y" + "é" * 509
    assert both.function("last_code")() == 5


@pytest.mark.parametrize(("code", "kind"), [*codes.CODES.values(), *codes.ONE_WAY.values()])
def test_the_exception_of_a_code(both: Library, code: int, kind: type[BaseException]) -> None:
    raise_code = both.with_gil.raise_code
    raise_code.restype = py_object
    for text, expected in ((b"sa\xc3\xafd", "saïd"), (None, "the last error")):
        with pytest.raises(kind) as caught:
            raise_code(code, text)
        assert type(caught.value) is kind
        assert str(caught.value) == expected


def test_no_exception_of_no_error(both: Library) -> None:
    with pytest.raises(ValueError, match="expected that of an error, got 0: x"):
        both.with_gil.raise_code(0, b"x")


def test_a_set_exception_survives_every_call(library: Library, backend: int) -> None:
    line = library.with_gil.keeps_exception(py_object(OSError(5, "said")), py_object("no address"), c_int64(backend))
    assert line == 0, f"exports.c:{line}"


@pytest.fixture(scope="module")
def raii(raii_path: Path) -> ctypes.PyDLL:
    loaded = ctypes.PyDLL(str(raii_path))
    assert loaded.prepare() == 0
    return loaded


def test_what_c_plus_plus_takes_it_gives_back(raii: ctypes.PyDLL, gpu: GpuBackend) -> None:
    for _ in range(3):
        for name in ("resources", "failure"):
            line = raii[name](py_object(gpu))
            assert line == 0, f"{name}: raii.cpp:{line}"
    assert gpu.live_alloc_count() == 0


def test_references_are_counted(raii: ctypes.PyDLL) -> None:
    line = raii.references(py_object(["an object"]))
    assert line == 0, f"raii.cpp:{line}"


def test_a_thrown_error_becomes_an_exception(raii: ctypes.PyDLL, gpu: GpuBackend) -> None:
    raii.raises.restype = py_object
    with pytest.raises(errors.OutOfMemory, match="4,611,686,018,427,387,904"):
        raii.raises(py_object(gpu))
    with pytest.raises(TypeError, match="expected a GpuBackend"):
        raii.raises(py_object("gpu"))
