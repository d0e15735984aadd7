# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small copies from and to page-locked memory: every byte, and no other; when a kernel makes them, and how it is told.

What only a GPU can show is in tests/gpu/test_small_copies.py.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.ledger import Ledger
from gpu_runtime.pointer import DevicePtr
from tests.backends import needs_cupy
from tests.hammering import eager_switching, hammer

LARGEST: Final = 65_536
SIZES: Final = (1, 3, 12, 15, 16, 17, 48, 511, 512, 513, 768, 2047, 2048, 2049, 30_000, 65_535, LARGEST, LARGEST + 1)
OFFSETS: Final = ((0, 0), (16, 32), (4, 4), (4, 8), (1, 0), (0, 1), (7, 7), (3, 5))
ROOM: Final = LARGEST + 64
THREADS: Final = 8
FUNCTION: Final = 0x5000


@pytest.mark.parametrize("call", ["copy_h2d_async", "copy_d2h_async"])
def test_every_byte_arrives_and_no_other_changes(gpu: GpuBackend, call: str) -> None:
    drawn = np.random.default_rng(7).integers(0, 256, (2, ROOM), dtype=np.uint8)
    memory, ptr, seen = gpu.alloc_host_pinned(ROOM), gpu.alloc(ROOM), np.empty(ROOM, np.uint8)
    for size in SIZES:
        for at_host, at_device in OFFSETS:
            memory.array[:] = drawn[0]
            gpu.copy_h2d(drawn[1], ptr)
            host, device = slice(at_host, at_host + size), slice(at_device, at_device + size)
            expected = drawn.copy()
            if call == "copy_h2d_async":
                gpu.copy_h2d_async(memory.array[host], ptr + at_device)
                expected[1, device] = drawn[0, host]
            else:
                gpu.copy_d2h_async(ptr + at_device, memory.array[host])
                expected[0, host] = drawn[1, device]
            gpu.copy_d2h(ptr, seen)
            assert np.array_equal(memory.array, expected[0]), (size, at_host, at_device)
            assert np.array_equal(seen, expected[1]), (size, at_host, at_device)
    gpu.free_host_pinned(memory)


# how the kernel is told, without a driver


class Context:
    """Every context is current."""

    current = relaxed = staticmethod(nullcontext)

    @staticmethod
    def call(function: Any, *arguments: Any) -> Any:
        return function(*arguments)


Launch = tuple[int, int, int, int, bool]
"""The stream, what the parameters hold (dst, src, nbytes), and whether the kernel may start early."""


class Driver:
    """Notes launches, with the parameters as they are when the driver reads them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.geometries: set[tuple[int, ...]] = set()

    def launch(self, function: int, *rest: int) -> None:
        *geometry, stream, params, extra = rest
        self._note(function, tuple(geometry), stream, params, extra, early=False)

    def launch_early(self, config: Any, function: Any, params: int, extra: int) -> tuple[Any]:
        from cuda.bindings import driver as bindings

        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        geometry = (*grid, *block, config.sharedMemBytes)
        self._note(int(function), geometry, int(config.hStream), params, extra, early=True)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def _note(
        self, function: int, geometry: tuple[int, ...], stream: int, params: int, extra: int, *, early: bool
    ) -> None:
        assert (function, extra) == (FUNCTION, 0)
        where = (ctypes.c_uint64 * 3).from_address(params)
        dst, src = (ctypes.c_uint64.from_address(at).value for at in where[:2])
        nbytes = ctypes.c_int32.from_address(where[2]).value
        self.geometries.add(geometry)
        assert geometry[1:] == (1, 1, geometry[3], 1, 1, 0)
        assert geometry[3] % 32 == 0
        assert geometry[3] <= 256
        threads = geometry[0] * geometry[3]
        assert 0 <= 16 * threads - nbytes < 16 * geometry[3], "a thread for every 16 bytes, and no block too many"
        self.launches.append((stream, dst, src, nbytes, early))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Driver:
    from cuda.bindings import driver as bindings

    from gpu_runtime.cuda import kernels, modules, small_copies

    told = Driver()
    monkeypatch.setattr(modules, "function_of", lambda context, module, name: FUNCTION)
    monkeypatch.setattr(modules, "load", lambda *arguments: 1)
    monkeypatch.setattr(small_copies, "driver", SimpleNamespace(launchKernel=told.launch))
    recording = SimpleNamespace(**{**vars(bindings), "cuLaunchKernelEx": told.launch_early})
    monkeypatch.setattr(kernels, "bindings", recording)
    return told


def opened(arch: str = "sm_90") -> Any:
    from gpu_runtime.cuda.small_copies import SmallCopies

    copies = SmallCopies(Context(), arch, None)  # type: ignore[arg-type]
    copies.load()
    return copies


@needs_cupy
@pytest.mark.parametrize(("arch", "waits"), [("sm_90", True), ("compute_80", False)])
def test_the_kernel_is_told_each_copy(told: Driver, arch: str, waits: bool) -> None:
    """Addresses of 64 bits, each size; early only where the kernel can wait. Asked for again, it is told the same."""
    copies = opened(arch)
    calls = [(1 << 63, 1 << 62, size, stream, early) for size in SIZES[:-1] for stream in (16, 32) for early in (0, 1)]
    for dst, src, size, stream, early in 2 * calls:
        copies.enqueue(dst, src, size, stream, early=bool(early))
    assert told.launches == 2 * [
        (stream, dst, src, size, bool(early and waits)) for dst, src, size, stream, early in calls
    ]


@needs_cupy
def test_blocks_are_enough_and_not_too_many(told: Driver) -> None:
    """`Driver` looks at each. 30 KB are spread over many multiprocessors."""
    from gpu_runtime.cuda.small_copies import SMALL_COPY_BYTES, blocks_of

    assert SMALL_COPY_BYTES == LARGEST
    copies = opened()
    for size in range(1, LARGEST + 1, 61):
        copies.enqueue(1 << 40, 1 << 41, size, 16, early=False)
    assert len(told.launches) == len(range(1, LARGEST + 1, 61))
    assert (blocks_of(12), blocks_of(30_000), blocks_of(LARGEST)) == (1, 15, 32)


@needs_cupy
def test_threads_share_what_is_kept(told: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while all of it is forgotten, again and again: every launch has the parameters of its own copy."""
    from gpu_runtime.cuda import small_copies

    monkeypatch.setattr(small_copies, "_MOST_KEPT", 5)
    copies = opened()

    def work(index: int) -> None:
        for turn in range(300):
            copies.enqueue((1 << 40) + index, turn % 7, 1 + turn % 9, 16 + index, early=turn % 2 == 0)

    with eager_switching():
        hammer(work, THREADS)
    expected = [
        (16 + index, (1 << 40) + index, turn % 7, 1 + turn % 9, turn % 2 == 0)
        for index in range(THREADS)
        for turn in range(300)
    ]
    assert sorted(told.launches) == sorted(expected)


