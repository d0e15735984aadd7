# SPDX-License-Identifier: MIT OR Apache-2.0
"""Blocks, the ledger and redzones."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_runtime
from gpu_runtime import DevicePtr, GpuBackend, InvalidPointer, OutOfMemory
from gpu_runtime.host import HostBackend
from gpu_runtime.host.memory import machine_bytes
from gpu_runtime.ledger import Ledger
from tests.backends import Device, cuda_only, damaged, host_only
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

Call = Callable[[], Any]


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 4096, np.int16(300)])
@pytest.mark.parametrize("managed", [False, True])
def test_alloc(gpu: GpuBackend, nbytes: Any, managed: bool) -> None:
    ptr = (gpu.alloc_managed if managed else gpu.alloc)(nbytes, tag="a block")
    assert type(ptr) is DevicePtr
    assert ptr % 256 == 0
    (entry,) = gpu.alloc_report()
    assert (entry.ptr, entry.nbytes, entry.tag) == (ptr, nbytes, "a block")
    assert type(entry.nbytes) is type(gpu.live_bytes()) is int
    assert entry.site.startswith(f"{__file__}:")
    assert entry.site.endswith("in test_alloc")
    assert (gpu.live_bytes(), gpu.live_alloc_count()) == (nbytes, 1)
    assert 0 < gpu.free_memory() <= gpu.total_memory() - int(nbytes)
    gpu.free(ptr)
    assert (gpu.live_bytes(), gpu.live_alloc_count(), gpu.alloc_report()) == (0, 0, [])


@host_only
def test_free_memory_is_exact(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(300)
    assert gpu.free_memory() == gpu.total_memory() - 300
    gpu.free(ptr)
    assert gpu.free_memory() == gpu.total_memory() == 1 << 20


@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 40)])
def test_alloc_refuses_sizes_below_one(gpu: GpuBackend, nbytes: int) -> None:
    for alloc in (gpu.alloc, gpu.alloc_managed, gpu.alloc_host_pinned):
        with pytest.raises(ValueError, match="nbytes: expected at least 1"):
            alloc(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, 8.0, "8", None, True, np.float32(8)])
def test_alloc_refuses_other_types(gpu: GpuBackend, nbytes: Any) -> None:
    for alloc in (gpu.alloc, gpu.alloc_managed, gpu.alloc_host_pinned):
        with pytest.raises(TypeError, match="nbytes: expected an integer"):
            alloc(nbytes)
    assert gpu.live_alloc_count() == 0


def test_the_machine_is_the_limit_unless_one_is_given() -> None:
    with HostBackend() as gpu:
        assert gpu.total_memory() == machine_bytes() > 1 << 27


@pytest.mark.parametrize(("limit", "error"), [(-1, ValueError), (1e6, TypeError), (True, TypeError)])
def test_limit_is_a_count(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="memory_limit"):
        HostBackend(memory_limit=limit)


def test_report_is_in_the_order_of_allocation(gpu: GpuBackend) -> None:
    ptrs = [gpu.alloc(64 + index) for index in range(9)]
    gpu.free(ptrs.pop(4))
    assert [entry.ptr for entry in gpu.alloc_report()] == ptrs


def test_blocks_do_not_overlap(gpu: GpuBackend) -> None:
    spans = sorted((int(ptr), int(ptr) + 100) for ptr in [gpu.alloc(100) for _ in range(50)])
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("null", [0, DevicePtr.NULL, np.uint64(0)])
def test_free_of_null_does_nothing(gpu: GpuBackend, null: Any) -> None:
    gpu.alloc(8)
    gpu.free(null)
    assert gpu.live_alloc_count() == 1


@pytest.mark.parametrize("ptr", [None, False, True, 0.0, "", [], 256.0])
def test_free_refuses_what_is_not_an_address(gpu: GpuBackend, ptr: Any) -> None:
    with pytest.raises(TypeError, match="free: ptr"):
        gpu.free(ptr)


def test_free_refuses_every_other_address(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64, tag="weights")
    with pytest.raises(InvalidPointer, match=r"it lies inside 64 bytes at .* for weights, allocated at"):
        gpu.free(ptr + 8)
    for foreign in (ptr - 8, ptr + 64, 0xDEAD_0000, (1 << 64) - 1):
        with pytest.raises(InvalidPointer, match="no live allocation starts there"):
            gpu.free(foreign)
    gpu.free(ptr)
    with pytest.raises(InvalidPointer, match="freed twice"):
        gpu.free(ptr)
    with pytest.raises(ValueError, match="free: ptr"):
        gpu.free(-8)


def test_a_block_of_another_backend_is_foreign(gpu: GpuBackend, device: Device) -> None:
    with device.open() as other:
        ptr = other.alloc(64)
        with pytest.raises(InvalidPointer):
            gpu.free(ptr)
        if device.is_host:
            with pytest.raises(InvalidPointer):
                gpu.memset(ptr, 0, 8)
        else:
            gpu.memset(ptr, 5, 8)
            assert download(other, ptr, np.zeros(8, np.uint8)).tolist() == [5] * 8
        other.free(ptr)


def test_sweep(gpu: GpuBackend) -> None:
    ptrs = [gpu.alloc(16), gpu.alloc(32)]
    assert [entry.ptr for entry in gpu.sweep_unreleased()] == ptrs
    assert gpu.live_bytes() == 0
    assert gpu.sweep_unreleased() == []
    with pytest.raises(InvalidPointer):
        gpu.free(ptrs[0])


def test_out_of_memory_names_the_holders_and_leaves_the_backend_usable(gpu: GpuBackend) -> None:
    sizes = [1000, 5000, 3000, 2000, 4000, 6000]
    kept = [gpu.alloc(nbytes, tag=f"holder {nbytes}") for nbytes in sizes]
    with pytest.raises(OutOfMemory, match="for the cache do not fit") as caught:
        gpu.alloc(1 << 45, tag="the cache")
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.requested, error.live, error.limit) == (1 << 45, sum(sizes), gpu.total_memory())
    text = str(error)
    order = [text.index(f"holder {nbytes}") for nbytes in sorted(sizes, reverse=True)[:5]]
    assert order == sorted(order), "largest first"
    assert "holder 1000" not in text, "the largest five"
    assert __file__ in text
    data = np.arange(250, dtype=np.uint8)
    gpu.copy_h2d(data, kept[0])
    assert np.array_equal(download(gpu, kept[0], data), data)
    gpu.free(gpu.alloc((1 << 20) - sum(sizes), tag="what is left"))


@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 63) - 1, 1 << 63, 1 << 70])
def test_sizes_that_no_machine_has(device: Device, nbytes: int) -> None:
    with device.open(memory_limit=1 << 80) as gpu:
        for alloc in (gpu.alloc, gpu.alloc_host_pinned):
            with pytest.raises(OutOfMemory):
                alloc(nbytes)
        gpu.free(gpu.alloc(64))


@pytest.mark.parametrize("value", [0, 255, np.uint8(7)])
def test_memset(gpu: GpuBackend, value: Any) -> None:
    ptr = upload(gpu, np.full(64, 99, dtype=np.uint8))
    gpu.memset(ptr + 3, value, 10)
    count: Any = np.int32(4)
    gpu.memset_async(ptr + 20, value, count)
    expected = np.full(64, 99, dtype=np.uint8)
    expected[3:13] = expected[20:24] = value
    assert np.array_equal(download(gpu, ptr, expected), expected)


@pytest.mark.parametrize("value", [-1, 256, 1.5, True, "a", None])
def test_memset_refuses_what_is_not_a_byte(gpu: GpuBackend, value: Any) -> None:
    ptr = gpu.alloc(8)
    with pytest.raises((TypeError, ValueError), match="memset: value"):
        gpu.memset(ptr, value, 8)


def test_memset_stays_inside_its_block(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64)
    gpu.memset(ptr, 0, 64)
    outside = ((64, 1), (-1, 2)) if gpu.kind() == "host" else ()  # on a GPU, those are somebody else's
    for start, nbytes in ((0, 65), (63, 2), (0, 1 << 63), *outside):
        with pytest.raises(InvalidPointer, match="memset: ptr"):
            gpu.memset(ptr + start, 1, nbytes)
    with pytest.raises(ValueError, match="nbytes: expected at least 0"):
        gpu.memset(ptr, 1, -1)
    assert not download(gpu, ptr, np.zeros(64, dtype=np.uint8)).any()
    assert damaged(gpu) == []


def test_mark_written_checks_its_span(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(64)
    gpu.mark_written(ptr + 8, 56)
    gpu.mark_written(ptr, 0)
    with pytest.raises(InvalidPointer, match="mark_written"):
        gpu.mark_written(ptr + 8, 57)


@host_only
@pytest.mark.parametrize("offset", [-1, -200, 100, 300], ids=["before", "long before", "after", "long after"])
def test_redzones(gpu: GpuBackend, offset: int) -> None:
    gpu.alloc(100)
    ptr = gpu.alloc(100, tag="victim")
    gpu.alloc(100)
    assert gpu.scan_redzones() == []
    ctypes.memset(int(ptr) + offset, 0x11, 1)
    assert [(entry.ptr, entry.tag) for entry in gpu.scan_redzones()] == [(ptr, "victim")]
    gpu.poison_redzones()
    assert gpu.scan_redzones() == []


@cuda_only
@pytest.mark.parametrize("offset", [-16, -4, 100], ids=["before", "just before", "after"])
def test_redzones_on_a_gpu(gpu: GpuBackend, device: Device, offset: int) -> None:
    """A kernel writes beside a block of 100 bytes: four floats from 16 before it, one just before, one just after."""
    if not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    x = upload(gpu, np.ones(4, dtype=np.float32))
    gpu.alloc(100)
    ptr = gpu.alloc(100, tag="victim")
    gpu.alloc(100)
    assert gpu.scan_redzones() == []
    launch(gpu, values(x, ptr + offset, width=4 if offset == -16 else 1))
    gpu.synchronize()
    assert [(entry.ptr, entry.tag) for entry in gpu.scan_redzones()] == [(ptr, "victim")]
    gpu.poison_redzones()
    assert gpu.scan_redzones() == []


@host_only
def test_writes_inside_a_block_are_no_damage(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(100)
    ctypes.memset(int(ptr), 0x11, 100)
    assert gpu.scan_redzones() == []
    assert ctypes.string_at(ptr, 100) == b"\x11" * 100


def test_pinned(gpu: GpuBackend) -> None:
    memory = gpu.alloc_host_pinned(100)
    assert (memory.nbytes, memory.array.shape, memory.array.ctypes.data) == (100, (100,), memory.address)
    assert gpu.live_bytes() == 0, "it is host memory"
    device = gpu.host_ptr_to_device(memory)
    assert type(device) is DevicePtr
    memory.array[:] = np.arange(100)
    ptr = gpu.alloc(100)
    gpu.copy_d2d(device, ptr, 100)
    gpu.memset(ptr, 5, 10)
    gpu.copy_d2d(ptr, device, 50)
    assert memory.array.tolist() == [5] * 10 + list(range(10, 100))
    with pytest.raises(InvalidPointer):
        gpu.copy_d2d(ptr, device + 1, 100)
    gpu.free_host_pinned(memory)
    calls: list[Call] = [lambda: gpu.free_host_pinned(memory), lambda: gpu.host_ptr_to_device(memory)]
    if gpu.kind() == "host":
        calls.append(lambda: gpu.memset(device, 0, 1))
    for call in calls:
        with pytest.raises(InvalidPointer):
            call()


def test_pinned_is_not_freed_as_device_memory(gpu: GpuBackend) -> None:
    memory = gpu.alloc_host_pinned(8)
    with pytest.raises(InvalidPointer):
        gpu.free(memory.address)
    gpu.free_host_pinned(memory)


@pytest.mark.parametrize("memory", [None, 0, 4096, np.zeros(4)])
def test_pinned_calls_refuse_other_objects(gpu: GpuBackend, memory: Any) -> None:
    for call in (gpu.free_host_pinned, gpu.host_ptr_to_device):
        with pytest.raises(TypeError, match="alloc_host_pinned"):
            call(memory)


def test_a_neighbour_with_the_same_prefix_is_a_caller(gpu: GpuBackend) -> None:
    path = f"{Path(gpu_runtime.__file__).parent}_tools.py"
    exec(compile("gpu.alloc(8)", path, "exec"), {"gpu": gpu})
    assert gpu.alloc_report()[0].site == f"{path}:1 in <module>"


def test_ledger_finds_the_block_of_an_address() -> None:
    ledger = Ledger()
    for base in (3000, 1000, 2000):
        ledger.add(DevicePtr(base), 100, f"at {base}")
    found = {address: ledger.find(address) for address in (999, 1000, 1099, 1100, 2050, 3099, 3100)}
    names = {address: entry.tag if entry else None for address, entry in found.items()}
    assert names == {
        999: None,
        1000: "at 1000",
        1099: "at 1000",
        1100: None,
        2050: "at 2000",
        3099: "at 3000",
        3100: None,
    }
    ledger.remove(DevicePtr(2000))
    assert ledger.find(2050) is None
    assert [entry.tag for entry in ledger] == ["at 3000", "at 1000"]
