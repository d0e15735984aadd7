# SPDX-License-Identifier: MIT OR Apache-2.0
"""The end of a backend, and the family of its errors."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from gpu_runtime import errors
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, GpuRuntimeError
from gpu_runtime.handles import KernelHandle
from gpu_runtime.streams import LEGACY_STREAM
from tests.backends import Device


def test_leaks_are_logged_with_their_call_sites(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), device.open() as gpu:
        gpu.free(gpu.alloc(8))
        gpu.alloc(100, tag="forgotten")
        gpu.alloc_managed(200)
        gpu.alloc_host_pinned(300)
    messages = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert all(f"{__file__}:" in message and "in test_leaks_are_logged" in message for message in messages)
    assert "100 bytes" in messages[0]
    assert "for forgotten" in messages[0]
    assert "200 bytes" in messages[1]
    assert "300 bytes" in messages[2]


def test_nothing_is_logged_without_a_leak(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), device.open() as gpu:
        gpu.free(gpu.alloc(8))
        gpu.free_host_pinned(gpu.alloc_host_pinned(8))
    assert caplog.records == []


def test_close_twice_and_after_an_error(device: Device) -> None:
    gpu = device.open()

    def fail() -> None:
        with gpu:
            raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        fail()
    gpu.close()
    gpu.close()
    with pytest.raises(DeviceError, match="closed"):
        gpu.synchronize()


def test_close_in_a_capture(device: Device) -> None:
    gpu = device.open()
    gpu.begin_capture()
    gpu.close()


ARGUMENTS: dict[str, Any] = {
    "nbytes": 8,
    "ptr": 4096,
    "value": 0,
    "src": 4096,
    "dst": 4096,
    "handle": KernelHandle("toy", "toy_f32"),
    "grid": 1,
    "block": 1,
    "shared_mem": 0,
    "stream": LEGACY_STREAM,
    "args": (),
    "module": "toy",
    "name": "toy_f32",
    "dtype": "f32",
    "spans": (),
}


def arguments_of(name: str, pinned: Any) -> dict[str, Any]:
    """Return plausible arguments for one method."""
    buffers = {"copy_h2d": "src", "copy_h2d_async": "src", "copy_h2d_async_retained": "src"}
    buffers |= {"copy_h2d_on_stream": "src"}
    buffers |= {"copy_d2h": "dst", "copy_d2h_on_stream": "dst", "copy_d2h_async": "dst"}
    given = ARGUMENTS | {"memory": pinned}
    if name in buffers:
        given = given | {buffers[name]: bytearray(8)}
    required = [
        parameter.name
        for parameter in inspect.signature(getattr(GpuBackend, name)).parameters.values()
        if parameter.default is parameter.empty and parameter.name != "self"
    ]
    return {parameter: given.get(parameter, 8) for parameter in required}


METHODS = [
    name
    for name, member in vars(GpuBackend).items()
    if inspect.isfunction(member) and not name.startswith("_") and name != "close"
]


@pytest.mark.parametrize("name", METHODS)
def test_every_other_call_is_refused_after_close(device: Device, name: str) -> None:
    gpu = device.open()
    pinned = gpu.alloc_host_pinned(8)
    gpu.close()
    with pytest.raises(DeviceError, match="the backend is closed"):
        getattr(gpu, name)(**arguments_of(name, pinned))


def test_properties_are_refused_after_close(device: Device) -> None:
    gpu = device.open()
    gpu.close()
    with pytest.raises(DeviceError, match="closed"):
        _ = gpu.debug_sync_kernels
    with pytest.raises(DeviceError, match="closed"):
        gpu.debug_sync_kernels = True


def test_errors_are_one_family() -> None:
    classes = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, BaseException)]
    assert len(classes) >= 9
    assert all(issubclass(one, GpuRuntimeError) for one in classes)
    assert issubclass(errors.InvalidPointer, DeviceError)
    assert issubclass(errors.OutOfMemory, DeviceError)
    assert issubclass(errors.OutOfMemory, MemoryError)
    assert issubclass(errors.UnknownKernel, LookupError)
