# SPDX-License-Identifier: MIT OR Apache-2.0
"""The scenarios that NumPy tests its own DLPack exporter with, asked of ours, with NumPy as the consumer.

What NumPy counts by references to the array, is counted by `live_exports` here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import DeviceBuffer, GpuBackend, dtypes, view
from tests.backends import host_only
from tests.gpu_runtime.exchanging import X, lent

pytestmark = host_only

VERSIONS = [(0, 0), None, (1, 0), (100, 3)]


class Old:
    """A producer of before versions: its ``__dlpack__`` knows a stream and nothing else."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.__dlpack_device__()

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._buffer.__dlpack__(stream=stream)


FORMS = pytest.mark.parametrize("form", [lambda buffer: buffer, Old], ids=["new", "old"])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_keeps_the_memory(gpu: GpuBackend, version: Any) -> None:
    buffer = lent(gpu)
    capsule = buffer.__dlpack__(max_version=version)
    assert gpu.live_exports(buffer.ptr) == 1
    del capsule
    assert gpu.live_exports(buffer.ptr) == 0


@FORMS
def test_an_array_keeps_the_memory(gpu: GpuBackend, form: Any) -> None:
    buffer = lent(gpu)
    array = np.from_dlpack(form(buffer))
    part = array[1:, 1]
    del array
    assert gpu.live_exports(buffer.ptr) == 1
    del part
    assert gpu.live_exports(buffer.ptr) == 0


@FORMS
@pytest.mark.parametrize("dtype", [name for name in dtypes.NUMPY if name != "bf16"])
def test_element_types(gpu: GpuBackend, form: Any, dtype: str) -> None:
    array = np.arange(5).astype(dtypes.NUMPY[dtype])
    buffer = lent(gpu, array)
    got = np.from_dlpack(form(buffer))
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()
    assert got.ctypes.data == buffer.ptr


def test_an_element_type_that_numpy_does_not_know(gpu: GpuBackend) -> None:
    """NumPy refuses the capsule, which ends its export."""
    buffer = view(gpu, gpu.alloc(16), 8, "bf16")
    with pytest.raises((BufferError, RuntimeError), match="dtype"):  # RuntimeError up to NumPy 2.4
        np.from_dlpack(buffer)
    assert gpu.live_exports() == 0


@pytest.mark.parametrize("part", [np.s_[0], np.s_[:, 0], np.s_[1, :], np.s_[::2, 1:3], np.s_[::-1, ::-1], np.s_[2, 3]])
def test_parts(gpu: GpuBackend, part: Any) -> None:
    whole, wanted = lent(gpu), X[part]
    wanted = np.asarray(wanted)
    offset = int(X[part].ctypes.data - X.ctypes.data) if isinstance(X[part], np.ndarray) else (2 * 4 + 3) * 4
    buffer = view(gpu, whole.ptr + offset, wanted.shape, "f32", strides=wanted.strides)
    got = np.from_dlpack(buffer)
    assert got.tolist() == wanted.tolist()
    assert got.ctypes.data == whole.ptr + offset


def test_strides_that_are_no_multiple_of_the_element(gpu: GpuBackend) -> None:
    buffer = view(gpu, gpu.alloc(64), 3, "i32", strides=[5])
    with pytest.raises(BufferError, match="itemsize"):
        np.from_dlpack(buffer)
    assert gpu.live_exports() == 0


@pytest.mark.parametrize("axes", range(33))
def test_many_axes(gpu: GpuBackend, axes: int) -> None:
    assert np.from_dlpack(lent(gpu, np.zeros((1,) * axes))).shape == (1,) * axes


def test_axes_of_one_element_may_have_any_stride(gpu: GpuBackend) -> None:
    buffer = view(gpu, lent(gpu, np.arange(100, dtype=np.float64)).ptr, (10, 5, 1), "f64", strides=(8, 80, 4))
    got = np.from_dlpack(buffer)
    assert got[:, :, 0].tolist() == [[i + 10 * j for j in range(5)] for i in range(10)]


def test_no_axis(gpu: GpuBackend) -> None:
    got = np.from_dlpack(lent(gpu, np.array(2.5)))
    assert (got.shape, got.item()) == ((), 2.5)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_exception_while_a_capsule_lives(gpu: GpuBackend, version: Any) -> None:
    buffer = lent(gpu)

    def fail() -> None:
        _capsule = buffer.__dlpack__(max_version=version)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gpu.live_exports() == 0


def test_read_only(gpu: GpuBackend) -> None:
    buffer = lent(gpu, readonly=True)
    with pytest.raises(BufferError):
        buffer.__dlpack__()
    with pytest.raises(BufferError):
        np.from_dlpack(Old(buffer))
    assert not np.from_dlpack(buffer).flags.writeable


def test_writable(gpu: GpuBackend) -> None:
    """Without a version NumPy takes it for read-only, and up to 2.2.0 always; ours is as good as NumPy's own."""
    buffer = lent(gpu)
    assert np.from_dlpack(buffer).flags.writeable == np.from_dlpack(X.copy()).flags.writeable
    assert not np.from_dlpack(Old(buffer)).flags.writeable


def test_copies(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    for array in (np.from_dlpack(buffer), np.from_dlpack(buffer, copy=False)):
        assert array.ctypes.data == buffer.ptr
    array = np.from_dlpack(buffer, copy=True)
    assert array.tolist() == X.tolist()
    assert array.ctypes.data != buffer.ptr
    gpu.memset(buffer.ptr, 0, 48)
    assert array.tolist() == X.tolist()


def test_devices(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    assert buffer.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(buffer, device="cpu").ctypes.data == buffer.ptr
    assert np.from_dlpack(buffer, device=None).__dlpack_device__() == (1, 0)
    with pytest.raises(ValueError, match="Device"):
        np.from_dlpack(buffer, device="gpu")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        buffer.__dlpack__(dl_device=(10, 0))


def test_streams(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    buffer.__dlpack__(stream=None)
    buffer.__dlpack__(stream=-1)
    for stream in (0, 1, 2, 0x1000):
        with pytest.raises(ValueError, match="stream: expected None or -1"):
            buffer.__dlpack__(stream=stream)


def test_one_capsule_twice(gpu: GpuBackend) -> None:
    capsule = lent(gpu).__dlpack__(max_version=(1, 0))

    class Same:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    array = np.from_dlpack(Same())
    with pytest.raises(ValueError, match="incorrect name"):
        np.from_dlpack(Same())
    assert array.tolist() == X.tolist()
    assert gpu.live_exports() == 1


def test_writes_arrive_on_both_sides(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    array = np.from_dlpack(buffer)
    np.asarray(buffer)[1] = 9
    assert array[1].tolist() == [9, 9, 9, 9]
    got = np.empty_like(X)
    gpu.copy_d2h(buffer.ptr, got)
    assert got[1].tolist() == [9, 9, 9, 9]
    gpu.memset(buffer.ptr, 0, 48)
    assert not array.any()
