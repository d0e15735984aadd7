# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures that are asked for: when they happen, what they raise, and that the backend works on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, OutOfMemory
from gpu_runtime.faults import CALLS, Budget, FailAllocation, FailCall, Fault
from gpu_runtime.host import HostBackend
from tests.backends import Device
from tests.gpu_runtime.toy import REGISTRY, launch, values


def opened(device: Device, *faults: Fault, **options: Any) -> GpuBackend:
    return device.open(ops=REGISTRY, faults=faults, **options)


def attempts(gpu: GpuBackend, count: int, **options: Any) -> list[bool]:
    """Allocate 64 bytes ``count`` times; return which attempts failed."""
    failed = []
    for _ in range(count):
        try:
            gpu.alloc(64, **options)
        except OutOfMemory:
            failed.append(True)
        else:
            failed.append(False)
    return failed


def where(failed: list[bool]) -> list[int]:
    return [index for index, one in enumerate(failed) if one]


# allocations


def test_a_budget_is_a_smaller_device(device: Device) -> None:
    budget = Budget(1000)
    with opened(device, budget) as gpu:
        kept = gpu.alloc(600, tag="the holder")
        with pytest.raises(
            OutOfMemory, match="for the cache do not fit: 600 of 1,000 bytes are live in 1 block"
        ) as full:
            gpu.alloc(401, tag="the cache")
        assert (full.value.requested, full.value.live, full.value.limit) == (401, 600, 1000)
        assert "the budget is 1,000 bytes, of which 600 are used" in str(full.value)
        assert "for the holder, allocated at" in str(full.value)
        assert gpu.live_bytes() == 600
        gpu.free(gpu.alloc(400))
        budget.limit = 500
        with pytest.raises(OutOfMemory):
            gpu.alloc(1)
        gpu.free(kept)
        gpu.free(gpu.alloc(500))


