# SPDX-License-Identifier: MIT OR Apache-2.0
"""Work that fails: who is told, when and how often, and what runs all the same."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_runtime.errors import DeviceError, GuardViolation, UninitializedRead
from gpu_runtime.host import HostBackend
from gpu_runtime.streams import PER_THREAD_STREAM
from tests.gpu_runtime.checked import filled, launch, made, opened, read
from tests.gpu_runtime.ordered import LATER

later_orders = pytest.mark.parametrize(("order", "seed"), LATER)

BAD = 100
"""Work with a number from this on fails."""


class Failing:
    """A backend whose work notes its number when it runs, or fails."""

    def __init__(self, order: Any = "deferred", seed: int = 0) -> None:
        self.done: list[int] = []
        self.gpu = opened(self._work, order=order, seed=seed)
        self._x = filled(self.gpu)

    def _work(self, *, add: int, **_: Any) -> None:
        if add >= BAD:
            raise DeviceError(f"number {add} failed as asked")
        self.done.append(add)

    def put(self, number: int, stream: int = 0) -> None:
        launch(self.gpu, stream, x=self._x, add=number)

    def end(self) -> None:
        self.gpu.sweep_unreleased()
        self.gpu.close()


@later_orders
def test_who_waits_for_the_stream_is_told_once_and_the_rest_runs(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu, other = failing.gpu, failing.gpu.create_stream()
    for number in (1, BAD, 2):
        failing.put(number)
    failing.put(3, other)
    gpu.synchronize(other)
    assert 3 in failing.done
    with pytest.raises(DeviceError, match=r"^number 100 failed as asked\nenqueued at .*checked\.py:\d+ in launch$"):
        gpu.synchronize()
    assert [one for one in failing.done if one != 3] == [1, 2]
    gpu.synchronize()
    failing.put(4)
    gpu.synchronize()
    assert failing.done[-1] == 4
    failing.end()


def test_in_order_the_call_that_enqueues_is_told() -> None:
    failing = Failing("in_order")
    with pytest.raises(DeviceError, match=r"number 100 failed as asked$"):
        failing.put(BAD)
    failing.gpu.synchronize()
    failing.end()


@later_orders
def test_an_event_tells_what_went_wrong_before_it(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu, stream = failing.gpu, failing.gpu.create_stream()
    before, after = gpu.create_event(), gpu.create_event()
    failing.put(1, stream)
    gpu.record_event(before, stream)
    failing.put(BAD, stream)
    gpu.record_event(after, stream)
    gpu.event_synchronize(before)
    for _ in range(100):
        gpu.event_query(after)
    with pytest.raises(DeviceError, match="number 100"):
        gpu.event_synchronize(after)
    gpu.event_synchronize(after)
    gpu.synchronize(stream)
    failing.end()


@later_orders
def test_a_stream_that_waited_for_it_tells_as_well(order: Any, seed: int) -> None:
    """By way of a third stream, and although the event was recorded again."""
    failing = Failing(order, seed)
    gpu = failing.gpu
    streams, event = [gpu.create_stream() for _ in range(4)], gpu.create_event()
    failing.put(BAD, streams[0])
    for one, two in ((0, 1), (1, 2)):
        gpu.record_event(event, streams[one])
        gpu.stream_wait_event(streams[two], event)
    gpu.record_event(event, streams[3])
    failing.put(1, streams[2])
    failing.put(2, streams[3])
    gpu.synchronize(streams[3])
    with pytest.raises(DeviceError, match="number 100"):
        gpu.synchronize(streams[2])
    for stream in streams:
        gpu.synchronize(stream)
    assert sorted(failing.done) == [1, 2]
    failing.end()


@later_orders
def test_an_event_that_had_happened_before_it_was_waited_for(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu = failing.gpu
    streams, event = [gpu.create_stream() for _ in range(2)], gpu.create_event()
    failing.put(BAD, streams[0])
    gpu.record_event(event, streams[0])
    gpu.free(gpu.alloc(8))  # everything has run
    gpu.stream_wait_event(streams[1], event)
    with pytest.raises(DeviceError, match="number 100"):
        gpu.synchronize(streams[1])
    failing.end()


@later_orders
def test_a_stream_is_destroyed_all_the_same(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    stream = failing.gpu.create_stream()
    failing.put(BAD, stream)
    with pytest.raises(DeviceError, match="number 100"):
        failing.gpu.destroy_stream(stream)
    with pytest.raises(DeviceError, match="expected a live stream"):
        failing.gpu.synchronize(stream)
    failing.end()


@later_orders
def test_calls_that_finish_all_work_leave_the_failure_to_who_waits(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu, stream = failing.gpu, failing.gpu.create_stream()
    failing.put(BAD, stream)
    gpu.free(gpu.alloc(8))
    gpu.free_host_pinned(gpu.alloc_host_pinned(8))
    gpu.sweep_unreleased()
    gpu.synchronize()
    with pytest.raises(DeviceError, match="number 100"):
        gpu.synchronize(stream)
    gpu.close()


@later_orders
def test_close_tells_what_nobody_was_told(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    failing.put(BAD)
    with pytest.raises(DeviceError, match="number 100"):
        failing.end()
    with pytest.raises(DeviceError, match="closed"):
        failing.gpu.synchronize()
    failing.gpu.close()


@later_orders
def test_the_first_of_several_is_raised_with_notes_of_the_others(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    for number in (BAD, 1, BAD + 1, BAD + 2):
        failing.put(number)
    with pytest.raises(DeviceError, match=r"^number 100") as found:
        failing.gpu.synchronize()
    notes = found.value.__notes__
    assert len(notes) == 3
    for note, number in zip(notes[1:], (101, 102), strict=True):
        assert note.startswith(f"and then DeviceError: number {number} failed as asked; enqueued at ")
        assert note.endswith("in launch")
    failing.end()


@later_orders
def test_no_failure_is_lost_whatever_is_waited_for(order: Any, seed: int) -> None:
    """Some streams wait for others, some are destroyed, some are never waited for."""
    failing = Failing(order, seed)
    gpu = failing.gpu
    streams, event = [gpu.create_stream() for _ in range(4)], gpu.create_event()
    told = ""

    def note(call: Any) -> None:
        nonlocal told
        try:
            call()
        except DeviceError as error:
            told += "\n".join([str(error), *error.__notes__])

    for number in range(12):
        failing.put(BAD + number, streams[number % 4])
        gpu.record_event(event, streams[number % 4])
        gpu.stream_wait_event(streams[number * 7 % 4], event)
    note(lambda: gpu.event_synchronize(event))
    note(lambda: gpu.destroy_stream(streams[1]))
    note(lambda: gpu.synchronize(streams[2]))
    with pytest.raises(DeviceError, match="live stream"):
        gpu.synchronize(streams[1])
    note(failing.end)
    assert [told.count(f"number {BAD + number} failed") for number in range(12)] == [1] * 12


@later_orders
def test_a_node_of_a_graph_that_fails(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu = failing.gpu
    gpu.begin_capture()
    failing.put(1)
    failing.put(BAD)
    failing.put(2)
    graph = gpu.end_capture()
    gpu.launch_graph(graph)
    with pytest.raises(DeviceError, match=r"number 100 .*\nenqueued at .* in test_a_node_of_a_graph_that_fails"):
        gpu.synchronize()
    assert failing.done == [1, 2]
    failing.end()


@later_orders
def test_a_launch_that_is_waited_for_tells_at_once(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    failing.gpu.debug_sync_kernels = True
    with pytest.raises(DeviceError, match="number 100"):
        failing.put(BAD)
    failing.put(1)
    failing.end()


@later_orders
def test_the_thread_that_enqueued_it_is_told_though_another_was(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    gpu = failing.gpu
    failing.put(BAD)
    with ThreadPoolExecutor(1) as pool:
        for raises in (True, False):
            error = pool.submit(gpu.synchronize).exception()
            assert isinstance(error, DeviceError) is raises
        with pytest.raises(DeviceError, match="number 100"):
            gpu.synchronize()
        gpu.synchronize()
        pool.submit(gpu.synchronize).result()
    failing.end()


@later_orders
def test_a_failure_of_a_thread_that_has_ended(order: Any, seed: int) -> None:
    failing = Failing(order, seed)
    thread = threading.Thread(target=failing.put, args=(BAD, PER_THREAD_STREAM))
    thread.start()
    thread.join()
    with pytest.raises(DeviceError, match="number 100"):
        failing.end()


@later_orders
def test_reports_of_checked_memory_name_the_call_that_enqueued(order: Any, seed: int) -> None:
    """And those of work that comes after it, which fails for no other reason, are notes."""
    with opened(order=order, seed=seed) as gpu:
        x, out = made(gpu), made(gpu)
        launch(gpu, x=x, out=out)
        with pytest.raises(UninitializedRead, match=r"^probe: x: never written: .*; read at .* in launch\n") as found:
            read(gpu, out)
        assert "and then UninitializedRead: copy_d2h: src: never written: 32 of 32 bytes" in found.value.__notes__[1]
        gpu.sweep_unreleased()


def test_close_tells_of_damage_and_of_failed_work(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        failing = Failing()
        gpu = failing.gpu
        ptr = made(gpu, 8)
        failing.put(BAD)
        gpu.poison_redzones()
        block: Any = gpu
        block._memory._storage[int(ptr)][0] = 0
        with pytest.raises(DeviceError, match="number 100") as found:
            gpu.close()
    assert isinstance(found.value.__context__, GuardViolation)


class Interrupt(BaseException):
    """What stands for a KeyboardInterrupt, which would end the tests if it got away."""


@later_orders
def test_an_interrupt_is_the_callers(order: Any, seed: int) -> None:
    """It is no failure of the work, which is done with."""
    done = []

    def work(*, add: int, **_: Any) -> None:
        if add == BAD:
            raise Interrupt
        done.append(add)

    with opened(work, order=order, seed=seed) as gpu:
        x = filled(gpu)
        interrupted = 0
        for add in (BAD, 1):
            try:
                launch(gpu, x=x, add=add)
                gpu.free(gpu.alloc(8))
            except Interrupt:
                interrupted += 1
        gpu.synchronize()
        assert interrupted == 1
        assert done == [1]
        gpu.free(x)


@later_orders
def test_work_cannot_wait_for_work(order: Any, seed: int) -> None:
    """As a finalizer might, which runs in the midst of something else. It may enqueue."""
    gpu: HostBackend

    def work(*, add: int, **_: Any) -> None:
        if add:
            gpu.memset_async(x, 1, 8)
            gpu.synchronize()

    gpu = opened(work, order=order, seed=seed)
    x = filled(gpu)
    launch(gpu, x=x, add=1)
    with pytest.raises(DeviceError, match="while this thread runs a piece of work"):
        gpu.synchronize()
    gpu.synchronize()
    gpu.free(x)
    gpu.close()