@needs_cupy
def test_a_failed_launch_says_what_was_to_be_copied(told: Driver) -> None:
    def fail(*arguments: Any) -> None:
        raise DeviceError("launchKernel: no")

    with patch.object(told, "launch", fail):
        copies = opened()
        with (
            patch.object(Context, "call", fail),
            pytest.raises(DeviceError, match="copy of 1,024 bytes from 0x20 to 0x10"),
        ):
            copies.enqueue(16, 32, 1024, 16, early=False)


# which copies they are


HOST, DEVICE, NBYTES = 1 << 40, 1 << 41, 1 << 17


def memory() -> Any:
    """Return blocks: page-locked from `HOST` on, device memory from `DEVICE` on."""
    found = SimpleNamespace(_lock=threading.RLock(), pinned=Ledger(), ledger=Ledger())
    found.pinned.add(DevicePtr(HOST), NBYTES, "")
    found.ledger.add(DevicePtr(DEVICE), NBYTES, "")
    return found


@needs_cupy
@pytest.mark.parametrize(
    ("host", "nbytes", "device", "reached"),
    [
        (HOST, 1, DEVICE, True),
        (HOST + 5, 1000, DEVICE + 70, True),
        (HOST + NBYTES - 16, 16, DEVICE + NBYTES - 16, True),
        (HOST + NBYTES - 16, 17, DEVICE, False),
        (HOST - 1, 1, DEVICE, False),
        (HOST + NBYTES, 1, DEVICE, False),
        (DEVICE, 1, DEVICE, False),
        (HOST, 1, DEVICE - 1, False),
        (HOST, 1, DEVICE + NBYTES, False),
        (HOST, 1, HOST, False),
    ],
)
def test_kernels_reach_live_blocks_alone(host: int, nbytes: int, device: int, reached: bool) -> None:
    from gpu_runtime.cuda.memory import CudaMemory

    assert CudaMemory.kernels_reach(memory(), host, nbytes, device) is reached


@needs_cupy
@pytest.mark.parametrize(("nbytes", "small"), [(0, False), (1, True), (LARGEST, True), (LARGEST + 1, False)])
def test_copies_are_small_up_to_a_size(nbytes: int, small: bool) -> None:
    from gpu_runtime.cuda.memory_calls import MemoryCalls

    calls: Any = SimpleNamespace(_memory=SimpleNamespace(kernels_reach=lambda *arguments: True))
    assert MemoryCalls._is_small(calls, HOST, nbytes, DEVICE) is small


@needs_cupy
@pytest.mark.parametrize("plain", [True, False])
def test_only_on_a_plain_stream_of_ours_they_start_early_and_need_no_note(plain: bool) -> None:
    from gpu_runtime.cuda.memory_calls import MemoryCalls

    enqueued, noted = list[Any](), list[Any]()
    calls: Any = SimpleNamespace(
        _streams=SimpleNamespace(
            is_plain=lambda on: plain, note=lambda on, stream, keep, *, locked: noted.append((on, stream, locked))
        ),
        _small_copies=SimpleNamespace(enqueue=lambda *arguments, early: enqueued.append((*arguments, early))),
    )
    MemoryCalls._copy_small(calls, DEVICE, HOST, 12, 77, 5, np.zeros(12, np.uint8))
    assert enqueued == [(DEVICE, HOST, 12, 77, plain)]
    assert noted == ([] if plain else [(77, 5, True)])


@needs_cupy
@pytest.mark.parametrize(("handle", "capturing", "plain"), [(77, False, True), (77, True, False), (78, False, False)])
def test_plain_streams_are_ours_and_do_not_capture(handle: int, capturing: bool, plain: bool) -> None:
    from gpu_runtime.cuda.streams import Streams

    streams: Any = SimpleNamespace(own={0: 77, 77: 77}, is_capturing=lambda on: capturing)
    assert Streams.is_plain(streams, handle) is plain
