# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a stream argument may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.streams import LEGACY_STREAM, stream_handle
from tests.backends import host_only


class Protocol:
    """An object whose ``__cuda_stream__`` returns what it is given."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __cuda_stream__(self) -> Any:
        return self._result


class OldProtocol:
    """The early form of the protocol, where ``__cuda_stream__`` was a property."""

    @property
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 5)


@pytest.mark.parametrize("stream", [0, 1, 2, 0x7F00_0000_0000, (1 << 64) - 1])
def test_an_int_is_the_handle(stream: int) -> None:
    assert stream_handle(stream) == stream


def test_a_numpy_integer_is_an_int() -> None:
    stream: Any = np.uint64(12)
    assert type(stream_handle(stream)) is int
    assert stream_handle(stream) == 12


@pytest.mark.parametrize(("raw", "handle"), [(0, LEGACY_STREAM), (1, 1), (2, 2), (99, 99), (np.int64(7), 7)])
def test_protocol(raw: Any, handle: int) -> None:
    assert stream_handle(Protocol((0, raw))) == handle


@pytest.mark.parametrize(
    "result", [None, 5, (0,), (0, 1, 2), [0, 1], "05", (0, 1.0), (0, None), (0, True), ("0", 1), (False, 1)]
)
def test_protocol_that_returns_something_else(result: Any) -> None:
    with pytest.raises(TypeError, match="stream"):
        stream_handle(Protocol(result))


@pytest.mark.parametrize("result", [(1, 5), (-1, 5), (0, -1), (0, 1 << 64)])
def test_protocol_with_values_out_of_range(result: Any) -> None:
    with pytest.raises(ValueError, match="stream"):
        stream_handle(Protocol(result))


@pytest.mark.parametrize("stream", [True, None, 1.0, "0", object(), Protocol, np.bool_(False), OldProtocol()])
def test_refuses_other_types(stream: Any) -> None:
    with pytest.raises(TypeError, match="stream"):
        stream_handle(stream)


@pytest.mark.parametrize("stream", [-1, 1 << 64])
def test_refuses_values_out_of_range(stream: int) -> None:
    with pytest.raises(ValueError, match="stream"):
        stream_handle(stream)


def test_an_error_inside_the_protocol_comes_through() -> None:
    class Broken:
        def __cuda_stream__(self) -> tuple[int, int]:
            raise OSError("the stream is gone")

    with pytest.raises(OSError, match="is gone"):
        stream_handle(Broken())


def test_every_form_reaches_a_stream(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(4)
    own = gpu.create_stream()
    forms: list[Any] = [0, 1, 2, own, Protocol((0, 0)), Protocol((0, own)), gpu.default_stream()]
    with gpu.launch_trace() as trace:
        for form in forms:
            gpu.memset_async(ptr, 0, 4, form)
    default, legacy, thread, *rest = [record.stream for record in trace]
    assert rest == [own, legacy, own, default]
    assert default == gpu.default_stream()
    assert legacy == LEGACY_STREAM
    assert len({default, legacy, thread, own}) == 4


@pytest.mark.parametrize("stream", [3, 0x999])
def test_what_cannot_be_a_stream_is_refused(gpu: GpuBackend, stream: Any) -> None:
    with pytest.raises(DeviceError, match="expected a live stream"):
        gpu.synchronize(stream)


@host_only
@pytest.mark.parametrize("stream", [0xDEAD_BEEF, Protocol((0, 0x5555))])
def test_a_foreign_handle_is_refused(gpu: GpuBackend, stream: Any) -> None:
    with pytest.raises(DeviceError, match="expected a live stream of this backend"):
        gpu.synchronize(stream)
