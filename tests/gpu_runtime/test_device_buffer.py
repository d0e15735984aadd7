# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeviceBuffer: what a view may be of, what it says, and what a backend that checks memory makes of it."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_runtime import (
    Arena,
    GpuBackend,
    InvalidPointer,
    Layout,
    LogitsArena,
    UninitializedRead,
    view,
    wrap,
)
from gpu_runtime.op import Op, OpRegistry
from tests.backends import Device, host_only
from tests.gpu_runtime.exchanging import Owner, X, lent
from tests.gpu_runtime.toy import OP, SPEC, launch, make_inputs, plan, values
from tests.ops.harness import download, upload


def test_what_it_says(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(100)
    buffer = view(gpu, ptr, (3, 4), "float32", strides=(32, 4), readonly=True, stream=gpu.default_stream())
    assert (buffer.gpu, buffer.ptr, buffer.shape, buffer.dtype) == (gpu, ptr, (3, 4), "f32")
    assert (buffer.strides, buffer.nbytes, buffer.readonly, buffer.closed) == ((32, 4), 48, True, False)
    assert buffer.stream == gpu.default_stream()
    assert repr(buffer).startswith("<DeviceBuffer of f32 (3, 4) on ")
    buffer.close()
    assert buffer.closed
    assert (buffer.shape, buffer.nbytes) == ((3, 4), 48)
    assert "closed" in repr(buffer)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        (ml_dtypes.bfloat16, "bf16"),
        ("int64", "i64"),
        (np.uint8, "u8"),
        (np.dtype("<f2"), "f16"),
        ("bool", "bool"),
        (float, "f64"),
    ],
    ids=str,
)
def test_element_types(gpu: GpuBackend, given: Any, name: str) -> None:
    assert view(gpu, gpu.alloc(64), 4, given).dtype == name


@pytest.mark.parametrize("given", ["f8", "datetime64[s]", ">f4", "S3", None.__class__, "bf32", 3], ids=str)
def test_other_element_types(gpu: GpuBackend, given: Any) -> None:
    if given == "f8":  # NumPy's name of f64
        assert view(gpu, gpu.alloc(64), 4, given).dtype == "f64"
        return
    with pytest.raises(ValueError, match="dtype: expected one of f32, f16, bf16"):
        view(gpu, gpu.alloc(64), 4, given)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, 26, None),
        (4, 25, None),
        (0, (2, 4), (96, 4)),
        (0, (4,), (-4,)),
        (-4, 1, None),
        (100, 1, None),
        (0, (1 << 40, 1 << 40), None),
    ],
)
def test_a_view_lies_in_one_block(gpu: GpuBackend, offset: int, shape: Any, strides: Any) -> None:
    ptr = gpu.alloc(100)
    with pytest.raises(InvalidPointer, match="view: expected a span in one live block"):
        view(gpu, ptr + offset, shape, "f32", strides=strides)


def test_memory_of_nobody(gpu: GpuBackend) -> None:
    for ptr in (0, 64, X.ctypes.data):
        with pytest.raises(InvalidPointer, match="view: expected a span in one live block"):
            view(gpu, ptr, 4, "f32")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"shape": -1}, ValueError, "shape: expected at least 0"),
        ({"shape": (2, 1.5)}, TypeError, "shape: expected an integer"),
        ({"shape": None}, TypeError, "shape: expected a sequence"),
        ({"shape": (1,) * 33}, ValueError, "shape: expected at most 32 axes"),
        ({"shape": (2, 2), "strides": (4,)}, ValueError, r"strides: expected 2 of them"),
        ({"strides": ("x",)}, TypeError, "strides: expected an integer"),
        ({"stream": "x"}, TypeError, "stream: expected an int"),
        ({"stream": True}, TypeError, "stream: expected an int"),
        ({"ptr": -1}, ValueError, "view: ptr: expected an address"),
        ({"ptr": 1.0}, TypeError, "view: ptr: expected an integer"),
    ],
    ids=str,
)
def test_wrong_arguments(gpu: GpuBackend, arguments: Any, error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"ptr": gpu.alloc(64), "shape": (4,), "dtype": "f32"} | arguments
    with pytest.raises(error, match=words):
        view(gpu, **given)


def test_rows(gpu: GpuBackend) -> None:
    buffer = lent(gpu, readonly=True)
    row = buffer.row(2)
    assert (row.ptr, row.shape, row.strides, row.readonly) == (buffer.ptr + 32, (4,), (4,), True)
    assert row.row(3).shape == ()
    for index in (3, -1):
        with pytest.raises(ValueError, match="row: index: expected 0 to 2"):
            buffer.row(index)
    with pytest.raises(ValueError, match="at least one axis"):
        row.row(0).row(0)


