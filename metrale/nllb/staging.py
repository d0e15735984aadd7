# SPDX-License-Identifier: MIT OR Apache-2.0
"""Page-locked host memory on the way to the device: copies from it are fast, and the host need not wait for them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import REGION_ALIGNMENT
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.turns import Turn

SLOT_BYTES: Final = 4 << 20
"""Size of a slot of `Staging`. Each is used again and again, and so stays in the processor's cache; it is large enough
for the calls around a copy to take less time than what happens in between."""

THREADS: Final = 8
"""Most threads of `Staging`: one of them reads from the page cache at a fraction of the rate of page-locked copies."""

SLOTS: Final = 2
"""Slots of a thread: it fills one while the device copies from the other."""

Fill = Callable[[int, NDArray[Any]], object]
"""``fill(start, room)`` writes elements ``start`` to ``start + len(room)`` of a source into ``room``, on any thread."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements that are to be on the device: how many of which type, where, and what writes them to host memory."""

    count: int
    dtype: str
    at: DevicePtr
    fill: Fill


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a transfer, from ``start`` on, that go to ``at`` by way of a slot's bytes ``offset`` to ``end``."""

    transfer: Transfer
    start: int
    at: DevicePtr
    offset: int
    end: int


_Slot = tuple[NDArray[np.uint8], int]
"""Page-locked memory, and the stream of the copies from it."""


