# SPDX-License-Identifier: MIT OR Apache-2.0
"""The capsules that a buffer gives: what they say, which arguments are taken, and when the export ends."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gpu_runtime import DeviceBuffer, GpuBackend, InvalidPointer, dtypes, view
from gpu_runtime.interop import dlpack
from tests.gpu_runtime.exchanging import X, described, lent

VERSION_1: list[Any] = [(1, 0), (1, 1), (100, 3)]
LEGACY: list[Any] = [None, (0, 0), (0, 8)]
CODES = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}


def device_of(gpu: GpuBackend) -> int:
    return dlpack.CPU if gpu.kind() == "host" else dlpack.CUDA


@pytest.mark.parametrize("version", VERSION_1 + LEGACY)
def test_the_structure(gpu: GpuBackend, version: Any) -> None:
    buffer = lent(gpu)
    found = described(buffer.__dlpack__(max_version=version))
    versioned = version in VERSION_1
    assert found == {
        "name": "dltensor_versioned" if versioned else "dltensor",
        "data": buffer.ptr,
        "offset": 0,
        "device": (device_of(gpu), 0),
        "dtype": (2, 32, 1),
        "shape": (3, 4),
        "strides": (4, 1),
        "flags": 0 if versioned else None,
        "version": (1, 0) if versioned else None,
    }
    assert buffer.__dlpack_device__() == (device_of(gpu), 0)


@pytest.mark.parametrize("dtype", dtypes.NUMPY)
def test_every_element_type(gpu: GpuBackend, dtype: str) -> None:
    found = described(view(gpu, gpu.alloc(64), 4, dtype).__dlpack__())
    code = 4 if dtype == "bf16" else CODES[np.dtype(dtypes.NUMPY[dtype]).kind]
    assert found["dtype"] == (code, 8 * dtypes.itemsize(dtype), 1)


@pytest.mark.parametrize(
    ("shape", "strides", "elements"),
    [
        ((), None, ()),
        ((3,), None, (1,)),
        ((3, 4), (32, 4), (8, 1)),
        ((4, 3), (4, 16), (1, 4)),
        ((3, 4), (0, 4), (0, 1)),
        ((2, 1, 3), None, (3, 3, 1)),
        ((1,) * 32, None, (1,) * 32),
    ],
)
def test_strides_are_elements(gpu: GpuBackend, shape: Any, strides: Any, elements: Any) -> None:
    found = described(view(gpu, gpu.alloc(256), shape, "f32", strides=strides).__dlpack__())
    assert (found["shape"], found["strides"]) == (shape, elements)


def test_negative_strides_start_at_the_first_element(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64)
    found = described(view(gpu, ptr.offset(60), 16, "i32", strides=[-4]).__dlpack__())
    assert (found["data"], found["strides"]) == (ptr + 60, (-1,))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nothing_at_all(gpu: GpuBackend, shape: Any, dtype: str) -> None:
    """Without bytes there is no memory to keep, nor a block to look for."""
    for buffer in (view(gpu, gpu.alloc(64), shape, dtype), view(gpu, 0, shape, dtype)):
        assert described(buffer.__dlpack__())["shape"] == shape
        assert gpu.live_exports() == 0


def test_read_only(gpu: GpuBackend) -> None:
    buffer = lent(gpu, readonly=True)
    assert described(buffer.__dlpack__(max_version=(1, 0)))["flags"] == dlpack.READ_ONLY
    for version in LEGACY:
        with pytest.raises(BufferError, match=r"read-only memory, which DLPack can say from version 1\.0 on"):
            buffer.__dlpack__(max_version=version)
    assert gpu.live_exports() == 0
    copied = described(buffer.__dlpack__(copy=True))  # a copy is the consumer's to write
    assert copied["data"] != buffer.ptr


@pytest.mark.parametrize("array", [X, X.T, X[:, ::2], X[::2], X[1, 2], np.zeros((2, 0, 3), np.int16)], ids=str)
def test_a_copy_is_packed(gpu: GpuBackend, array: Any) -> None:
    whole = lent(gpu)
    first = whole.ptr + (array.ctypes.data - X.ctypes.data if array.size > 0 and array.ndim else 24)
    if array.ndim and array.size:
        buffer = view(gpu, first, array.shape, "f32", strides=array.strides)
    elif array.size:
        buffer, array = view(gpu, first, (), "f32"), np.array(array)
    else:
        buffer = view(gpu, whole.ptr, array.shape, array.dtype)
    live = gpu.live_alloc_count()
    capsule = buffer.__dlpack__(copy=True, dl_device=(1, 0), max_version=(1, 0))
    assert gpu.live_alloc_count() == live
    found = described(capsule)
    assert found["flags"] == dlpack.IS_COPIED
    assert found["device"] == (dlpack.CPU, 0)

    class Once:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    got = np.from_dlpack(Once())
    assert got.tolist() == array.tolist()
    assert got.flags.c_contiguous
    assert gpu.live_exports() == 0


def test_a_copy_where_it_is(gpu: GpuBackend) -> None:
    """On the host it is NumPy's own; on a GPU a block, which goes with the capsule."""
    buffer, live = lent(gpu), gpu.live_alloc_count()
    capsule = buffer.__dlpack__(copy=True, max_version=(1, 0))
    found = described(capsule)
    assert found["data"] != buffer.ptr
    assert found["device"] == buffer.__dlpack_device__()
    assert gpu.live_exports(buffer.ptr) == 0
    gpu.free(buffer.ptr)
    del capsule
    assert gpu.live_alloc_count() == live - 1
    assert gpu.live_exports() == 0