def test_copies(gpu: GpuBackend) -> None:
    whole = lent(gpu)
    turned = view(gpu, whole.ptr + 44, (4, 3), "f32", strides=(-4, -16))
    with turned.copy() as copy:
        assert copy.strides == (12, 4)
        assert download(gpu, copy.ptr, np.empty((4, 3), np.float32)).tolist() == X[::-1, ::-1].T.tolist()
        live = gpu.live_alloc_count()
    assert gpu.live_alloc_count() == live - 1


def test_regions_of_an_arena(gpu: GpuBackend) -> None:
    layout = Layout()
    layout.add("a", 100)
    layout.add("b", 48)
    assert layout.sizes == {"a": 100, "b": 48}
    arena = Arena(gpu, layout, tag="arena")
    buffer = arena.buffer("b", (3, 4), "f32", readonly=True, stream=gpu.default_stream())
    assert (buffer.ptr, buffer.readonly, buffer.stream) == (arena["b"], True, gpu.default_stream())
    for shape in (26, (5, 6)):
        with pytest.raises(ValueError, match=r"arena: a: expected at most 100 bytes, got"):
            arena.buffer("a", shape, "f32")
    with pytest.raises(KeyError):
        arena.buffer("c", 1, "f32")
    arena.free()


def test_rows_of_a_logits_arena(gpu: GpuBackend) -> None:
    arena = LogitsArena(gpu.alloc(4 * 128 * 2), 4, 97, "bf16")
    buffer = arena.buffer(gpu, 1, 3)
    assert (buffer.ptr, buffer.shape, buffer.strides, buffer.dtype) == (arena.row(1), (3, 97), (256, 2), "bf16")
    assert arena.buffer(gpu, 3).shape == (1, 97)
    for index, count in ((4, 1), (2, 3), (0, 0), (-1, 1)):
        with pytest.raises(InvalidPointer, match="logits"):
            arena.buffer(gpu, index, count)
    gpu.free(arena.base)
    with pytest.raises(InvalidPointer, match="block that was freed"):
        _ = buffer.ptr
    with pytest.raises(InvalidPointer, match="live block"):
        arena.buffer(gpu, 0)


# wrapped memory


@host_only
def test_wrapped_memory_is_used_by_address(gpu: GpuBackend) -> None:
    owner = Owner(np.arange(16, dtype=np.float32))
    assert owner.array is not None
    with wrap(gpu, owner.array.ctypes.data, 64, owner) as buffer:
        assert (buffer.dtype, buffer.shape, buffer.nbytes) == ("u8", (64,), 64)
        launch(gpu, values(buffer.ptr, buffer.ptr + 16))
        gpu.copy_d2d(buffer.ptr, buffer.ptr + 32, 16)
        assert owner.array[:12].tolist() == [0, 1, 2, 3, 0, 2, 4, 6, 0, 1, 2, 3]
        part = gpu.alloc(8)
        gpu.copy_d2d(buffer.ptr + 4, part, 8)
        assert download(gpu, part, np.empty(2, np.float32)).tolist() == [1, 2]
        with pytest.raises(InvalidPointer, match="memory of others"):
            gpu.copy_d2d(buffer.ptr + 32, part, 64)


@host_only
def test_wrapped_memory_may_not_be_there(gpu: GpuBackend) -> None:
    with pytest.raises(InvalidPointer, match="NULL"):
        wrap(gpu, 0, 4, None)
    for address in (1 << 63, (1 << 64) - 4):
        with pytest.raises(InvalidPointer, match="foreign memory: expected a host address"):
            wrap(gpu, address, 8, None)
    empty = wrap(gpu, 0, 0, None)
    assert (empty.shape, empty.nbytes) == ((0,), 0)
    for arguments in ((1, -1), (-1, 4)):
        with pytest.raises(ValueError, match="wrap: "):
            wrap(gpu, *arguments, None)


def test_wrapped_memory_does_not_begin_in_a_block(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64)
    with pytest.raises(InvalidPointer, match="foreign memory: expected a span in one live block, got 1 byte past"):
        wrap(gpu, ptr + 32, 33, None)


def test_a_wrapped_block_is_the_block(gpu: GpuBackend) -> None:
    """An address of ours is ours, whoever brings it: a free is known."""
    ptr = upload(gpu, X)
    buffer = wrap(gpu, ptr + 16, 16, None)
    gpu.free(ptr)
    with pytest.raises(InvalidPointer, match="block that was freed"):
        _ = buffer.ptr


