# SPDX-License-Identifier: MIT OR Apache-2.0
"""Page-locked staging: nothing is overwritten before it is copied, all is copied at the end, nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_runtime import DevicePtr, GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from metrale.nllb import staging
from metrale.nllb.staging import Ring, Staging

Array = NDArray[Any]


class LateBackend(HostBackend):
    """Reads the source of a copy as late as it may: when the host waits for it, or the stream ends.

    A GPU may read it at any time until then, also from memory that is freed meanwhile, which stays until it is read.
    Copies run in order, whatever their streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[Any, int]] = []
        self._recorded: dict[int, int] = {}
        self._done = 0
        self.waits = 0
        self.pinned: list[int] = []
        self.streams = 0
        self.failing = ""

    def _fail(self, call: str) -> None:
        if call == self.failing:
            self.failing = ""
            raise DeviceError(f"{call}: failed as asked")

    def _run(self, count: int) -> None:
        for source, at in self._late[self._done : count]:
            super().copy_h2d_async(source, at)
        self._done = max(self._done, count)

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        self._fail("alloc_host_pinned")
        self.pinned.append(nbytes)
        return super().alloc_host_pinned(nbytes)

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self.pinned.remove(memory.nbytes)
        super().free_host_pinned(memory)

    def create_stream(self) -> int:
        self.streams += 1
        return super().create_stream()

    def destroy_stream(self, stream: int) -> None:
        self.streams -= 1
        self._run(len(self._late))
        super().destroy_stream(stream)

    def copy_h2d_async(self, src: Any, dst: int, stream: Any = 0) -> None:
        self._fail("copy_h2d_async")
        self._late.append((src, dst))

    def create_event(self, *, timing: bool = False) -> int:
        self._fail("create_event")
        return super().create_event(timing=timing)

    def record_event(self, event: int, stream: Any = 0) -> None:
        self._fail("record_event")
        super().record_event(event, stream)
        self._recorded[event] = len(self._late)

    def event_query(self, event: int) -> bool:
        return super().event_query(event) and self._recorded.get(event, 0) <= self._done

    def event_synchronize(self, event: int) -> None:
        super().event_synchronize(event)
        self.waits += self._recorded.get(event, 0) > self._done
        self._run(self._recorded.get(event, 0))

    def synchronize(self, stream: Any = 0) -> None:
        self._run(len(self._late))
        super().synchronize(stream)


@pytest.fixture
def late() -> Iterator[LateBackend]:
    with LateBackend() as backend:
        yield backend
        assert (backend.pinned, backend.streams) == ([], 0)
        backend.sweep_unreleased()


def copied(values: Array) -> staging.Fill:
    def fill(start: int, room: Array) -> None:
        room[...] = values[start : start + len(room)]

    return fill


def bytes_at(gpu: GpuBackend, ptr: int, count: int) -> bytes:
    result = np.empty(count, dtype=np.uint8)
    gpu.copy_d2h(ptr, result)
    return result.tobytes()


