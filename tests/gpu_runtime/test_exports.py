# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lifetimes: memory that somebody else uses is not freed, and lives as long as it is used."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime import Arena, DeviceBuffer, GpuBackend, InvalidPointer, Layout, from_dlpack, view, wrap
from tests.backends import Device, host_only
from tests.gpu_runtime.exchanging import Owner, Producer, X, lent, settle
from tests.ops.harness import download

Refusal = Callable[[GpuBackend, DeviceBuffer], Any]

REFUSED: dict[str, Refusal] = {
    "free": lambda gpu, buffer: gpu.free(buffer.ptr),
    "sweep_unreleased": lambda gpu, buffer: gpu.sweep_unreleased(),
    "close": lambda gpu, buffer: gpu.close(),
}


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("count", [1, 3])
def test_memory_in_use_is_not_freed(device: Device, call: str, count: int) -> None:
    """The call says how many uses there are, and changes nothing: nor does it to the block before the exported one."""
    with device.open() as gpu:
        first = gpu.alloc(64, tag="not exported")
        gpu.memset(first, 1, 64)
        buffer = lent(gpu)
        exports = [buffer.__dlpack__() for _ in range(count)]
        before = gpu.alloc_report()
        for _ in range(2):
            with pytest.raises(
                BufferError, match=rf"{call}: {count} live exports? of 48 bytes at {int(buffer.ptr):#x}"
            ):
                REFUSED[call](gpu, buffer)
        assert gpu.alloc_report() == before
        assert gpu.live_exports() == count
        assert download(gpu, buffer.ptr, X).tolist() == X.tolist()
        assert download(gpu, first, np.zeros(64, np.uint8)).tolist() == [1] * 64
        exports.clear()
        REFUSED[call](gpu, buffer)
        if call != "close":
            assert gpu.find_block(buffer._tensor.address) is None  # type: ignore[union-attr]
            gpu.sweep_unreleased()


def test_only_the_block_in_use_is_kept(gpu: GpuBackend) -> None:
    one, two = lent(gpu), lent(gpu)
    export = one.__dlpack__()
    assert (gpu.live_exports(one.ptr), gpu.live_exports(one.ptr + 47), gpu.live_exports(two.ptr)) == (1, 1, 0)
    assert gpu.live_exports(12) == 0
    gpu.free(two.ptr)
    del export
    gpu.free(one.ptr)


def test_page_locked_memory_in_use_is_not_freed(gpu: GpuBackend) -> None:
    memory = gpu.alloc_host_pinned(48)
    buffer = view(gpu, memory.address, 12, "f32")
    array = np.from_dlpack(buffer)
    with pytest.raises(BufferError, match="free_host_pinned: 1 live export of 48 bytes"):
        gpu.free_host_pinned(memory)
    gpu.sweep_unreleased()  # which does not free page-locked memory
    memory.array[:] = 0
    assert array.ctypes.data == gpu.host_ptr_to_device(memory)
    del array
    gpu.free_host_pinned(memory)
    with pytest.raises(InvalidPointer, match="a block that was freed"):
        _ = buffer.ptr


def test_an_arena_in_use_is_not_freed(gpu: GpuBackend) -> None:
    layout = Layout()
    layout.add("a", 100)
    layout.add("b", 48)
    arena = Arena(gpu, layout, tag="arena")
    export = arena.buffer("b", (3, 4), "f32").__dlpack__()
    for _ in range(2):
        with pytest.raises(BufferError, match="free: 1 live export"):
            arena.free()
    assert arena["b"] == arena.base + 256
    del export
    arena.free()
    arena.free()
    with pytest.raises(InvalidPointer, match="live arena"):
        arena.buffer("b", (3, 4), "f32")


def test_views_do_not_hinder(gpu: GpuBackend) -> None:
    """They only know, afterwards; also when another block has come to the same place."""
    buffer = lent(gpu)
    row, ptr = buffer.row(1), buffer.ptr
    gpu.free(ptr)
    for _ in range(100):
        if gpu.alloc(48) == ptr:
            break
    for one in (buffer, row):
        with pytest.raises(InvalidPointer, match="a block that was freed: 48 bytes at"):
            _ = one.ptr


def test_a_later_block_at_the_same_place_is_another(device: Device) -> None:
    """Known by the block, not by its address; without quarantine, or CuPy's pool, addresses come again soon."""
    options = {"check": False} if device.is_host else {}
    with device.open(**options) as gpu:
        for _ in range(100):
            buffer = view(gpu, gpu.alloc(48), 12, "f32")
            ptr = buffer.ptr
            gpu.free(ptr)
            gpu.synchronize()
            if gpu.alloc(48) == ptr:
                break
        else:
            pytest.skip("the allocator never gave an address again")
        with pytest.raises(InvalidPointer, match="a block that was freed: 48 bytes at"):
            _ = buffer.ptr
        with pytest.raises(InvalidPointer, match="a block that was freed: 48 bytes at"):
            buffer.__dlpack__()
        gpu.sweep_unreleased()


@host_only
@pytest.mark.parametrize("call", REFUSED)
def test_a_refused_call_runs_no_work(device: Device, call: str) -> None:
    """Nothing has changed means that what is enqueued is still to be done."""
    with device.open(order="deferred") as gpu:
        buffer = lent(gpu)
        array = np.from_dlpack(buffer)
        gpu.memset_async(buffer.ptr, 0, 48)
        with pytest.raises(BufferError):
            REFUSED[call](gpu, buffer)
        assert array.tolist() == X.tolist()
        gpu.synchronize()
        assert not array.any()
        del array


