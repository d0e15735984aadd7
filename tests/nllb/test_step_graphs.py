# SPDX-License-Identifier: MIT OR Apache-2.0
"""The graphs of a model's steps by themselves: when something is captured, what is kept, what is destroyed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.step_graphs import StepGraphs
from tests.nllb.decoding import read
from tests.nllb.stepping import Failing, replays


class Work:
    """A kind of step that doubles the first element of an array, and says how often its launches were enqueued."""

    def __init__(self, gpu: GpuBackend, memory: DevicePtr) -> None:
        self._gpu = gpu
        self._memory = memory
        self.enqueued = 0

    def __call__(self, stream: StreamLike) -> None:
        self.enqueued += 1
        self._gpu.copy_d2d_async(self._memory, self._memory.offset(4), 4, stream)
        self._gpu.memset_async(self._memory, self.enqueued, 4, stream)


@pytest.fixture
def memory(gpu: GpuBackend) -> Iterator[DevicePtr]:
    memory = gpu.alloc(8)
    gpu.copy_h2d(np.array([7, 0], np.int32), memory)
    yield memory
    gpu.free(memory)


@pytest.fixture
def graphs(gpu: GpuBackend) -> Iterator[StepGraphs]:
    found = StepGraphs(gpu, most=2)
    yield found
    found.free()


def test_a_kind_is_captured_when_it_comes_again(gpu: GpuBackend, memory: DevicePtr, graphs: StepGraphs) -> None:
    work = Work(gpu, memory)
    with replays(gpu) as launched:
        graphs.run("a", work, 0)
        assert (launched, len(graphs), work.enqueued) == ([], 0, 1)
        assert read(gpu, memory, 2, "i32").tolist() == [0x01010101, 7]
        for _ in range(3):
            graphs.run("a", work, 0)
    assert (len(launched), len(set(launched)), len(graphs), work.enqueued) == (3, 1, 1, 2)
    assert read(gpu, memory, 2, "i32").tolist() == [0x02020202, 0x02020202]


def test_what_was_used_longest_ago_is_destroyed(gpu: GpuBackend, memory: DevicePtr, graphs: StepGraphs) -> None:
    """And captured again, at once, when it comes again."""
    works = {key: Work(gpu, memory) for key in "abc"}
    with replays(gpu) as launched:
        for key in "aabbabcc":
            graphs.run(key, works[key], 0)
        assert len(graphs) == 2
        a, b, c = launched[0], launched[1], launched[-1]
        assert launched == [a, b, a, b, c]
        with pytest.raises(DeviceError, match="expected a live graph"):
            gpu.launch_graph(a)
        graphs.run("b", works["b"], 0)
        assert launched[-1] == b
        graphs.run("a", works["a"], 0)  # which made room for c
        assert launched[-1] not in (a, b, c)
        assert len(graphs) == 2
        graphs.run("b", works["b"], 0)
        assert launched[-1] == b
    assert [works[key].enqueued for key in "abc"] == [3, 2, 2]


def test_a_failed_kind_is_not_tried_again(
    gpu: GpuBackend, memory: DevicePtr, graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, captures = Work(gpu, memory), []
    real = gpu.begin_capture

    def begin_capture(stream: StreamLike = 0) -> None:
        captures.append(stream)
        real(stream)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "begin_capture", begin_capture)
        patch.setattr(gpu, "end_capture", Failing(gpu.end_capture, RuntimeError("no")))
        for _ in range(4):
            graphs.run("a", work, 0)
    assert (len(captures), len(graphs), work.enqueued) == (1, 0, 5)
    assert not gpu.stream_is_capturing(captures[0])


def test_freeing_destroys_graphs_and_stream(gpu: GpuBackend, memory: DevicePtr) -> None:
    """Launches that are enqueued still run."""
    graphs, work = StepGraphs(gpu), Work(gpu, memory)
    with replays(gpu) as launched:
        for _ in range(2):
            graphs.run("a", work, 0)
    graphs.free()
    graphs.free()
    assert len(graphs) == 0
    assert read(gpu, memory, 2, "i32").tolist() == [0x02020202, 0x01010101]
    for call in (gpu.launch_graph, gpu.destroy_graph):
        with pytest.raises(DeviceError, match="expected a live graph"):
            call(launched[0])
