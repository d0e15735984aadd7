# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranges for a profiler: named by methods, nested as calls are, closed by errors too, and free where there are none."""

from __future__ import annotations

import pytest

from gpu_runtime import Config
from gpu_runtime.cuda import open_cuda
from gpu_runtime.host import HostBackend
from gpu_runtime.ranges import open_ranges, ranged
from tests.gpu_runtime.recording import RecordedRanges


class Work:
    """Has methods with names, and one without."""

    def __init__(self, ranges: RecordedRanges | None, side: str = "left") -> None:
        self.side = side
        open_ranges(self, ranges)

    @ranged("whole")
    def whole(self, count: int) -> int:
        return sum(self.part(index) for index in range(count))

    @ranged("{self.side} part {index}")
    def part(self, index: int, *, fail: bool = False) -> int:
        if fail:
            raise KeyError(index)
        return self.plain(index)

    def plain(self, index: int) -> int:
        return 2 * index


def test_ranges_nest_as_calls_do() -> None:
    ranges = RecordedRanges()
    work = Work(ranges)
    assert work.whole(2) == 2
    assert ranges.paths == [("whole",), ("whole", "left part 0"), ("whole", "left part 1")]
    assert work.part(index=7) == 14
    assert ranges.paths[-1] == ("left part 7",)
    assert ranges.opened == []


def test_an_error_closes_its_range() -> None:
    ranges = RecordedRanges()
    with pytest.raises(KeyError):
        Work(ranges).part(3, fail=True)
    assert ranges.paths == [("left part 3",)]
    assert ranges.opened == []


def test_a_call_with_wrong_arguments_says_so() -> None:
    ranges = RecordedRanges()
    with pytest.raises(TypeError, match="index"):
        Work(ranges).part()  # type: ignore[call-arg]
    assert ranges.opened == []


def test_objects_of_a_class_are_apart() -> None:
    ranges = RecordedRanges()
    with_ranges, without = Work(ranges, "right"), Work(None)
    assert without.whole(2) == 2
    assert ranges.paths == []
    with_ranges.part(1)
    assert ranges.paths == [("right part 1",)]


def test_without_ranges_nothing_is_done() -> None:
    """The calls are those of the class: there is nothing that they could cost."""
    work = Work(None)
    assert vars(work) == {"side": "left"}
    assert Work.part.__name__ == "part"
    assert not hasattr(Work.part, "__wrapped__")


def test_a_backend_has_none_unless_it_is_asked() -> None:
    with HostBackend() as gpu:
        assert gpu.ranges is None


@pytest.mark.gpu
def test_a_gpu_has_nvtx_ranges_when_it_is_asked() -> None:
    with open_cuda(0, config=Config()) as gpu:
        assert gpu.ranges is None
    with open_cuda(0, config=Config(nvtx=True)) as gpu:
        assert gpu.ranges is not None
        gpu.ranges.push("a range")
        gpu.ranges.pop()
