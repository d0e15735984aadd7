# SPDX-License-Identifier: MIT OR Apache-2.0
"""How busy a device is, by events: which calls they stand around, what is a gap, and that all is put back."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.host import HostBackend
from metrale.bench import engine_busy
from metrale.bench.engine_busy import ENQUEUING, Step, StepEvents, gaps, share, watched
from metrale.bench.protocol import Lengths
from metrale.bench.serving import serve
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.engine import Engine
from metrale.nllb.model import NllbModel
from tests.backends import Device

WAITING = {"copy_d2h_on_stream", "copy_h2d_on_stream", "copy_files_h2d", "synchronize"}
NO_WORK = {
    *("record_event", "stream_wait_event", "destroy_stream"),
    *("begin_capture", "end_capture", "stream_is_capturing", "abort_capture_if_active"),
}


def test_every_call_that_enqueues_is_known() -> None:
    methods = inspect.getmembers(GpuBackend, inspect.isfunction)
    found = {name for name, method in methods if "stream" in inspect.signature(method).parameters}
    assert found == {*ENQUEUING, *WAITING, *NO_WORK}


@pytest.mark.parametrize(
    ("steps", "between", "busy"),
    [
        ([Step(0, 4)], [], 1),
        ([Step(0, 4), Step(4, 10)], [0], 1),
        ([Step(0, 4), Step(5, 9), Step(9.5, 10)], [1, 0.5], 0.85),
        ([Step(0, 8), Step(2, 4), Step(9, 10)], [0, 1], 0.9),  # the second ends within the first
        ([Step(0, 0)], [], 1),
    ],
)
def test_gaps_are_what_no_step_covers(steps: list[Step], between: list[float], busy: float) -> None:
    assert gaps(steps) == pytest.approx(between)
    assert share(steps) == pytest.approx(busy)


class Told:
    """A backend that does nothing, and keeps what it is told to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.live: set[int] = set()
        self._next = 0

    def create_event(self, *, timing: bool) -> int:
        assert timing
        self._next += 1
        self.live.add(self._next)
        return self._next

    def destroy_event(self, event: int) -> None:
        self.live.remove(event)

    def record_event(self, event: int, stream: int) -> None:
        self.calls.append(("record", stream))

    def event_synchronize(self, event: int) -> None:
        self.calls.append(("wait", event))

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(end - start)


def _told(name: str) -> Any:
    def call(self: Told, *args: Any, **kwargs: Any) -> str:
        self.calls.append((name, (args, kwargs)))
        return name

    return call


for _name in ENQUEUING:
    setattr(Told, _name, _told(_name))


@pytest.mark.parametrize("name", ENQUEUING)
@pytest.mark.parametrize("keyword", [False, True])
def test_the_first_call_has_an_event_before_it_on_its_stream(name: str, keyword: bool) -> None:
    gpu: Any = Told()
    events = StepEvents(gpu, 1)
    parameters = list(inspect.signature(getattr(GpuBackend, name)).parameters)[1:]
    place = parameters.index("stream")
    args, kwargs = (tuple(range(100, 100 + place)), {"stream": 7}) if keyword else ((*range(100, 100 + place), 7), {})
    events.expect()
    assert getattr(gpu, name)(*args, **kwargs) == name
    assert getattr(gpu, name)(*args, **kwargs) == name
    events.end(3)
    given = (name, (args, kwargs))
    assert gpu.calls == [("record", 7), given, given, ("record", 3)]
    events.free()
    assert not gpu.live
    assert not set(vars(gpu)) & set(ENQUEUING)


def test_a_call_without_a_stream_is_on_the_default_one() -> None:
    gpu: Any = Told()
    events = StepEvents(gpu, 1)
    events.expect()
    gpu.launch_graph(5)
    assert gpu.calls[0] == ("record", 0)
    events.free()


def test_more_steps_than_expected_have_events_too() -> None:
    gpu: Any = Told()
    events = StepEvents(gpu, 1)
    assert len(gpu.live) == 2
    for _ in range(3):
        events.expect()
        gpu.launch_graph(5)
        events.end()
    assert len(events.steps()) == 3
    events.expect()
    gpu.launch_graph(5)  # a step that does not end
    events.free()
    assert not gpu.live


def test_a_step_without_work_is_a_fault() -> None:
    gpu: Any = Told()
    events = StepEvents(gpu, 1)
    assert events.steps() == []
    events.expect()
    with pytest.raises(RuntimeError, match="nothing was enqueued"):
        events.end()
    assert not set(vars(gpu)) & set(ENQUEUING)


def test_pauses_between_steps_are_gaps_and_those_within_are_not() -> None:
    with HostBackend() as gpu:
        ptr = gpu.alloc(64)
        events = StepEvents(gpu, 3)
        for _ in range(3):
            time.sleep(0.02)
            events.expect()
            time.sleep(0.02)  # the host's own work, before anything is enqueued
            gpu.memset_async(ptr, 1, 64)
            time.sleep(0.02)
            gpu.memset_async(ptr, 2, 64)
            events.end()
        steps = events.steps()
        events.free()
        gpu.free(ptr)
    assert [step.begin for step in steps] == sorted(step.begin for step in steps)
    assert steps[0].begin == 0
    assert min(gaps(steps)) >= 40
    assert min(step.end - step.begin for step in steps) >= 20
    assert 0 < share(steps) < 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(place, SHAPES["tiny"], "float32")
    return place


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def model(device: Device, folder: Path, request: pytest.FixtureRequest) -> Iterator[NllbModel]:
    limits = {"max_batch": 3, "max_source_len": 16, "max_new_tokens": 10, "step_graphs": request.param}
    with device.open() as gpu, metrale.load(folder, gpu, "float32", **limits) as found:
        yield found


def test_a_run_of_the_engine(model: NllbModel) -> None:
    lengths = Lengths(5, 8)
    before, methods = set(vars(model.gpu)), set(vars(model))
    found = engine_busy.measure(model, 3, 2, lengths)
    assert found is not None
    assert found["share"]["n"] == 2
    assert 0 < found["share"]["min"] <= found["share"]["max"] <= 1
    assert found["steps"] >= lengths.new
    assert found["gap_us"]["min"] >= 0
    assert found["gap_us"]["n"] >= 2 * (lengths.new - 1)
    assert (set(vars(model.gpu)), set(vars(model))) == (before, methods)
    assert engine_busy.measure(model, 3, 2, Lengths(5, 1)) is None


def test_the_engine_does_the_same_under_events(model: NllbModel) -> None:
    """What is served under events is served in as many steps, each of which has begun and ended."""
    lengths = Lengths(5, 8)
    with Engine(model, max_lanes=2) as engine:
        with watched(model, 1) as events:
            serve(engine, model, 2, 8, lengths)
            steps = events.steps()
        serve(engine, model, 2, 8, lengths)
        total = engine.stats().steps
    assert all(step.begin < step.end for step in steps)
    assert total >= 2 * 8
    assert 8 <= len(steps) <= total - 8


def test_an_error_puts_all_back(model: NllbModel) -> None:
    before, methods = set(vars(model.gpu)), set(vars(model))
    with pytest.raises(KeyError), watched(model, 2):
        raise KeyError
    assert (set(vars(model.gpu)), set(vars(model))) == (before, methods)
