# SPDX-License-Identifier: MIT OR Apache-2.0
"""Limits that a GPU alone has: shared memory of both kinds, pitches past 31 bits, and caches that stay small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.op import EXACT, Op, OpRegistry, OpSpec, scalar, tensor
from tests.backends import Device, cuda_only
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

pytestmark = cuda_only

SPEC = OpSpec("shared", (tensor("out", "out", "T", "count"), scalar("count", "i32")), EXACT, dtypes=("f32",))
OWN, THREADS = 1024, 256
"""Static shared memory of the kernel in bytes, and its threads."""


def reference(*, out: Any, count: int) -> None:
    out[...] = np.arange(1, count + 1)


def make_inputs(rng: np.random.Generator, dtype: str, **case: Any) -> dict[str, Any]:
    raise NotImplementedError("launched by hand")


@pytest.fixture
def sharing(device: Device) -> Iterator[GpuBackend]:
    """A backend whose kernel has shared memory of its own besides what a launch asks for."""
    ops = OpRegistry()
    ops.register(Op(SPEC, reference, make_inputs, (), source=Path(__file__).with_name("shared.cu")))
    with device.open(ops=ops) as gpu:
        yield gpu
        gpu.sweep_unreleased()


@pytest.mark.parametrize("order", [1, -1], ids=["growing", "shrinking"])
def test_shared_memory_up_to_the_limit(sharing: GpuBackend, order: int) -> None:
    """From little to all there is, across the 48 KiB that need no asking, with and without the kernel's own."""
    most = sharing.limits().max_shared_bytes - OWN
    handle = sharing.kernel("shared", "shared_f32")
    sizes = (4, (48 << 10) - OWN, (48 << 10) - OWN + 4, 48 << 10, (48 << 10) + 4, most)
    for nbytes in sizes[::order]:
        count = nbytes // 4
        out = sharing.alloc(nbytes)
        sharing.launch(handle, 1, THREADS, nbytes, 0, (out, count))
        result = download(sharing, out, np.empty(count, np.float32))
        assert np.array_equal(result, np.arange(1, count + 1, dtype=np.float32)), nbytes


def test_shared_memory_past_the_limit_is_refused(sharing: GpuBackend) -> None:
    """Before anything is enqueued, also when the dynamic part alone would fit; what fits works afterwards."""
    most, out = sharing.limits().max_shared_bytes, sharing.alloc(64)
    handle = sharing.kernel("shared", "shared_f32")
    for nbytes in (most - OWN + 1, most - OWN + 4, most, most + 1):
        with sharing.launch_trace() as trace, pytest.raises(ValueError, match="shared_mem"):
            sharing.launch(handle, 1, THREADS, nbytes, 0, (out, 16))
        assert trace == []
    sharing.launch(handle, 1, THREADS, most - OWN, 0, (out, 16))
    assert download(sharing, out, np.empty(16, np.float32)).tolist() == list(range(1, 17))


def copy_rows(gpu: GpuBackend, pitch: int, space: int) -> None:
    """Copy rows of 8 bytes that lie far apart in ``space``, and back to other places there."""
    rows = np.arange(16, dtype=np.uint8).reshape(2, 8)
    for row in range(2):
        gpu.copy_h2d(rows[row], space + row * pitch)
    near = upload(gpu, np.zeros_like(rows))
    gpu.copy_d2d_2d_async(space, pitch, near, 8, 8, 2)
    assert np.array_equal(download(gpu, near, rows), rows)
    gpu.copy_h2d(rows[::-1].copy(), near)
    gpu.copy_d2d_2d_async(near, 8, space + 16, pitch, 8, 2)
    for row in range(2):
        assert np.array_equal(download(gpu, space + 16 + row * pitch, rows[0]), rows[1 - row])
        assert np.array_equal(download(gpu, space + row * pitch, rows[0]), rows[row])


@pytest.mark.parametrize("pitch", [(1 << 31) - 1, 1 << 31, 3 << 30])
def test_rows_may_lie_gigabytes_apart(toy_gpu: GpuBackend, pitch: int) -> None:
    """In managed memory, of which only the pages that are touched exist."""
    copy_rows(toy_gpu, pitch, toy_gpu.alloc_managed(pitch + 64))


@pytest.mark.parametrize("most", [8, 63, 64])
def test_rows_past_the_widest_pitch_go_one_by_one(
    toy_gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As on a device that takes no wider pitch, on small memory; a capture has each of them."""
    monkeypatch.setattr("gpu_runtime.cuda.memory_calls._MOST_PITCH", most)
    copy_rows(toy_gpu, 64, toy_gpu.alloc(128))
    source, target = upload(toy_gpu, np.arange(128, dtype=np.uint8)), upload(toy_gpu, np.zeros(16, np.uint8))
    toy_gpu.begin_capture()
    toy_gpu.copy_d2d_2d_async(source, 64, target, 8, 8, 2)
    toy_gpu.launch_graph(toy_gpu.end_capture())
    result = download(toy_gpu, target, np.empty((2, 8), np.uint8))
    assert result[:, 0].tolist() == [0, 64]


def test_what_is_kept_of_calls_is_bounded(toy_gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new launches, products and shapes; the results are right across the moments at which all is forgotten."""
    monkeypatch.setattr("gpu_runtime.cuda.kernels._MOST_KEPT", 8)
    monkeypatch.setattr("gpu_runtime.cuda.products._MOST_KEPT", 8)
    monkeypatch.setattr("gpu_runtime.cuda.blas._MOST_CHOSEN", 8)
    gpu: Any = toy_gpu
    ones, out = upload(toy_gpu, np.ones(64 * 4, np.float32)), upload(toy_gpu, np.zeros(64, np.float32))
    handle: Any = toy_gpu.kernel("toy", "toy_f32")
    sizes = []
    for index in range(1, 41):
        launch(toy_gpu, values(ones, out, factor=float(index)))
        assert download(toy_gpu, out, np.empty(4, np.float32)).tolist() == [index] * 4
        toy_gpu.gemm(ones, ones, out, index, 1, 4, dtype="f32")
        assert download(toy_gpu, out, np.empty(index, np.float32)).tolist() == [4] * index
        sizes.append((len(handle.launches), len(gpu._products._kept), len(gpu._blas._chosen)))
    assert [max(column) for column in zip(*sizes, strict=True)] == [8, 8, 8]
