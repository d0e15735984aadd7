# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams, blocks and page-locked memory whose handles or addresses come again, and what their end costs."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from tests.backends import cuda_only
from tests.gpu_runtime.toy import SLOW, launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


class Foreign:
    """A stream of another library, whose handle may be one that a stream of ours had."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def test_streams_are_used_again(toy_gpu: GpuBackend) -> None:
    """However often they come and go, CUDA has one more than are live; none takes over the work of a dead one."""
    ptr, seen = upload(toy_gpu, X), set()
    for _ in range(50):
        stream = toy_gpu.create_stream()
        seen.add(stream)
        launch(toy_gpu, values(ptr, ptr, factor=-1.0), stream)
        toy_gpu.destroy_stream(stream)
        with pytest.raises(DeviceError, match="expected a live stream"):
            launch(toy_gpu, values(ptr, ptr), stream)
        assert download(toy_gpu, ptr, X).tolist() in (X.tolist(), (-X).tolist())
    assert len(seen) == 1
    assert download(toy_gpu, ptr, X).tolist() == X.tolist()


def test_an_object_says_itself_that_its_stream_lives(toy_gpu: GpuBackend) -> None:
    """A bare number that was a stream of ours is refused; a library's object with the same number is not."""
    ptr, stream = upload(toy_gpu, X), toy_gpu.create_stream()
    toy_gpu.destroy_stream(stream)
    with pytest.raises(DeviceError, match="destroyed"):
        launch(toy_gpu, values(ptr, ptr), stream)
    launch(toy_gpu, values(ptr, ptr), Foreign(stream))
    toy_gpu.synchronize(Foreign(stream))
    assert download(toy_gpu, ptr, X).tolist() == (2 * X).tolist()


def test_a_block_is_kept_for_a_foreign_stream_that_is_gone(toy_gpu: GpuBackend) -> None:
    """Another stream has its handle now, and is idle; the work of the first still reads the block."""
    import cupy

    shape = {"width": 1024, "x_stride": 1024, "out_stride": 1024}
    out, scratch = toy_gpu.alloc(4096), toy_gpu.alloc(64)
    ptr = upload(toy_gpu, np.full(1024, 2, dtype=np.float32))
    launch(toy_gpu, values(ptr, out, **shape))
    toy_gpu.synchronize()
    first = cupy.cuda.Stream(non_blocking=True)
    handle = first.ptr
    for _ in range(4):
        launch(toy_gpu, values(ptr, out, factor=SLOW, **shape), handle)
    del first
    gc.collect()
    streams: list[Any] = []
    while len(streams) < 200 and not (streams and streams[-1].ptr == handle):
        streams.append(cupy.cuda.Stream(non_blocking=True))
    if streams[-1].ptr != handle:
        pytest.skip("the driver gave the handle to none of 200 streams")
    toy_gpu.memset_async(scratch, 0, 64, handle)
    toy_gpu.free(ptr)
    for _ in range(20):
        toy_gpu.memset(toy_gpu.alloc(4096), 0xFF, 4096)
    cupy.cuda.runtime.deviceSynchronize()
    assert (download(toy_gpu, out, np.empty(1024, np.float32)) == 1.5).all()


def test_a_free_does_not_ask_every_block_that_waits(toy_gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred beside a busy stream: what each asks CUDA does not grow with how many wait already."""
    from gpu_runtime.cuda.events import Mark

    ptr, stream, asked = upload(toy_gpu, X), toy_gpu.create_stream(), 0
    blocks = [toy_gpu.alloc(256) for _ in range(500)]
    launch(toy_gpu, values(ptr, ptr))
    toy_gpu.synchronize()
    passed = Mark.passed

    def counted(mark: Mark) -> bool:
        nonlocal asked
        asked += 1
        return passed(mark)

    monkeypatch.setattr(Mark, "passed", counted)
    for _ in range(10):
        launch(toy_gpu, values(ptr, ptr, factor=SLOW), stream)
    for block in blocks:
        toy_gpu.free(block)
    # Two streams have a mark each: a free asks those of the oldest block, and each block is let go after two answers.
    assert 0 < asked <= 2 * 2 * len(blocks)
    toy_gpu.synchronize(stream)
    assert toy_gpu.live_alloc_count() == 1


def test_a_pinned_array_outlives_its_memory(toy_gpu: GpuBackend) -> None:
    """Readable as long as anybody has it; the last to drop it may be a thread without a context, which stays so."""
    from cupy.cuda import driver

    memory = toy_gpu.alloc_host_pinned(64)
    memory.array[:] = np.arange(64)
    ptr = toy_gpu.alloc(64)
    toy_gpu.copy_h2d_async(memory.array, ptr)
    arrays = [memory.array[8:]]
    toy_gpu.free_host_pinned(memory)
    del memory
    toy_gpu.synchronize()
    toy_gpu.free(toy_gpu.alloc(8))
    gc.collect()
    assert arrays[0].tolist() == list(range(8, 64))
    contexts: list[int] = []

    def drop() -> None:
        contexts.append(driver.ctxGetCurrent())
        arrays.clear()
        gc.collect()
        contexts.append(driver.ctxGetCurrent())

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert contexts == [0, 0]
    assert download(toy_gpu, ptr, np.empty(64, np.uint8)).tolist() == list(range(64))