@pytest.mark.parametrize("copy", [None, False])
def test_no_copy(gpu: GpuBackend, copy: Any) -> None:
    buffer = lent(gpu)
    assert described(buffer.__dlpack__(copy=copy))["data"] == buffer.ptr


def test_devices(gpu: GpuBackend) -> None:
    buffer, here = lent(gpu), (device_of(gpu), 0)
    assert described(buffer.__dlpack__(dl_device=here))["data"] == buffer.ptr
    on_host = described(buffer.__dlpack__(dl_device=(1, 0)))
    assert on_host["device"] == (1, 0)
    assert (on_host["data"] == buffer.ptr) == (gpu.kind() == "host")
    for other in ((10, 0), (here[0], 7), (1, 1)):
        with pytest.raises(BufferError, match="dl_device: expected"):
            buffer.__dlpack__(dl_device=other)
    if gpu.kind() == "cuda":
        with pytest.raises(BufferError, match="copy: expected a copy to be allowed"):
            buffer.__dlpack__(dl_device=(1, 0), copy=False)


def test_page_locked_memory(gpu: GpuBackend) -> None:
    """The host may have it as its own; a copy of it is ordinary memory."""
    memory = gpu.alloc_host_pinned(16)
    buffer = view(gpu, memory.address, 4, "i32")
    kind = dlpack.CPU if gpu.kind() == "host" else dlpack.CUDA_HOST
    assert buffer.__dlpack_device__() == (kind, 0)
    assert described(buffer.__dlpack__())["device"] == (kind, 0)
    for found in (described(buffer.__dlpack__(dl_device=(1, 0))), described(buffer.__dlpack__(dl_device=(kind, 0)))):
        assert found["data"] == memory.address
    copied = described(buffer.__dlpack__(copy=True))
    assert copied["device"] == (1, 0)
    assert copied["data"] != memory.address
    gpu.free_host_pinned(memory)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"copy": 1}, ValueError),
        ({"copy": np.array([1, 2, 3])}, ValueError),
        ({"copy": "yes"}, ValueError),
        ({"stream": 0.5}, TypeError),
        ({"stream": True}, TypeError),
        ({"stream": -2}, ValueError),
        ({"stream": "1"}, TypeError),
        ({"max_version": 1}, TypeError),
        ({"max_version": (1,)}, TypeError),
        ({"max_version": ("1", 0)}, TypeError),
        ({"dl_device": 1}, TypeError),
        ({"dl_device": ("cpu", 0)}, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments(gpu: GpuBackend, arguments: dict[str, Any], error: type[Exception]) -> None:
    buffer = lent(gpu)
    with pytest.raises(error, match=f"{next(iter(arguments))}: expected"):
        buffer.__dlpack__(**arguments)
    assert gpu.live_exports() == 0


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_unused_capsule_ends_its_export(gpu: GpuBackend, version: Any) -> None:
    buffer = lent(gpu)
    capsules = [buffer.__dlpack__(max_version=version) for _ in range(3)]
    assert gpu.live_exports(buffer.ptr) == gpu.live_exports() == 3
    capsules.pop()
    assert gpu.live_exports(buffer.ptr) == 2
    capsules.clear()
    assert gpu.live_exports(buffer.ptr) == 0


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_used_capsule_does_not(gpu: GpuBackend, version: Any) -> None:
    """Whoever took the tensor calls the deleter, which is in the structure; the capsule may go before or after."""
    buffer = lent(gpu)
    capsule = buffer.__dlpack__(max_version=version)
    names = dlpack.names_of(capsule)
    assert names is not None
    managed = dlpack.managed_of(capsule, names)
    address, deleter = _address(managed), dlpack.Deleter(managed.deleter)
    dlpack.mark_used(capsule, names)
    del capsule, managed
    assert gpu.live_exports() == 1
    deleter(address)
    assert gpu.live_exports() == 0


def _address(structure: Any) -> int:
    import ctypes

    return ctypes.addressof(structure)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_exception_survives_a_capsule_that_dies_of_it(gpu: GpuBackend, version: Any) -> None:
    """The capsule is an argument of a call that is never made: it goes while the exception is being raised."""
    buffer = lent(gpu)
    with pytest.raises(ZeroDivisionError):
        print(buffer.__dlpack__(max_version=version), 1 // 0)
    gc.collect()
    assert gpu.live_exports() == 0


def test_closed_and_freed(gpu: GpuBackend) -> None:
    closed, freed = lent(gpu), lent(gpu)
    closed.close()
    gpu.free(freed.ptr)
    for buffer, words in ((closed, "one that was closed"), (freed, "a block that was freed")):
        for use in USES:
            with pytest.raises(InvalidPointer, match=words):
                use(buffer)


USES: list[Any] = [
    lambda buffer: buffer.ptr,
    lambda buffer: buffer.row(0),
    DeviceBuffer.copy,
    DeviceBuffer.memoryview,
    DeviceBuffer.__dlpack__,
    DeviceBuffer.__dlpack_device__,
    lambda buffer: buffer.__array_interface__,
    lambda buffer: buffer.__cuda_array_interface__,
    lambda buffer: buffer.__buffer__(0),
]
