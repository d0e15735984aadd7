# SPDX-License-Identifier: MIT OR Apache-2.0
"""When enqueued work runs: what makes it run, what else runs then, and what does not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.errors import DeviceError
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from tests.gpu_runtime.checked import filled, launch, opened
from tests.gpu_runtime.ordered import Noted, every_order

# the choice


@pytest.mark.parametrize("order", ["", "inorder", "IN_ORDER", None, 1, ["deferred"], object()])
def test_an_order_that_there_is_none_of(order: Any) -> None:
    with pytest.raises(ValueError, match="order: expected one of 'in_order', 'deferred', 'adversarial', got"):
        HostBackend(order=order)


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.0, TypeError), (None, TypeError), (True, TypeError)])
def test_a_seed_that_is_none(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed: expected"):
        HostBackend(order="adversarial", seed=seed)


def test_by_itself_work_runs_as_it_is_enqueued() -> None:
    with HostBackend(memory_limit=64) as gpu:
        ptr, target = gpu.alloc(4), bytearray(4)
        gpu.memset_async(ptr, 7, 4)
        gpu.copy_d2h_async(ptr, target)
        assert target == b"\x07" * 4
        gpu.free(ptr)


def test_the_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checked_host.md").read_text(encoding="utf-8")
    found = re.search(r"^## Orders\n.*?^```python\n(.*?)^```\n\n```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]


# what makes deferred work run

WAITS: dict[str, Callable[[HostBackend, int, int, int, PinnedMemory], Any]] = {
    "synchronize": lambda gpu, stream, event, ptr, memory: gpu.synchronize(stream),
    "event_synchronize": lambda gpu, stream, event, ptr, memory: gpu.event_synchronize(event),
    "copy_d2h_on_stream": lambda gpu, stream, event, ptr, memory: gpu.copy_d2h_on_stream(ptr, bytearray(1), stream),
    "copy_h2d_on_stream": lambda gpu, stream, event, ptr, memory: gpu.copy_h2d_on_stream(bytearray(1), ptr, stream),
    "copy_files_h2d": lambda gpu, stream, event, ptr, memory: gpu.copy_files_h2d([], stream),
    "destroy_stream": lambda gpu, stream, event, ptr, memory: gpu.destroy_stream(stream),
    "free": lambda gpu, stream, event, ptr, memory: gpu.free(ptr),
    "free_host_pinned": lambda gpu, stream, event, ptr, memory: gpu.free_host_pinned(memory),
    "sweep_unreleased": lambda gpu, stream, event, ptr, memory: gpu.sweep_unreleased(),
    "close": lambda gpu, stream, event, ptr, memory: gpu.close(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_calls_that_make_deferred_work_run(wait: Callable[..., Any]) -> None:
    noted = Noted("deferred")
    gpu = noted.gpu
    stream, event, memory, ptr = gpu.create_stream(), gpu.create_event(), gpu.alloc_host_pinned(8), gpu.alloc(8)
    gpu.memset(ptr, 0, 8)
    noted.put(1, stream)
    gpu.record_event(event, stream)
    noted.put(2, stream)
    assert noted.done == []
    wait(gpu, stream, event, ptr, memory)
    assert noted.done in ([1], [1, 2])
    assert noted.done == [1, 2] or wait is WAITS["event_synchronize"], "an event stands for what came before it"
    gpu.close()
    assert noted.done == [1, 2]


def test_calls_that_do_not() -> None:
    noted = Noted("deferred")
    gpu = noted.gpu
    stream, other, event, fresh = gpu.create_stream(), gpu.create_stream(), gpu.create_event(), gpu.create_event()
    noted.put(1, stream)
    gpu.record_event(event, stream)
    gpu.record_event(fresh, other)
    gpu.stream_wait_event(other, event)
    ptr = gpu.alloc(8)
    gpu.memset(ptr, 0, 8)
    gpu.copy_d2h(ptr, bytearray(8))
    gpu.copy_d2d(ptr, ptr + 4, 4)
    gpu.synchronize()
    gpu.event_synchronize(fresh)
    gpu.destroy_stream(gpu.create_stream())
    gpu.mark_written(ptr, 8)
    gpu.free(0)
    gpu.begin_capture()
    gpu.launch_graph(gpu.end_capture(), other)
    gpu.alloc_host_pinned(8)
    assert not gpu.event_query(event)
    assert gpu.event_query(fresh)
    gpu.destroy_event(event)
    assert gpu.alloc_report()
    assert noted.done == []
    gpu.synchronize(other)
    assert noted.done == [1]
    noted.end()


def test_a_wait_runs_what_it_needs_and_no_more() -> None:
    """Four streams: the second waits for a part of the first, and the third for a part of the second."""
    noted = Noted("deferred")
    gpu = noted.gpu
    streams = [gpu.create_stream() for _ in range(4)]
    event = gpu.create_event()
    for number, stream in enumerate(streams):
        noted.put(10 * number, stream)
        gpu.record_event(event, stream)
        if number < 2:
            gpu.stream_wait_event(streams[number + 1], event)
        noted.put(10 * number + 1, stream)
    gpu.synchronize(streams[2])
    assert noted.done == [0, 10, 20, 21]
    gpu.event_synchronize(event)
    assert noted.done == [0, 10, 20, 21, 30]
    gpu.synchronize(streams[0])
    assert noted.done == [0, 10, 20, 21, 30, 1]
    noted.end()
    assert sorted(noted.done) == [0, 1, 10, 11, 20, 21, 30, 31]


@every_order
def test_long_chains_of_waits(order: Any, seed: int) -> None:
    """Longer than Python's stack is deep; the order of the calls is the only one."""
    with HostBackend(memory_limit=64, order=order, seed=seed) as gpu:
        ptr, out, event = gpu.alloc(1), bytearray(1), gpu.create_event()
        streams = [gpu.create_stream() for _ in range(2)]
        for number in range(1200):
            stream, other = streams[number % 2], streams[1 - number % 2]
            gpu.memset_async(ptr, number % 251, 1, stream)
            gpu.record_event(event, stream)
            gpu.stream_wait_event(other, event)
        gpu.copy_d2h_on_stream(ptr, out, other)
        assert out[0] == 1199 % 251
        gpu.sweep_unreleased()


