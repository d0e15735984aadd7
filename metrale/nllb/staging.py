# SPDX-License-Identifier: MIT OR Apache-2.0
"""Page-locked host memory on the way to the device: copies from it are fast, and the host need not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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

STAGING_BYTES: Final = 16 << 20
"""Size of each of the two buffers of `Staging`: a copy of it takes far longer than the call that enqueues it."""


class Staging:
    """Two buffers in turn: while the device copies from one, the host fills the other.

    A context manager. Leaving it waits for every copy and frees everything, also after an exception, so what was sent
    is on the device from then on, whatever the stream that reads it.

    Parameters
    ----------
    gpu : GpuBackend
    nbytes : int
        What will be sent in all, if that is less than two buffers of `STAGING_BYTES` need.

    Raises
    ------
    OutOfMemory, DeviceError
        When the buffers cannot be had; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, nbytes: int = STAGING_BYTES) -> None:
        self._gpu = gpu
        self._size = max(min(nbytes, STAGING_BYTES), REGION_ALIGNMENT)
        with ExitStack() as undo:
            self._stream = gpu.create_stream()
            undo.callback(gpu.destroy_stream, self._stream)  # finishes its work first
            self._buffers: list[tuple[NDArray[Any], int]] = []
            for _ in range(2):
                memory = gpu.alloc_host_pinned(self._size)
                undo.callback(gpu.free_host_pinned, memory)
                event = gpu.create_event()
                undo.callback(gpu.destroy_event, event)
                self._buffers.append((memory.array, event))
            self._teardown = undo.pop_all()
        self._used = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.clear()  # nobody fills a buffer that is freed
        self._teardown.close()

    def follow(self, turn: Turn) -> None:
        """Let what is sent from here on come after every use so far of what ``turn`` guards; the host goes on."""
        turn.wait(self._stream)

    def send(
        self, values: NDArray[Any], dtype: str, at: DevicePtr, fill: Callable[[NDArray[Any], NDArray[Any]], object]
    ) -> DevicePtr:
        """Enqueue the copy of ``values`` to ``at``, as elements of ``dtype``, and return the address after it.

        Waits when the device has not copied yet what the next buffer held before.

        Parameters
        ----------
        values : ndarray
            One axis.
        dtype : str
            Element type on the device.
        at : DevicePtr
        fill : callable
            ``fill(part, room)`` writes a part of ``values`` to page-locked memory, an array of ``dtype`` as long.
        """
        done = 0
        while done < len(values):
            room = self._room(len(values) - done, dtype)
            fill(values[done : done + len(room)], room)
            self._gpu.copy_h2d_async(room, at, self._stream)
            at = at.offset(room.nbytes)
            done += len(room)
        return at

    def _room(self, count: int, dtype: str) -> NDArray[Any]:
        """Return 1 to ``count`` elements of a buffer."""
        itemsize = dtypes.itemsize(dtype)
        if self._size - self._used < itemsize:
            self._turn()
        start = self._used
        size = min(count, (self._size - start) // itemsize) * itemsize
        self._used += -(-size // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return self._buffers[0][0][start : start + size].view(dtypes.NUMPY[dtype])

    def _turn(self) -> None:
        """Go on with the other buffer, once its copies are done."""
        self._gpu.record_event(self._buffers[0][1], self._stream)
        self._buffers.reverse()
        self._gpu.event_synchronize(self._buffers[0][1])
        self._used = 0


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
