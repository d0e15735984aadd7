# SPDX-License-Identifier: MIT OR Apache-2.0
"""The clock, and the kernel that reads memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.cuda.nvrtc import compile_source
from gpu_runtime.host import HostBackend
from gpu_runtime.kernel_source import check_spec, inlined
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from gpu_runtime.op import OpRegistry
from metrale.bench.timing import READ_ALL, SPEC, THREADS, Clock, Reader, ceilings, open_device, random_buffer
from tests.backends import Device
from tests.kernels.sources import ARCHITECTURES
from tests.ops.harness import run


def test_the_source_agrees_with_the_spec() -> None:
    assert READ_ALL.source is not None
    check_spec(SPEC, inlined(READ_ALL.source))


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_source_compiles(arch: str) -> None:
    assert READ_ALL.source is not None
    assert compile_source(inlined(READ_ALL.source), "read_all.cu", arch, cache=None)


@pytest.mark.parametrize("case", READ_ALL.cases)
def test_each_block_reads_its_own_words(device: Device, case: dict[str, int]) -> None:
    """Every word counts once, in the block whose turn it is: packs of two go round the blocks by the thread."""
    ops = OpRegistry()
    ops.register(READ_ALL)
    inputs = READ_ALL.make_inputs(np.random.default_rng(0), "f32", **case)
    expected = [0] * case["blocks"]
    src: Any = inputs["src"]
    for index, word in enumerate(src.tolist()):
        expected[index // 2 // THREADS % case["blocks"]] ^= word
    with device.open(ops=ops) as gpu:
        found = run(READ_ALL, gpu, "f32", inputs)["out"].tolist()
        gpu.sweep_unreleased()
    assert found == expected
    assert any(found)


def test_the_launch_fits_the_least_device() -> None:
    assert READ_ALL.plan is not None
    plan = READ_ALL.plan({"count": 1 << 32, "blocks": 16 * 148}, "f32", MINIMUM)
    check_geometry(plan.grid, plan.block, plan.shared_bytes, MINIMUM)


@pytest.fixture
def gpu() -> Iterator[GpuBackend]:
    with open_device("host") as backend:
        yield backend
        assert not backend.live_alloc_count()


def test_the_clock_times_work_alone(gpu: GpuBackend) -> None:
    clock = Clock(gpu)
    slow, fast = clock.ms(lambda: time.sleep(0.02), 2), clock.ms(lambda: None, 2, before=lambda: time.sleep(0.02))
    assert min(slow) >= 20
    assert min(fast) < 20
    clock.close()


def test_a_graph_is_replayed_and_destroyed(gpu: GpuBackend) -> None:
    clock, counter = Clock(gpu), np.zeros(1, dtype=np.uint8)
    ptr = gpu.alloc(1)
    gpu.memset(ptr, 0, 1)
    captured = []

    def enqueue(stream: int) -> None:
        captured.append(stream)
        gpu.memset_async(ptr, 7, 1, stream)

    assert clock.graph_ms(enqueue, 3) >= 0
    gpu.copy_d2h(ptr, counter)
    assert captured == [clock.stream]
    assert counter[0] == 7
    with pytest.raises(RuntimeError, match="no"), clock.graph(lambda stream: _raise()):
        pass
    assert not gpu.stream_is_capturing(clock.stream)
    clock.close()
    gpu.free(ptr)


def _raise() -> None:
    raise RuntimeError("no")


def test_buffers_hold_random_values_to_their_end(gpu: GpuBackend) -> None:
    found = np.empty(3_000_001, dtype=np.float16)
    ptr = random_buffer(gpu, found.nbytes, "f16")
    gpu.copy_d2h(ptr, found)
    gpu.free(ptr)
    # Three million values: their deviation is 1 within 1e-3, float16's rounding included.
    assert abs(found.astype(np.float64).std() - 1) < 1e-2
    assert np.isfinite(found).all()
    assert np.count_nonzero(found[-1000:]) > 990


def test_ceilings(gpu: GpuBackend) -> None:
    clock = Clock(gpu)
    with Reader(gpu, 1 << 16) as reader:
        found = ceilings(clock, reader, "f32", 2)
    clock.close()
    assert set(found) == {"read_gb_per_s", "read_bytes", "product_f32_tflop_per_s", "product_size"}
    assert found["read_bytes"] == 1 << 16


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "auto", ""])
def test_devices_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="device: expected 'host', 'cuda' or 'cuda:N'"):
        open_device(name)
    with open_device("host") as gpu:
        assert isinstance(gpu, HostBackend)
        assert gpu.has_module("read_all")
        assert gpu.has_module("layer_norm")
