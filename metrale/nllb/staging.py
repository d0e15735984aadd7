# SPDX-License-Identifier: MIT OR Apache-2.0
"""Page-locked host memory on the way to the device: copies from it are fast, and the host need not wait for them."""

from __future__ import annotations

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
from metrale.checkpoint import FilePlace
from metrale.nllb.turns import Turn

SLOT_BYTES: Final = 8 << 20
"""Size of a slot of `Staging`. What Python does for each takes time that no other thread can use, which half of this
would double; and to lock pages takes as long as to fill them ten times."""

THREADS: Final = 10
"""Most threads of `Staging`: one of them reads from the page cache at a tenth of the rate of page-locked copies, and
waits while the device copies from its slot."""

Fill = Callable[[int, NDArray[Any]], object]
"""``fill(start, room)`` writes elements ``start`` to ``start + len(room)`` of a source into ``room``, on any thread."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements that are to be on the device: how many of which type, where, and what writes them to host memory.

    ``stored`` is where a file has them as they are, one after another.
    """

    count: int
    dtype: str
    at: DevicePtr
    fill: Fill
    stored: FilePlace | None = None

    @property
    def nbytes(self) -> int:
        return self.count * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a transfer, from ``start`` on, that go to ``at`` by way of a slot's bytes ``offset`` to ``end``."""

    transfer: Transfer
    start: int
    at: DevicePtr
    offset: int
    end: int


class Staging:
    """Threads that fill page-locked slots and have the device copy from them, each on a stream of its own.

    While the device copies from one slot, others are filled. A context manager; leaving it frees everything.

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
        threads = min(THREADS, os.cpu_count() or 1, -(-nbytes // self.slot_bytes) or 1)
        with ExitStack() as undo:
            memory = gpu.alloc_host_pinned(self.slot_bytes * threads)
            undo.callback(gpu.free_host_pinned, memory)
            self._lanes: list[tuple[NDArray[np.uint8], int]] = []
            for slot in memory.array.reshape(threads, self.slot_bytes):
                self._lanes.append((slot, gpu.create_stream()))
                undo.callback(gpu.destroy_stream, self._lanes[-1][1])  # finishes its work first
            self._teardown = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lanes.clear()  # nobody fills a slot that is freed
        self._teardown.close()

    def follow(self, turn: Turn) -> None:
        """Let what is sent from here on come after every use so far of what ``turn`` guards; the host goes on."""
        for _, stream in self._lanes:
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
            threading.Thread(target=self._run, args=(jobs, *lane), name=f"metrale staging {number}", daemon=True)
            for number, lane in enumerate(self._lanes)
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

    def _run(self, jobs: _Jobs, slot: NDArray[np.uint8], stream: int) -> None:
        """Do jobs until there are none."""
        for number, parts in jobs:
            try:
                self._send(parts, slot, stream)
            except BaseException as error:
                jobs.failed(number, error)

    def _send(self, parts: list[Part], slot: NDArray[np.uint8], stream: int) -> None:
        """Send what shares a slot. Nothing reads the slot any more on return; after an exception, nothing fills it."""
        self._gpu.bind_to_thread()  # the calls are cheaper then
        for part in parts:
            room = slot[part.offset : part.end].view(dtypes.NUMPY[part.transfer.dtype])
            part.transfer.fill(part.start, room)
        for at, start, stop in runs(parts):
            self._gpu.copy_h2d_on_stream(slot[start:stop], at, stream)


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

    The host can be as many uploads ahead of the device as there are slots, less those of a part; then it waits.

    Parameters
    ----------
    gpu : GpuBackend
    slot_bytes : int
        Bytes of one upload.
    slots : int
    parts : int or None
        Equal parts of the slots, each of which is reused as a whole: so there is an event for the last upload of each
        alone. Uploads must then come one after the other on the device, on whatever streams. None: a slot is a part.

    Attributes
    ----------
    slots : list of ndarray
        The bytes of each slot, uint8.

    Raises
    ------
    OutOfMemory, DeviceError
        When the memory cannot be had; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, slot_bytes: int, slots: int, parts: int | None = None) -> None:
        self._gpu = gpu
        self.slots: list[NDArray[np.uint8]] = []
        self._events: list[int] = []
        self._each = slots // (parts or slots)
        self._next = 0
        size = -(-slot_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        with ExitStack() as undo:
            memory = gpu.alloc_host_pinned(size * slots)
            undo.callback(gpu.free_host_pinned, memory)
            for start in range(0, size * slots, size):
                self.slots.append(memory.array[start : start + slot_bytes])
            for _ in range(slots // self._each):
                self._events.append(gpu.create_event())
                undo.callback(gpu.destroy_event, self._events[-1])
            self._teardown = undo.pop_all()

    def take(self) -> int:
        """Return the number of the next slot, to be filled and then sent. Waits while its last copy is not done."""
        if self._next % self._each == 0:
            event = self._events[self._next // self._each]
            if not self._gpu.event_query(event):  # one that was never recorded has happened
                self._gpu.event_synchronize(event)
        return self._next

    def send(self, at: DevicePtr, stream: StreamLike) -> None:
        """Enqueue the copy of the slot that `take` returned, and go on to the next slot."""
        self._gpu.copy_h2d_async(self.slots[self._next], at, stream)
        after = self._next + 1
        if after % self._each == 0:
            self._gpu.record_event(self._events[self._next // self._each], stream)
        self._next = after % len(self.slots)

    def free(self) -> None:
        """Free the slots. Copies that are enqueued may still read them. Calling it again does nothing."""
        self.slots.clear()
        self._teardown.close()
