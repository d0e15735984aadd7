# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sixteen threads make a thousand calls each, of all kinds, on one backend: each finds its bytes as they must be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from tests.backends import Device, damaged, host_only
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.hammering import eager_switching, hammer

THREADS: Final = 16
CALLS: Final = 1000
WIDTH: Final = 64
NBYTES: Final = 4 * WIDTH

Array = np.ndarray[Any, np.dtype[np.float32]]


class Caller:
    """One thread's blocks of float32, what each of them must hold, and the stream that all its work is ordered on."""

    def __init__(self, gpu: GpuBackend, seed: int) -> None:
        self.gpu, self.rng, self.seed = gpu, random.Random(seed), seed
        self.stream, self.event = gpu.create_stream(), gpu.create_event()
        self.pinned = gpu.alloc_host_pinned(NBYTES)
        self.blocks: list[tuple[DevicePtr, Array]] = []
        self.made, self.checked = 0, 0

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.made += 1
        return method(*arguments)

    def numbers(self) -> Array:
        return np.array([self.rng.randrange(-8, 8) for _ in range(WIDTH)], np.float32)

    def pick(self) -> tuple[DevicePtr, Array]:
        return self.rng.choice(self.blocks)

    def allocate(self) -> None:
        data = self.numbers()
        ptr = self.call(self.gpu.alloc, NBYTES)
        self.call(self.gpu.copy_h2d_async_retained, data, ptr, self.stream)
        self.blocks.append((ptr, data))

    def free(self) -> None:
        ptr, _ = self.blocks.pop(self.rng.randrange(len(self.blocks)))
        self.call(self.gpu.free, ptr)

    def fill(self) -> None:
        ptr, data = self.pick()
        self.call(self.gpu.memset_async, ptr, 0, NBYTES, self.stream)
        data[:] = 0

    def send(self) -> None:
        ptr, data = self.pick()
        data[:] = self.numbers()
        self.pinned.array[:] = data.view(np.uint8)
        self.call(self.gpu.copy_h2d_on_stream, self.pinned.array, ptr, self.stream)

    def copy(self) -> None:
        (src, old), (dst, new) = self.pick(), self.pick()
        if src != dst:
            self.call(self.gpu.copy_d2d_async, src, dst, NBYTES, self.stream)
            new[:] = old

    def negate(self, stream: int | None = None) -> None:
        ptr, data = self.pick()
        arguments = values(ptr, ptr, width=WIDTH, x_stride=WIDTH, out_stride=WIDTH, factor=-1.0)
        self.call(launch, self.gpu, arguments, self.stream if stream is None else stream)
        data *= -1

    def negate_on_the_shared_stream(self) -> None:
        """Which all threads use, so that only events order it."""
        self.call(self.gpu.record_event, self.event, self.stream)
        self.call(self.gpu.stream_wait_event, 0, self.event)
        self.negate(0)
        self.call(self.gpu.record_event, self.event, 0)
        self.call(self.gpu.stream_wait_event, self.stream, self.event)

    def capture(self) -> None:
        self.call(self.gpu.begin_capture, self.stream)
        self.negate()
        graph = self.call(self.gpu.end_capture, self.stream)
        self.call(self.gpu.launch_graph, graph, self.stream)
        self.call(self.gpu.destroy_graph, graph)

    def handles(self) -> None:
        self.call(self.gpu.destroy_event, self.call(self.gpu.create_event))
        self.call(self.gpu.destroy_stream, self.call(self.gpu.create_stream))
        self.call(self.gpu.free_host_pinned, self.call(self.gpu.alloc_host_pinned, 64))
        assert self.call(self.gpu.live_bytes) >= NBYTES * len(self.blocks)

    def read(self, place: int | None = None) -> None:
        ptr, data = self.pick() if place is None else self.blocks[place]
        out = np.empty(WIDTH, np.float32)
        self.call(self.gpu.copy_d2h_on_stream, ptr, out, self.stream)
        assert np.array_equal(out, data), f"thread {self.seed}, call {self.made}"
        self.checked += 1

    def run(self) -> None:
        changes = (self.fill, self.send, self.copy, self.negate, self.negate_on_the_shared_stream, self.capture)
        self.allocate()
        while self.made < CALLS:
            if len(self.blocks) < 3 or self.rng.random() < 0.1:
                self.allocate()
            elif len(self.blocks) > 6:
                self.free()
            else:
                self.rng.choice((*changes, self.handles, self.read, self.read))()
        for place in range(len(self.blocks)):
            self.read(place)
        for ptr, _ in self.blocks:
            self.gpu.free(ptr)
        self.gpu.free_host_pinned(self.pinned)
        self.gpu.destroy_event(self.event)
        self.gpu.destroy_stream(self.stream)


def check(gpu: GpuBackend) -> None:
    with eager_switching():
        callers = [Caller(gpu, seed) for seed in range(THREADS)]
        hammer(lambda index: callers[index].run(), THREADS)
    assert min(caller.made for caller in callers) >= CALLS
    assert min(caller.checked for caller in callers) > 50
    assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
    assert damaged(gpu) == []


def test_sixteen_threads(device: Device) -> None:
    with device.open(ops=REGISTRY) as gpu:
        check(gpu)


@host_only
@pytest.mark.parametrize("order", ["deferred", "adversarial"])
def test_sixteen_threads_whose_work_runs_later(device: Device, order: str) -> None:
    with device.open(ops=REGISTRY, order=order) as gpu:
        check(gpu)