# what every order keeps


@every_order
def test_a_stream_keeps_its_order_and_everything_runs_once(order: Any, seed: int) -> None:
    noted = Noted(order, seed)
    gpu = noted.gpu
    streams = [0, gpu.create_stream(), gpu.create_stream()]
    for number in range(60):
        noted.put(number, streams[number % 3])
        if number % 20 == 19:
            gpu.synchronize(streams[number % 3])
            assert {one for one in range(number + 1) if one % 3 == number % 3} <= set(noted.done)
    for stream in streams:
        gpu.synchronize(stream)
    assert sorted(noted.done) == list(range(60))
    for index in range(3):
        own = [number for number in noted.done if number % 3 == index]
        assert own == sorted(own)
    noted.end()


def order_of(seed: int) -> list[int]:
    noted = Noted("adversarial", seed)
    gpu = noted.gpu
    streams, event = [gpu.create_stream() for _ in range(4)], gpu.create_event()
    for number in range(40):
        noted.put(number, streams[number % 4])
        if number % 7 == 0:
            gpu.record_event(event, streams[number % 4])
            gpu.stream_wait_event(streams[(number + 1) % 4], event)
        if number % 11 == 0:
            gpu.event_query(event)
    noted.end()
    return noted.done


def test_a_seed_stands_for_one_order() -> None:
    orders = [order_of(seed) for seed in range(12)]
    assert orders == [order_of(seed) for seed in range(12)]
    assert len({tuple(one) for one in orders}) > 9


@every_order
def test_an_event_says_truly_whether_it_has_happened(order: Any, seed: int) -> None:
    noted = Noted(order, seed)
    gpu = noted.gpu
    streams, events = [gpu.create_stream() for _ in range(3)], [gpu.create_event() for _ in range(12)]
    for number, event in enumerate(events):
        noted.put(number, streams[number % 3])
        gpu.record_event(event, streams[number % 3])
        for earlier, known in enumerate(events[: number + 1]):
            assert gpu.event_query(known) <= (earlier in noted.done)
    gpu.event_synchronize(events[6])
    assert gpu.event_query(events[6])
    assert gpu.event_query(events[3]), "it came before that one"
    assert {0, 3, 6} <= set(noted.done)
    noted.end()


@pytest.mark.parametrize("seed", range(8))
def test_a_loop_of_queries_ends(seed: int) -> None:
    noted = Noted("adversarial", seed)
    gpu = noted.gpu
    streams, event = [gpu.create_stream() for _ in range(2)], gpu.create_event()
    for number in range(10):
        noted.put(number, streams[number % 2])
        gpu.record_event(event, streams[number % 2])
        gpu.stream_wait_event(streams[1 - number % 2], event)
    for _ in range(500):  # about every other query runs a piece of the 30
        if gpu.event_query(event):
            break
    assert noted.done == list(range(10))
    noted.end()


@every_order
def test_times_are_those_of_the_work(order: Any, seed: int) -> None:
    with opened(lambda **_: time.sleep(0.001), order=order, seed=seed) as gpu:
        x, start, end = filled(gpu), gpu.create_event(timing=True), gpu.create_event(timing=True)
        stream = gpu.create_stream()
        gpu.record_event(start)
        gpu.stream_wait_event(stream, start)
        launch(gpu, stream, x=x)
        gpu.record_event(end, stream)
        gpu.event_synchronize(end)
        assert 1 <= gpu.event_elapsed_ms(start, end) < 1000
        gpu.free(x)


def test_a_time_that_lies_ahead() -> None:
    with HostBackend(memory_limit=64, order="deferred") as gpu:
        event = gpu.create_event(timing=True)
        gpu.record_event(event)
        with pytest.raises(DeviceError, match="recorded and reached"):
            gpu.event_elapsed_ms(event, event)
        gpu.synchronize()
        assert gpu.event_elapsed_ms(event, event) == 0


@every_order
def test_retained_copies_keep_the_bytes_of_the_call(order: Any, seed: int) -> None:
    with HostBackend(memory_limit=64, order=order, seed=seed) as gpu:
        ptr, buffer, out = gpu.alloc(4), bytearray(b"1234"), bytearray(4)
        gpu.copy_h2d_async_retained(buffer, ptr)
        buffer[:] = b"5678"
        gpu.copy_d2h(ptr, out)
        assert out == b"1234"
        gpu.free(ptr)


def test_the_default_stream_waits_for_itself() -> None:
    """An event of the stream's own orders nothing new, also when the stream has two names."""
    noted = Noted("deferred")
    gpu = noted.gpu
    event = gpu.create_event()
    noted.put(1)
    gpu.record_event(event)
    gpu.stream_wait_event(gpu.default_stream(), event)
    noted.put(2)
    gpu.synchronize()
    assert noted.done == [1, 2]
    noted.end()