class Staging:
    """Threads that fill page-locked slots and have the device copy from them, each slot on a stream of its own.

    While the device copies from some slots, others are filled. A context manager; leaving it frees everything.

    Parameters
    ----------
    gpu : GpuBackend
    nbytes : int
        What will be sent in all, about.

    Raises
    ------
    OutOfMemory, DeviceError
        When slots or streams cannot be had; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, nbytes: int) -> None:
        self._gpu = gpu
        self.slot_bytes: Final = max(min(nbytes, SLOT_BYTES), REGION_ALIGNMENT)
        self._threads = min(THREADS, os.cpu_count() or 1, -(-nbytes // self.slot_bytes) or 1)
        count = min(SLOTS * self._threads, -(-nbytes // self.slot_bytes) or 1)
        with ExitStack() as undo:
            memory = gpu.alloc_host_pinned(self.slot_bytes * count)
            undo.callback(gpu.free_host_pinned, memory)
            self._slots: list[_Slot] = []
            for room in memory.array.reshape(count, self.slot_bytes):
                self._slots.append((room, gpu.create_stream()))
                undo.callback(gpu.destroy_stream, self._slots[-1][1])  # finishes its work first
            self._teardown = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.clear()  # nobody fills a slot that is freed
        self._teardown.close()

    def follow(self, turn: Turn) -> None:
        """Let what is sent from here on come after every use so far of what ``turn`` guards; the host goes on."""
        for _, stream in self._slots:
            turn.wait(stream)

    def send(self, transfers: Iterable[Transfer]) -> None:
        """Send all of it, in no promised order. On return it is on the device, whatever the stream that reads it.

        Raises
        ------
        Exception
            What the first of the parts, in the order given, raised that failed. Some of the others were sent.
        """
        jobs = _Jobs(pack(transfers, self.slot_bytes))
        threads = [
            threading.Thread(
                target=self._run,
                args=(jobs, self._slots[number :: self._threads]),
                name=f"metrale staging {number}",
                daemon=True,
            )
            for number in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # KeyboardInterrupt
            jobs.stop()
            for thread in threads:
                thread.join()
            raise
        jobs.raise_first()
        for _, stream in self._slots:
            self._gpu.synchronize(stream)

    def _run(self, jobs: _Jobs, slots: list[_Slot]) -> None:
        """Do jobs until there are none."""
        turns = itertools.cycle(slots)
        for number, parts in jobs:
            try:
                self._enqueue(parts, *next(turns))
            except BaseException as error:
                jobs.failed(number, error)

    def _enqueue(self, parts: list[Part], slot: NDArray[np.uint8], stream: int) -> None:
        """Fill a slot, once the device has copied what it held before, and enqueue its copies."""
        self._gpu.bind_to_thread()  # the calls are cheaper then
        self._gpu.synchronize(stream)
        for part in parts:
            room = slot[part.offset : part.end].view(dtypes.NUMPY[part.transfer.dtype])
            part.transfer.fill(part.start, room)
        for at, start, stop in runs(parts):
            self._gpu.copy_h2d_async(slot[start:stop], at, stream)


class _Jobs:
    """What is to be done, taken by several threads in order; after a failure no more of it is."""

    def __init__(self, jobs: Iterator[list[Part]]) -> None:
        self._jobs = jobs
        self._taken = 0
        self._lock = threading.Lock()
        self._stopped = False
        self._failures: list[tuple[int, BaseException]] = []

    def __iter__(self) -> Iterator[tuple[int, list[Part]]]:
        while True:
            with self._lock:  # a generator is not for several threads at once
                number = self._taken
                try:
                    job = None if self._stopped else next(self._jobs, None)
                except BaseException as error:
                    self.failed(number, error)
                    job = None
                self._taken += 1
            if job is None:
                return
            yield number, job

    def stop(self) -> None:
        self._stopped = True

    def failed(self, number: int, error: BaseException) -> None:
        self._failures.append((number, error))
        self.stop()

    def raise_first(self) -> None:
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]


def pack(transfers: Iterable[Transfer], slot_bytes: int) -> Iterator[list[Part]]:
    """Cut transfers into parts and yield, in order, those that share a slot. Each part is aligned as a region is."""
    parts: list[Part] = []
    used = 0
    for transfer in transfers:
        itemsize = dtypes.itemsize(transfer.dtype)
        done = 0
        while done < transfer.count:
            if slot_bytes - used < itemsize:
                yield parts
                parts, used = [], 0
            count = min(transfer.count - done, (slot_bytes - used) // itemsize)
            end = used + count * itemsize
            parts.append(Part(transfer, done, transfer.at.offset(done * itemsize), used, end))
            used = -(-end // REGION_ALIGNMENT) * REGION_ALIGNMENT
            done += count
    if parts:
        yield parts


def runs(parts: Iterable[Part]) -> Iterator[tuple[DevicePtr, int, int]]:
    """Yield copies, as address, first byte and end: one for parts that lie together, in the slot and on the device."""
    at, start, stop = DevicePtr.NULL, 0, 0
    for part in parts:
        if stop and (part.offset != stop or part.at - at != stop - start):
            yield at, start, stop
            stop = 0
        if not stop:
            at, start = part.at, part.offset
        stop = part.end
    if stop:
        yield at, start, stop


class Ring:
    """Page-locked slots for small uploads that recur, each reused only when the device has copied what it held.

    The host can be as many uploads ahead of the device as there are slots; then it waits.

    Parameters
    ----------
    gpu : GpuBackend
    slot_bytes : int
        Bytes of one upload.
    slots : int

    Attributes
    ----------
    slots : list of ndarray
        The bytes of each slot, uint8.

    Raises
    ------
    OutOfMemory, DeviceError
        When the memory cannot be had; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, slot_bytes: int, slots: int) -> None:
        self._gpu = gpu
        self.slots: list[NDArray[np.uint8]] = []
        self._events: list[int] = []
        self._next = 0
        size = -(-slot_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        with ExitStack() as undo:
            memory = gpu.alloc_host_pinned(size * slots)
            undo.callback(gpu.free_host_pinned, memory)
            for start in range(0, size * slots, size):
                self.slots.append(memory.array[start : start + slot_bytes])
                self._events.append(gpu.create_event())
                undo.callback(gpu.destroy_event, self._events[-1])
            self._teardown = undo.pop_all()

    def take(self) -> int:
        """Return the number of the next slot, to be filled and then sent. Waits while its last copy is not done."""
        event = self._events[self._next]
        if not self._gpu.event_query(event):  # one that was never recorded has happened
            self._gpu.event_synchronize(event)
        return self._next

    def send(self, at: DevicePtr, stream: StreamLike) -> None:
        """Enqueue the copy of the slot that `take` returned, and go on to the next slot."""
        self._gpu.copy_h2d_async(self.slots[self._next], at, stream)
        self._gpu.record_event(self._events[self._next], stream)
        self._next = (self._next + 1) % len(self.slots)

    def free(self) -> None:
        """Free the slots. Copies that are enqueued may still read them. Calling it again does nothing."""
        self.slots.clear()
        self._teardown.close()