@pytest.mark.parametrize("size", [256, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_everything_arrives_whatever_the_size_of_the_slots(
    late: LateBackend, monkeypatch: pytest.MonkeyPatch, threads: int, size: int
) -> None:
    """Long and short pieces, of three types, through slots that hold a part of a piece or all of them."""
    monkeypatch.setattr(staging, "SLOT_BYTES", size)
    monkeypatch.setattr(staging, "FILLERS", threads)
    rng = np.random.default_rng(1)
    types = {"f32": np.float32, "f16": np.float16, "i32": np.int32}
    pieces = [
        (name, rng.integers(-9, 9, length).astype(types[name])) for length in (1, 7, 300, 5000, 3) for name in types
    ]
    base = late.alloc(sum(piece.nbytes for _, piece in pieces))
    at = base
    with Staging(late, 100_000) as stage:
        for name, piece in pieces:
            at = stage.send(len(piece), name, at, copied(piece))
    assert at - base == sum(piece.nbytes for _, piece in pieces)
    assert bytes_at(late, base, at - base) == b"".join(piece.tobytes() for _, piece in pieces)


def test_slots_are_filled_side_by_side_and_sent_in_order(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet in a barrier: each part is filled while another is. The first of them takes longer."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    monkeypatch.setattr(staging, "FILLERS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    together = threading.Barrier(2, timeout=10)
    filled: list[int] = []

    def fill(start: int, room: Array) -> None:
        together.wait()
        if start % 128 == 0:
            time.sleep(0.01)
        filled.append(start)
        room[...] = np.arange(start, start + len(room))

    base = late.alloc(64 * 4 * 16)
    with Staging(late, 1 << 20) as stage:
        stage.send(64 * 16, "i32", base, fill)
    assert bytes_at(late, base, 64 * 4 * 16) == np.arange(64 * 16, dtype=np.int32).tobytes()
    assert filled != sorted(filled)


def test_the_host_waits_only_when_every_slot_is_in_use(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", 1024)
    monkeypatch.setattr(staging, "FILLERS", 1)
    slots = 1 + staging.SPARE_SLOTS
    base = late.alloc(1024 * (slots + 1))
    with Staging(late, 1 << 20) as stage:
        stage.send(256 * slots, "i32", base, copied(np.arange(256 * slots, dtype=np.int32)))
        assert late.waits == 0
        stage.send(256, "i32", base.offset(1024 * slots), copied(np.arange(256, dtype=np.int32)))
        assert late.waits == 1
    expected = np.concatenate([np.arange(256 * slots, dtype=np.int32), np.arange(256, dtype=np.int32)])
    assert bytes_at(late, base, 1024 * (slots + 1)) == expected.tobytes()


@pytest.mark.parametrize(("nbytes", "slots"), [(1000, 2), (1 << 20, 2), (8 << 20, 2), (9 << 20, 3), (1 << 40, 9)])
def test_a_short_upload_takes_little_memory(
    late: LateBackend, monkeypatch: pytest.MonkeyPatch, nbytes: int, slots: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    with Staging(late, nbytes):
        assert late.pinned == [min(nbytes, staging.SLOT_BYTES)] * slots


@pytest.mark.parametrize("call", ["alloc_host_pinned", "create_event", "copy_h2d_async", "record_event"])
def test_a_failure_leaves_nothing_behind(late: LateBackend, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A copy that was under way is waited for, and so are the threads."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    base = late.alloc(1 << 16)
    threads = threading.active_count()

    def send() -> None:
        with Staging(late, 1 << 16) as stage:
            stage.send(64, "i32", base, copied(np.zeros(64, np.int32)))
            late.failing = late.failing or call
            stage.send(8192, "i32", base, copied(np.zeros(8192, np.int32)))

    late.failing = call if call in ("alloc_host_pinned", "create_event") else ""
    with pytest.raises(DeviceError, match=f"{call}: failed as asked"):
        send()
    assert (late.pinned, late.streams, threading.active_count()) == ([], 0, threads)


@pytest.mark.parametrize("count", [4, 100_000])
def test_what_fills_a_slot_may_fail(late: LateBackend, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """It is the first failure, by place, that is raised, while later parts are sent or as the context is left."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)

    def refuse(start: int, room: Array) -> None:
        raise ValueError(f"no number {start}")

    def send() -> None:
        with Staging(late, 1 << 20) as stage:
            stage.send(64, "i32", base, copied(np.ones(64, np.int32)))
            stage.send(count, "i32", base.offset(256), refuse)

    base = late.alloc(256 + 4 * count)
    with pytest.raises(ValueError, match="no number 0"):
        send()
    assert late.pinned == []
    assert bytes_at(late, base, 256) == np.ones(64, np.int32).tobytes()


def test_after_an_exception_nothing_more_is_filled(late: LateBackend) -> None:
    filled: list[int] = []

    def send() -> None:
        with Staging(late, 1000) as stage:
            stage.send(4, "i32", base, lambda start, room: filled.append(start))
            raise KeyError("of the caller")

    base = late.alloc(1024)
    with pytest.raises(KeyError, match="of the caller"):
        send()
    assert (filled, late.pinned) == ([], [])


def push(ring: Ring, value: int, at: DevicePtr) -> None:
    ring.slots[ring.take()][...] = value
    ring.send(at, 0)


def test_a_slot_is_reused_only_when_it_was_copied(late: LateBackend) -> None:
    """Ten uploads to ten places through three slots, which the device reads as late as it may."""
    places = [late.alloc(300) for _ in range(10)]
    ring = Ring(late, 300, 3)
    for value, place in enumerate(places[:3]):
        push(ring, value, place)
    assert late.waits == 0
    for value, place in enumerate(places[3:], 3):
        push(ring, value, place)
    assert late.waits == 7
    late.synchronize()
    assert [bytes_at(late, place, 300) for place in places] == [bytes([value]) * 300 for value in range(10)]
    ring.free()
    ring.free()
    assert late.pinned == []


@pytest.mark.parametrize("call", ["copy_h2d_async", "record_event"])
def test_a_ring_goes_on_after_a_failed_upload(late: LateBackend, call: str) -> None:
    place = late.alloc(300)
    ring = Ring(late, 300, 2)
    push(ring, 1, place)
    late.failing = call
    with pytest.raises(DeviceError, match="failed as asked"):
        push(ring, 2, place)
    for value in (3, 4, 5):
        push(ring, value, place)
    late.synchronize()
    assert bytes_at(late, place, 300) == bytes([5]) * 300
    ring.free()


@pytest.mark.parametrize("call", ["alloc_host_pinned", "create_event"])
def test_a_ring_that_cannot_be_made_leaves_nothing_behind(late: LateBackend, call: str) -> None:
    late.failing = call
    with pytest.raises(DeviceError, match="failed as asked"):
        Ring(late, 300, 2)
    assert late.pinned == []
