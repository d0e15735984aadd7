# SPDX-License-Identifier: MIT OR Apache-2.0
"""Addresses that are wrong by little or by time: beside a block, in a freed one, in one that is smaller now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, InvalidPointer
from tests.backends import Device, damaged
from tests.gpu_runtime.toy import REGISTRY, SLOW, launch, values
from tests.ops.harness import download, upload

Call = Callable[[], Any]
BYTES = np.arange(64, dtype=np.uint8)
ONE = np.ones(1, dtype=np.float32)


def calls_at(gpu: GpuBackend, at: int, other: int) -> dict[str, Call]:
    """Return calls that read or write four bytes at an address; those at ``other`` are sound."""
    product = dict[str, Any](a=other, w=other, c=other + 16, m=1, n=1, k=1, dtype="f32")
    return {
        "copy_h2d": lambda: gpu.copy_h2d(bytes(4), at),
        "copy_h2d_async": lambda: gpu.copy_h2d_async(bytes(4), at),
        "copy_d2h": lambda: gpu.copy_d2h(at, bytearray(4)),
        "copy_d2d from": lambda: gpu.copy_d2d(at, other, 4),
        "copy_d2d to": lambda: gpu.copy_d2d(other, at, 4),
        "copy_d2d_2d": lambda: gpu.copy_d2d_2d_async(other, 4, at, 4, 2, 2),
        "memset": lambda: gpu.memset(at, 0, 4),
        "memset_async": lambda: gpu.memset_async(at, 0, 4),
        "mark_written": lambda: gpu.mark_written(at, 4),
        **{f"gemm {name}": partial(gpu.gemm, **(product | {name: at})) for name in ("a", "w", "c", "bias")},
    }


@pytest.mark.parametrize("offset", [-256, -4, 64, 316], ids=["far before", "before", "past", "far past"])
def test_a_redzone_is_nobodys_memory(gpu: GpuBackend, device: Device, offset: int) -> None:
    """Foreign memory is taken on a GPU, but what lies that near to a block is no foreign memory."""
    if not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    ptr, other = upload(gpu, BYTES), upload(gpu, BYTES)
    for name, call in calls_at(gpu, ptr + offset, other).items():
        with gpu.launch_trace() as trace, pytest.raises(InvalidPointer):
            call()
        assert trace == [], name
    for block in (ptr, other):
        assert np.array_equal(download(gpu, block, BYTES), BYTES)
    assert damaged(gpu) == []


def test_redzones_that_touch_are_nobodys_memory(gpu: GpuBackend, device: Device) -> None:
    """Blocks that fill their share of a pool: where one's redzone ends, its neighbour's begins."""
    if not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    for ptr in [gpu.alloc(512) for _ in range(16)]:
        for offset in (-256, -1, 512, 767):
            with pytest.raises(InvalidPointer, match="memset: ptr"):
                gpu.memset(ptr + offset, 0, 1)
    assert damaged(gpu) == []


def test_a_span_does_not_reach_into_a_block(gpu: GpuBackend, device: Device) -> None:
    """From the redzone before it to its end."""
    if not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    ptr = upload(gpu, BYTES)
    for start, nbytes in ((-4, 8), (-4, 68), (-200, 264)):
        with pytest.raises(InvalidPointer, match="memset: ptr"):
            gpu.memset(ptr + start, 1, nbytes)
        with pytest.raises(InvalidPointer, match="copy_h2d: dst"):
            gpu.copy_h2d(bytes(nbytes), ptr + start)
    assert np.array_equal(download(gpu, ptr, BYTES), BYTES)
    assert damaged(gpu) == []


@pytest.mark.parametrize("name", ["a", "w", "c", "bias", "workspace"])
def test_a_product_that_ran_is_refused_once_an_operand_is_freed(gpu: GpuBackend, name: str) -> None:
    """Also when the very call was checked before, and while the freed block still waits for other work."""
    blocks: dict[str, Any] = {key: upload(gpu, np.ones(64, np.float32)) for key in ("a", "w", "c", "bias", "workspace")}
    busy = upload(gpu, np.ones(4, np.float32))
    launch(gpu, values(busy, busy))

    def multiply() -> None:
        gpu.gemm(**blocks, m=1, n=1, k=4, dtype="f32", workspace_bytes=256)

    for _ in range(2):
        multiply()
    assert download(gpu, blocks["c"], ONE)[0] == 5
    launch(gpu, values(busy, busy, factor=SLOW))
    gpu.free(blocks[name])
    for _ in range(2):
        with gpu.launch_trace() as trace, pytest.raises(InvalidPointer, match=f"gemm: {name}: "):
            multiply()
        assert trace == []
    blocks[name] = upload(gpu, np.ones(64, np.float32))
    multiply()
    assert download(gpu, blocks["c"], ONE)[0] == 5


@pytest.mark.parametrize("name", ["a", "w", "c"])
def test_a_product_that_ran_is_refused_once_its_block_is_smaller(device: Device, name: str) -> None:
    """The address is live again, of a block that no longer holds the operand."""
    options = {"memory_limit": 1 << 20, "check": False} if device.is_host else {}  # a checked host reuses no address
    with device.open(ops=REGISTRY, **options) as gpu:
        square = np.ones((32, 32), np.float32)
        blocks: dict[str, Any] = {key: upload(gpu, square) for key in ("a", "w", "c")}

        def multiply() -> None:
            gpu.gemm(**blocks, m=32, n=32, k=32, dtype="f32")

        for _ in range(2):
            multiply()
        gpu.synchronize()
        gpu.free(blocks[name])
        gpu.synchronize()
        smaller = next((ptr for ptr in (gpu.alloc(1024) for _ in range(200)) if ptr == blocks[name]), None)
        if smaller is None:
            gpu.sweep_unreleased()
            pytest.skip("the allocator did not hand the address out again")
        for _ in range(2):
            with pytest.raises(InvalidPointer, match=f"gemm: {name}: "):
                multiply()
        gpu.gemm(**blocks, m=1, n=1, k=1, dtype="f32", bias=blocks["a"] + 256)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("name", ["lda", "ldw", "ldc", "stride_a", "stride_w", "stride_c"])
@pytest.mark.parametrize("stride", [1 << 63, 1 << 64, 1 << 70])
def test_strides_past_63_bits_are_refused(gpu: GpuBackend, name: str, stride: int) -> None:
    """By name and before anything is enqueued, also where one row or product alone makes the stride irrelevant."""
    ptr, out = upload(gpu, BYTES), upload(gpu, BYTES)
    strides = dict[str, Any](stride_a=4, stride_w=4, stride_c=1, lda=4, ldw=4, ldc=1) | {name: stride}
    for batch in (1, 2):
        with gpu.launch_trace() as trace, pytest.raises(ValueError, match=f"gemm: {name}: "):
            gpu.gemm_strided_batched(ptr, ptr, out, 1, 1, 4, batch, **strides, dtype="f32")
        assert trace == []


@pytest.mark.parametrize("name", ["x_stride", "out_stride"])
def test_a_launch_stride_of_one_row_may_be_anything_of_64_bits(gpu: GpuBackend, name: str) -> None:
    x = np.arange(4, dtype=np.float32)
    ptr, out = upload(gpu, x), upload(gpu, np.zeros_like(x))
    launch(gpu, values(ptr, out, **{name: (1 << 63) - 1}))
    assert download(gpu, out, x).tolist() == (2 * x).tolist()
    with pytest.raises(ValueError, match=f"toy: {name}"):
        launch(gpu, values(ptr, out, **{name: 1 << 63}))