def test_closing_a_view_ends_no_export(gpu: GpuBackend) -> None:
    buffer = lent(gpu)
    ptr, export = buffer.ptr, buffer.__dlpack__()
    with buffer:
        pass
    assert buffer.closed
    with pytest.raises(BufferError, match="1 live export"):
        gpu.free(ptr)
    del export
    gpu.free(ptr)


@host_only
def test_an_array_outlives_every_object_of_ours(device: Device) -> None:
    """The backend is kept by the array alone, and goes with it."""
    gpu = device.open()
    array = np.from_dlpack(lent(gpu))
    gone: list[bool] = []
    weakref.finalize(gpu, gone.append, True)
    del gpu
    gc.collect()
    assert array.tolist() == X.tolist()
    assert gone == []
    del array
    gc.collect()
    assert gone == [True]


def lend_owned(gpu: GpuBackend, owner: Owner) -> DeviceBuffer:
    """Return a view of a block that keeps something alive."""
    return view(gpu, gpu.alloc(64), 16, "i32", owner=owner)


def wrap_owned(gpu: GpuBackend, owner: Owner) -> DeviceBuffer:
    """Return a buffer over memory of an owner: an array, or page-locked memory where the GPU is to reach it."""
    if gpu.kind() == "host":
        owner.array = np.zeros(64, np.uint8)
        return wrap(gpu, owner.array.ctypes.data, 64, owner)
    import cupy

    owner.array = cupy.zeros(64, cupy.uint8)
    return wrap(gpu, int(owner.array.data.ptr), 64, owner)


OWNED = pytest.mark.parametrize("make", [lend_owned, wrap_owned])


@OWNED
def test_an_owner_is_kept_by_the_buffer(gpu: GpuBackend, make: Any) -> None:
    owner = Owner()
    gone = owner.gone
    buffer = make(gpu, owner)
    del owner
    gc.collect()
    settle(gpu)
    assert gone == []
    row = buffer.row(0)
    buffer.close()
    settle(gpu)
    assert gone == [], "a row is a buffer as well"
    assert not row.closed
    row.close()
    settle(gpu)
    assert gone == [True]


@OWNED
def test_an_owner_is_kept_by_an_export(gpu: GpuBackend, make: Any) -> None:
    owner = Owner()
    gone = owner.gone
    buffer = make(gpu, owner)
    del owner
    export = buffer.__dlpack__()
    buffer.close()
    gc.collect()
    settle(gpu)
    assert gone == []
    del export
    settle(gpu)
    assert gone == [True]


def test_wrapped_memory_does_not_hinder_the_end(device: Device) -> None:
    """It is not the backend's to free; but the owner is kept until the consumer is done."""
    owner = Owner()
    gone = owner.gone
    with device.open() as gpu:
        buffer = wrap_owned(gpu, owner)
        export = buffer.__dlpack__()
        assert gpu.live_exports() == 0
    del owner, buffer
    gc.collect()
    assert gone == []
    del export
    gc.collect()
    assert gone == [True]


def test_cycles_are_collected(gpu: GpuBackend) -> None:
    """A use inside a reference cycle ends when the collector finds it, whatever it interrupts."""

    class Node:
        pass

    buffer = lent(gpu)
    for _ in range(50):
        node: Any = Node()
        node.self, node.export, node.buffer = node, buffer.__dlpack__(), from_dlpack(gpu, buffer)
    del node
    assert gpu.live_exports() > 0
    gc.collect()
    settle(gpu)
    gpu.free(buffer.ptr)


def test_threads_that_export_and_one_that_frees(gpu: GpuBackend) -> None:
    """Nobody gets memory that is freed, and every refusal is one of the two."""
    stop, errors = threading.Event(), []
    buffers = [lent(gpu)]

    def export() -> None:
        while not stop.wait(0.0005):
            try:
                from_dlpack(gpu, buffers[-1].__dlpack__()).close()
            except InvalidPointer:
                pass
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=export) for _ in range(4)]
    for thread in threads:
        thread.start()
    freed = refused = 0
    for _ in range(300):
        old = buffers[-1]
        time.sleep(0.0002)
        try:
            gpu.free(old.ptr)
            freed += 1
            buffers.append(lent(gpu))
        except BufferError:
            refused += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert freed + refused == 300
    assert freed
    settle(gpu)
    assert gpu.live_exports() == 0
    assert gpu.live_alloc_count() == 1


def cycle(gpu: GpuBackend, buffer: DeviceBuffer, producer: Producer, turn: int) -> None:
    """Export and import: closed, dropped, not consumed, or from somebody else."""
    if turn % 4 == 0:
        from_dlpack(gpu, buffer.__dlpack__(max_version=(1, 0))).close()
    elif turn % 4 == 1:
        from_dlpack(gpu, buffer.__dlpack__())
    elif turn % 4 == 2:
        buffer.__dlpack__()
    else:
        with from_dlpack(gpu, producer):
            pass
        for kept in (producer.deleted, producer.requests, producer._kept):
            kept.clear()


def test_ten_thousand_cycles_leave_nothing(gpu: GpuBackend) -> None:
    buffer, producer = lent(gpu), Producer(np.zeros(4, np.uint8))

    def settled(cycles: int) -> int:
        """Return the allocated blocks of Python's memory after some cycles."""
        for turn in range(cycles):
            cycle(gpu, buffer, producer, turn)
        settle(gpu)
        gc.collect()
        return sys.getallocatedblocks()

    settled(200)
    blocks, before = gpu.live_alloc_count(), settled(200)
    assert settled(10_000) < before + 1000, "less than a block in ten cycles"
    assert (gpu.live_exports(), gpu.live_alloc_count()) == (0, blocks)
    gpu.free(buffer.ptr)