@pytest.mark.parametrize(("limit", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_a_budget_is_a_count_of_bytes(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Budget: limit"):
        Budget(limit)


@pytest.mark.parametrize(
    ("nth", "times", "failing"),
    [(0, 1, [0]), (2, 1, [2]), (1, 3, [1, 2, 3]), (3, None, [3, 4, 5]), (None, None, []), (9, 1, [])],
)
def test_allocations_by_their_number(device: Device, nth: int | None, times: int | None, failing: list[int]) -> None:
    fault = FailAllocation(nth, times=times)
    with opened(device, fault) as gpu:
        assert where(attempts(gpu, 6)) == failing
        assert fault.seen == 6
        assert gpu.live_alloc_count() == 6 - len(failing)
        gpu.sweep_unreleased()


def test_allocations_by_tag_and_size(device: Device) -> None:
    tagged, large = FailAllocation(tag="KV", times=None), FailAllocation(1, at_least=100)
    with opened(device, tagged, large) as gpu:
        assert where(attempts(gpu, 2, tag="KV")) == [0, 1]
        assert where(attempts(gpu, 2, tag="kv")) == []
        assert (tagged.seen, large.seen) == (2, 0)
        gpu.alloc(100)
        gpu.alloc(99)
        with pytest.raises(OutOfMemory, match=r"alloc: 101 bytes do not fit: .*allocation 1 was to fail") as full:
            gpu.alloc_managed(101)
        assert (full.value.requested, full.value.live) == (101, 2 * 64 + 199)
        gpu.free(gpu.alloc(101))
        gpu.sweep_unreleased()


def test_page_locked_memory_is_no_memory_of_the_device(device: Device) -> None:
    with opened(device, Budget(0)) as gpu:
        gpu.free_host_pinned(gpu.alloc_host_pinned(64))


def test_the_device_has_its_own_limit_besides(device: Device) -> None:
    with opened(device, Budget(1 << 40), memory_limit=1000) as gpu:
        with pytest.raises(OutOfMemory) as full:
            gpu.alloc(1001)
        assert full.value.limit == gpu.total_memory() == 1000


# calls


def one_of_each(gpu: GpuBackend) -> dict[str, Callable[[], None]]:
    """Return one call of each kind that can fail, on blocks named after their use."""
    source, target = gpu.alloc(64, tag="source"), gpu.alloc(64, tag="target")
    gpu.memset(source, 0, 64)
    event = gpu.create_event()
    gpu.begin_capture()
    graph = gpu.end_capture()
    return {
        "launch": lambda: launch(gpu, values(source, target)),
        "gemm": lambda: gpu.gemm(source, source, target, 1, 1, 4, dtype="f32"),
        "copy_h2d": lambda: gpu.copy_h2d(bytes(8), target),
        "copy_d2h": lambda: gpu.copy_d2h(source, bytearray(8)),
        "copy_d2d": lambda: gpu.copy_d2d(source, target, 8),
        "memset": lambda: gpu.memset(target, 0, 8),
        "record_event": lambda: gpu.record_event(event),
        "launch_graph": lambda: gpu.launch_graph(graph),
    }


WHAT = {"launch": "toy_f32", "copy_h2d": "target", "copy_d2h": "source", "copy_d2d": "target", "memset": "target"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_fails_alone_and_the_next_one_works(device: Device, name: str) -> None:
    fault = FailCall(name, nth=None)
    with opened(device, fault) as gpu:
        calls = one_of_each(gpu)
        assert list(calls) == list(CALLS)
        fault.arm()
        before = fault.seen
        with gpu.launch_trace() as trace:
            for other, call in calls.items():
                if other != name:
                    call()
            assert fault.seen == before
            done = len(trace)
            what = f"{WHAT[name]}: " if name in WHAT else ""
            with pytest.raises(DeviceError, match=f"^{name}: {what}call 0 was to fail"):
                calls[name]()
            assert len(trace) == done
        calls[name]()
        assert fault.seen == before + 2
        gpu.synchronize()
        gpu.sweep_unreleased()


@pytest.mark.parametrize("name", WHAT)
def test_calls_by_what_they_are_about(device: Device, name: str) -> None:
    right, wrong = FailCall(name, WHAT[name], None), FailCall(name, "another", 0, times=None)
    with opened(device, right, wrong) as gpu:
        calls = one_of_each(gpu)
        calls[name]()
        assert wrong.seen == 0
        right.arm(1)
        calls[name]()
        with pytest.raises(DeviceError):
            calls[name]()
        gpu.synchronize()
        gpu.sweep_unreleased()


def test_kinds_are_counted_together(device: Device) -> None:
    """As a test needs that fails each call of a forward in turn."""
    fault = FailCall(("launch", "memset"), nth=None)
    with opened(device, fault) as gpu:
        calls = one_of_each(gpu)
        before = fault.seen
        fault.arm(2)
        calls["memset"]()
        calls["copy_h2d"]()
        calls["launch"]()
        with pytest.raises(DeviceError, match=r"^memset: target: call 2 was to fail"):
            calls["memset"]()
        assert fault.seen == before + 3
        gpu.synchronize()
        gpu.sweep_unreleased()


def test_a_wrong_call_is_refused_before_it_is_counted(device: Device) -> None:
    fault = FailCall(times=None)
    with opened(device, fault) as gpu:
        with pytest.raises(TypeError):
            gpu.memset(gpu.alloc(8), 1.5, 8)  # type: ignore[arg-type]
        with pytest.raises(DeviceError, match="expected a live event"):
            gpu.record_event(12345)
        assert fault.seen == 0
        gpu.sweep_unreleased()


def test_the_error_is_of_the_asked_kind(device: Device) -> None:
    class Lost(DeviceError):
        pass

    with opened(device, FailCall("memset", error=Lost)) as gpu:
        ptr = gpu.alloc(8)
        with pytest.raises(Lost, match="memset: call 0"):
            gpu.memset(ptr, 0, 8)
        gpu.memset(ptr, 0, 8)
        gpu.free(ptr)


def test_a_call_that_is_captured_can_fail_and_its_replay_cannot(device: Device) -> None:
    fault = FailCall("memset", nth=None)
    with opened(device, fault) as gpu:
        ptr = gpu.alloc(8)
        gpu.begin_capture()
        fault.arm()
        with pytest.raises(DeviceError, match="was to fail"):
            gpu.memset_async(ptr, 1, 8)
        gpu.memset_async(ptr, 2, 8)
        graph = gpu.end_capture()
        fault.arm()
        gpu.launch_graph(graph)
        target = bytearray(8)
        gpu.copy_d2h(ptr, target)
        assert target == b"\x02" * 8
        gpu.free(ptr)


@pytest.mark.parametrize("name", ["lunch", "", (), ("launch", "lunch")])
def test_calls_that_there_are_not(name: Any) -> None:
    with pytest.raises(ValueError, match="FailCall: name: expected one or more of launch, gemm"):
        FailCall(name)


@pytest.mark.parametrize("make", [FailAllocation, lambda nth, **options: FailCall("launch", None, nth, **options)])
def test_numbers_are_counts(make: Callable[..., Fault]) -> None:
    for nth, times, error in ((-1, 1, ValueError), (0, 0, ValueError), (1.0, 1, TypeError), (0, True, TypeError)):
        with pytest.raises(error, match="arm: "):
            make(nth, times=times)


# together


def test_faults_compose() -> None:
    """The earlier of the list is asked first; what it refuses, the others neither see nor count."""
    first, second = FailAllocation(1), FailAllocation(1)
    with HostBackend(faults=(first, second, Budget(400))) as gpu:
        assert where(attempts(gpu, 9)) == [1, 2, 8]
        assert (first.seen, second.seen) == (9, 8)
        gpu.sweep_unreleased()


def test_a_fault_of_ones_own() -> None:
    heard: list[tuple[Any, ...]] = []

    class Listens(Fault):
        def allocate(self, nbytes: int, tag: str, live: int) -> None:
            heard.append((nbytes, tag, live))

        def call(self, name: str, what: str) -> None:
            heard.append((name, what))

    with HostBackend(faults=[Listens()]) as gpu:
        ptr = gpu.alloc(8, tag="weights")
        gpu.copy_h2d(bytes(4), ptr + 4)
        gpu.copy_h2d(b"", ptr)
        gpu.free(ptr)
    assert heard == [(8, "weights", 0), ("copy_h2d", "weights"), ("copy_h2d", "")]


def test_arming_again_counts_from_then_on() -> None:
    fault = FailCall("launch", nth=5)
    for _ in range(4):
        fault.call("launch", "a")
    fault.arm(1)
    fault.call("launch", "a")
    with pytest.raises(DeviceError, match="launch: a: call 1"):
        fault.call("launch", "a")
    fault.arm(None)
    for _ in range(3):
        fault.call("launch", "a")
    assert fault.seen == 9


def test_threads_share_a_count() -> None:
    fault = FailCall("launch", nth=100, times=50)

    def work(_: int) -> int:
        failed = 0
        for _ in range(100):
            try:
                fault.call("launch", "a")
            except DeviceError:
                failed += 1
        return failed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 50
    assert fault.seen == 800
