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
from metrale.nllb.staging import Ring, Staging, Transfer, pack, runs

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
        self._running = threading.Lock()
        self.waits = 0
        self.pinned: list[int] = []
        self.streams = 0
        self.failing = ""

    def _fail(self, call: str) -> None:
        if call == self.failing:
            self.failing = ""
            raise DeviceError(f"{call}: failed as asked")

    def _run(self, count: int) -> None:
        with self._running:
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
        self._fail("create_stream")
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
        self._fail("synchronize")
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


TYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32}


@pytest.mark.parametrize("size", [256, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_everything_arrives_whatever_the_size_of_the_slots(
    late: LateBackend, monkeypatch: pytest.MonkeyPatch, threads: int, size: int
) -> None:
    """Long and short pieces, of three types, through slots that hold a part of a piece or all of them."""
    monkeypatch.setattr(staging, "SLOT_BYTES", size)
    monkeypatch.setattr(staging, "THREADS", threads)
    rng = np.random.default_rng(1)
    pieces = [(name, rng.integers(-9, 9, length)) for length in (1, 7, 300, 0, 5000, 3) for name in TYPES]
    arrays = [values.astype(TYPES[name]) for name, values in pieces]
    base = late.alloc(sum(array.nbytes for array in arrays))
    transfers, at = [], base
    for (name, _), array in zip(pieces, arrays, strict=True):
        transfers.append(Transfer(len(array), name, at, copied(array)))
        at = at.offset(array.nbytes)
    with Staging(late, 100_000) as stage:
        stage.send(transfers)
        expected = b"".join(array.tobytes() for array in arrays)
        assert bytes_at(late, base, at - base) == expected  # on return, and not only at the end
        stage.send([Transfer(len(arrays[-1]), "i32", base, copied(arrays[-1]))])
    assert bytes_at(late, base, at - base) == arrays[-1].tobytes() + expected[arrays[-1].nbytes :]


def test_slots_are_filled_side_by_side(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet in a barrier: each part is filled while another is."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    monkeypatch.setattr(staging, "THREADS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    together = threading.Barrier(2, timeout=10)

    def fill(start: int, room: Array) -> None:
        together.wait()
        room[...] = np.arange(start, start + len(room))

    base = late.alloc(64 * 4 * 16)
    with Staging(late, 1 << 20) as stage:
        stage.send([Transfer(64 * 16, "i32", base, fill)])
    assert bytes_at(late, base, 64 * 4 * 16) == np.arange(64 * 16, dtype=np.int32).tobytes()


@pytest.mark.parametrize(("nbytes", "threads"), [(0, 1), (1000, 1), (8 << 20, 1), (9 << 20, 2), (1 << 40, 10)])
def test_a_short_upload_takes_little_memory(
    late: LateBackend, monkeypatch: pytest.MonkeyPatch, nbytes: int, threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    with Staging(late, nbytes):
        assert late.pinned == [max(min(nbytes, staging.SLOT_BYTES), 256) * threads]
        assert late.streams == threads


def test_what_lies_together_is_copied_at_once() -> None:
    """Four in a row, a gap on the device, one that does not end where the next may begin, and a second slot."""
    at = DevicePtr(1 << 20)

    def transfer(count: int, start: int) -> Transfer:
        return Transfer(count, "f32", at.offset(start), copied(np.zeros(count)))

    rows = [transfer(64, 256 * row) for row in range(4)]
    others = [transfer(64, 2048), transfer(3, 2304), transfer(64, 2316), transfer(1000, 4096)]
    [first, second] = pack([*rows, *others], 4096)
    assert list(runs(first)) == [
        (at, 0, 1024),
        (at.offset(2048), 1024, 1292),
        (at.offset(2316), 1536, 1792),
        (at.offset(4096), 1792, 4096),
    ]
    assert list(runs(second)) == [(at.offset(4096 + 2304), 0, 1696)]
    assert list(runs([])) == []


@pytest.mark.parametrize("call", ["alloc_host_pinned", "create_stream", "copy_h2d_async", "synchronize"])
def test_a_failure_leaves_nothing_behind(late: LateBackend, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Copies that were under way are waited for, and so are the threads."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    base = late.alloc(1 << 16)
    threads = threading.active_count()

    def send() -> None:
        with Staging(late, 1 << 16) as stage:
            late.failing = late.failing or call
            stage.send([Transfer(8192, "i32", base, copied(np.zeros(8192, np.int32)))])

    late.failing = call if call in ("alloc_host_pinned", "create_stream") else ""
    with pytest.raises(DeviceError, match=f"{call}: failed as asked"):
        send()
    assert (late.pinned, late.streams, threading.active_count()) == ([], 0, threads)


@pytest.mark.parametrize("count", [4, 100_000])
def test_what_fills_a_slot_may_fail(late: LateBackend, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """It is the first failure, by place, that is raised; what comes before it is sent, and what comes later is not."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    asked: list[int] = []

    def refuse(start: int, room: Array) -> None:
        asked.append(start)
        raise ValueError(f"no number {start}")

    base = late.alloc(256 + 4 * count)
    with Staging(late, 1 << 20) as stage, pytest.raises(ValueError, match="no number 0"):
        stage.send(
            [
                Transfer(64, "i32", base, copied(np.ones(64, np.int32))),
                Transfer(count, "i32", base.offset(256), refuse),
            ]
        )
    assert late.pinned == []
    assert bytes_at(late, base, 256) == np.ones(64, np.int32).tobytes()
    assert 1 <= len(asked) <= staging.THREADS


def test_what_says_what_to_send_may_fail(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    base = late.alloc(512)

    def transfers() -> Iterator[Transfer]:
        yield Transfer(64, "i32", base, copied(np.ones(64, np.int32)))
        yield Transfer(1, "i32", base.offset(256), copied(np.ones(1, np.int32)))
        raise LookupError("no such tensor")

    with Staging(late, 512) as stage, pytest.raises(LookupError, match="no such tensor"):
        stage.send(transfers())
    assert bytes_at(late, base, 256) == np.ones(64, np.int32).tobytes()


def test_of_two_failures_the_first_by_place_is_raised(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the other comes first."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    monkeypatch.setattr(staging, "THREADS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    together, later = threading.Barrier(2, timeout=10), threading.Event()

    def refuse(start: int, room: Array) -> None:
        together.wait()
        if start:
            later.set()
        else:
            assert later.wait(10)
            time.sleep(0.01)
        raise ValueError(f"no number {start}")

    base = late.alloc(512)
    with Staging(late, 512) as stage, pytest.raises(ValueError, match="no number 0"):
        stage.send([Transfer(128, "i32", base, refuse)])


def test_an_interrupt_waits_for_the_threads(late: LateBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the caller waits for the threads, as Ctrl-C does."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 256)
    interrupted = threading.Event()
    filled: list[int] = []

    def fill(start: int, room: Array) -> None:
        assert interrupted.wait(10)
        filled.append(start)

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt
            super().join(timeout)

    monkeypatch.setattr(threading, "Thread", Interrupted)
    base = late.alloc(1 << 20)
    threads = threading.active_count()
    with Staging(late, 1 << 20) as stage, pytest.raises(KeyboardInterrupt):
        stage.send([Transfer(1 << 18, "i32", base, fill)])
    assert threading.active_count() == threads
    assert len(filled) < 4096


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


def test_slots_of_a_part_are_reused_when_all_of_them_were_copied(late: LateBackend) -> None:
    """Eleven uploads to eleven places through four slots in two parts: the host waits once for each part."""
    places = [late.alloc(300) for _ in range(11)]
    ring = Ring(late, 300, 4, 2)
    for value, place in enumerate(places):
        push(ring, value, place)
    assert late.waits == 4  # before the 5th, 7th, 9th and 11th
    late.synchronize()
    assert [bytes_at(late, place, 300) for place in places] == [bytes([value]) * 300 for value in range(11)]
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
