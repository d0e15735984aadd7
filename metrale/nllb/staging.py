# SPDX-License-Identifier: MIT OR Apache-2.0
"""Page-locked host memory on the way to the device: copies from it are fast, and the host need not wait for them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
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

SLOT_BYTES: Final = 8 << 20
"""Size of a slot of `Staging`: a copy of it takes longer than the calls that enqueue it."""

FILLERS: Final = 6
"""Most threads that fill slots: one of them reads from the page cache at a fraction of the rate of the copies."""

SPARE_SLOTS: Final = 3
"""Slots beside those that threads fill: two that the device copies, one after the other, and one that is gathered."""

Fill = Callable[[int, NDArray[Any]], object]
"""``fill(start, room)`` writes elements ``start`` to ``start + len(room)`` of a source into ``room``, on any thread."""


@dataclass(slots=True)
class _Slot:
    """Page-locked memory, what is to be put into it and sent from it, and the thread that puts it there."""

    memory: NDArray[Any]
    event: int
    used: int = 0
    parts: list[tuple[Fill, int, NDArray[Any], DevicePtr]] = field(default_factory=list)
    filling: Future[None] | None = None

    def fill(self) -> None:
        for fill, start, room, _ in self.parts:
            fill(start, room)


class Staging:
    """Slots in turn: threads fill some while the device copies from others.

    A context manager. Leaving it sends all and waits for every copy, so what was sent is on the device from then on,
    whatever the stream that reads it; after an exception, it waits for what is under way and drops the rest. Either
    way everything is freed. One thread uses it; the threads that fill are its own.

    Parameters
    ----------
    gpu : GpuBackend
    nbytes : int
        What will be sent in all, about.

    Raises
    ------
    OutOfMemory, DeviceError
        When the slots cannot be had; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, nbytes: int) -> None:
        self._gpu = gpu
        threads = min(FILLERS, os.cpu_count() or 1)
        self._size = max(min(nbytes, SLOT_BYTES), REGION_ALIGNMENT)
        with ExitStack() as undo:
            self._stream = gpu.create_stream()
            undo.callback(gpu.destroy_stream, self._stream)  # finishes its work first
            self._free: deque[_Slot] = deque()
            for _ in range(min(threads + SPARE_SLOTS, -(-nbytes // self._size) + 1)):
                memory = gpu.alloc_host_pinned(self._size)
                undo.callback(gpu.free_host_pinned, memory)
                event = gpu.create_event()
                undo.callback(gpu.destroy_event, event)
                self._free.append(_Slot(memory.array, event))
            self._pool = ThreadPoolExecutor(threads, "metrale staging")
            undo.callback(self._pool.shutdown, cancel_futures=True)  # before the slots go
            self._teardown = undo.pop_all()
        self._filling: deque[_Slot] = deque()
        self._copying: deque[_Slot] = deque()
        self._gathered = self._free.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._hand_over()
                while self._filling:
                    self._copy()
        finally:
            for slots in (self._free, self._filling, self._copying):
                slots.clear()
            self._gathered.parts.clear()
            self._teardown.close()

    def follow(self, turn: Turn) -> None:
        """Let what is sent from here on come after every use so far of what ``turn`` guards; the host goes on."""
        turn.wait(self._stream)

    def send(self, count: int, dtype: str, at: DevicePtr, fill: Fill) -> DevicePtr:
        """Have ``count`` elements written to ``at`` and return the address after them.

        The host goes on; it waits only when every slot is in use. An exception of ``fill`` is raised by a later call,
        or as the context is left.

        Parameters
        ----------
        count : int
        dtype : str
            Element type on the device, and of the ``room`` that ``fill`` gets.
        at : DevicePtr
        fill : callable
            See `Fill`. It is called for parts, possibly several at a time, until the context is left.
        """
        done = 0
        while done < count:
            room = self._room(count - done, dtype)
            self._gathered.parts.append((fill, done, room, at))
            at = at.offset(room.nbytes)
            done += len(room)
        return at

    def _room(self, count: int, dtype: str) -> NDArray[Any]:
        """Return 1 to ``count`` elements of the slot that is gathered, which may be another one from here on."""
        itemsize = dtypes.itemsize(dtype)
        if self._size - self._gathered.used < itemsize:
            self._hand_over()
            self._gathered = self._next()
        slot = self._gathered
        start = slot.used
        size = min(count, (self._size - start) // itemsize) * itemsize
        slot.used += -(-size // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return slot.memory[start : start + size].view(dtypes.NUMPY[dtype])

    def _hand_over(self) -> None:
        """Have the gathered slot filled."""
        self._gathered.filling = self._pool.submit(self._gathered.fill)
        self._filling.append(self._gathered)

    def _next(self) -> _Slot:
        """Return a slot that nothing uses. On the way, whatever is filled is sent, in order."""
        while not self._free:
            while self._filling and (len(self._copying) < 2 or self._is_filled(self._filling[0])):
                self._copy()  # with two copies enqueued, the device has work while the host waits for the first
            slot = self._copying.popleft()
            self._gpu.event_synchronize(slot.event)
            self._free.append(slot)
        return self._free.popleft()

    @staticmethod
    def _is_filled(slot: _Slot) -> bool:
        return slot.filling is not None and slot.filling.done()

    def _copy(self) -> None:
        """Wait until the first of the slots that are filled is, and enqueue its copies."""
        slot = self._filling[0]
        assert slot.filling is not None
        slot.filling.result()
        for _, _, room, at in slot.parts:
            self._gpu.copy_h2d_async(room, at, self._stream)
        self._gpu.record_event(slot.event, self._stream)
        slot.parts.clear()
        slot.used = 0
        self._copying.append(self._filling.popleft())


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