# a checking backend


@host_only
def test_what_others_write_is_no_fault(device: Device) -> None:
    """A block given away to be written counts as written, also between the outputs of a kernel."""
    with device.open() as gpu:
        ptr = gpu.alloc(64)
        with pytest.raises(UninitializedRead):
            gpu.copy_d2h(ptr, bytearray(4))
        array = np.asarray(view(gpu, ptr, 8, "f32"))
        array[:] = 1
        gpu.copy_d2h(ptr, bytearray(32))
        with pytest.raises(UninitializedRead, match=re.escape("byte 32 of 64 bytes")):
            gpu.copy_d2h(ptr, bytearray(64))
        del array


@host_only
def test_what_others_write_beside_an_output_is_no_fault(device: Device) -> None:
    """They may do so while a kernel runs, which nobody else may."""
    theirs: list[np.ndarray[Any, Any]] = []

    def reference(*, out: np.ndarray[Any, Any], **_: Any) -> None:
        out[...] = 1
        for array in theirs:
            array[4] += 1

    ops = OpRegistry()
    ops.register(Op(SPEC, reference, make_inputs, (), plan=plan, source=OP.source))
    with device.open(ops=ops) as gpu:
        source, out = upload(gpu, X), upload(gpu, X)
        launch(gpu, values(source, out))
        theirs.append(np.asarray(view(gpu, out, 12, "f32")))
        launch(gpu, values(source, out))
        gpu.synchronize()
        assert theirs[0][:5].tolist() == [1, 1, 1, 1, 5]
        theirs.clear()


@host_only
def test_what_others_only_read_stays_as_it_is(device: Device) -> None:
    with device.open() as gpu:
        ptr = gpu.alloc(64)
        array = np.from_dlpack(view(gpu, ptr, 8, "f32", readonly=True))
        with pytest.raises(UninitializedRead):
            gpu.copy_d2h(ptr, bytearray(4))
        del array


@host_only
def test_a_copy_of_what_was_never_written(device: Device) -> None:
    with device.open() as gpu, pytest.raises(UninitializedRead):
        view(gpu, gpu.alloc(64), 8, "f32").__dlpack__(copy=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": None}, "dtype: expected one of"),
        ({"readonly": "no"}, "readonly: expected True or False"),
        ({"readonly": 1}, "readonly: expected True or False"),
        ({"shape": b"\x04"}, "shape: expected a sequence of integers"),
        ({"shape": {4}}, "shape: expected a sequence of integers"),
        ({"shape": {4: 1}}, "shape: expected a sequence of integers"),
        ({"shape": "4"}, "shape: expected a sequence of integers"),
    ],
    ids=str,
)
def test_what_could_be_taken_for_something_else(gpu: GpuBackend, changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"shape": 4, "dtype": "u8", **changes}
    with pytest.raises((TypeError, ValueError), match=words):
        view(gpu, gpu.alloc(64), **arguments)


@pytest.mark.parametrize("request_", [{"dl_device": ("1", "0")}, {"dl_device": "10"}, {"dl_device": (1.9, 0.2)}])
def test_devices_that_are_no_integers(gpu: GpuBackend, request_: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="dl_device: expected a pair of integers"):
        view(gpu, gpu.alloc(64), 4, "u8").__dlpack__(**request_)


def test_a_version_that_is_no_integer(gpu: GpuBackend) -> None:
    with pytest.raises(TypeError, match="max_version"):
        view(gpu, gpu.alloc(64), 4, "u8").__dlpack__(max_version=(1, "x"))  # type: ignore[arg-type]


def test_a_copy_that_cannot_be_made_says_so_alone(gpu: GpuBackend) -> None:
    """Nothing is raised where nobody hears of it: pytest makes that an error."""
    with pytest.raises(TypeError):
        copy.deepcopy(view(gpu, gpu.alloc(64), 4, "u8"))
    gc.collect()


def test_an_exception_in_a_with_block_is_not_replaced(device: Device) -> None:
    """By the one that says what hinders closing: it is a note of the first."""
    held: list[Any] = []

    def export(backend: GpuBackend, error: str) -> None:
        with backend as gpu:
            held.append(view(gpu, gpu.alloc(64), 4, "u8").__dlpack__())
            if error:
                raise KeyError(error)

    first, second = device.open(), device.open()
    with pytest.raises(KeyError) as found:
        export(first, "mine")
    assert "not closed" in found.value.__notes__[0]
    with pytest.raises(BufferError):
        export(second, "")
    held.clear()
    first.close()
    second.close()
