# SPDX-License-Identifier: MIT OR Apache-2.0
"""The KV cache: a pool of positions, from which each sequence takes one contiguous span.

A position holds the keys and values of every decoder layer, whether of a source token (cross-attention) or of a target
token (self-attention): both take the same bytes. A span is the source's positions, then the target's, so what a
sequence has written is one run of bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr


@dataclass(slots=True)
class Span:
    """The KV of one sequence.

    Attributes
    ----------
    first : int
        First position of the pool.
    positions : int
        Positions held.
    ptr : DevicePtr
        Address of the first position: the source's keys and values.
    position_bytes : int
    source_len : int
        Source positions written; 0 before prefill.
    adapter : int
        Slot of the adapter that its keys and values were made with, or -1.
    slots : tuple of int
        Slots of its sequence: one, or one for each beam.
    beam_positions : int
        The target positions of each beam, one beam's after the other's at the end of the span. Without beams it is 0,
        and the one target takes what the source leaves.
    """

    first: int
    positions: int
    ptr: DevicePtr
    position_bytes: int
    source_len: int = 0
    adapter: int = -1
    slots: tuple[int, ...] = ()
    beam_positions: int = 0

    @property
    def target_room(self) -> int:
        """Target positions of each beam."""
        return self.beam_positions or self.positions - self.source_len

    def target(self, beam: int = 0) -> int:
        """Return the address of a beam's first target position: a plain int, as steps ask for many of them."""
        return int(self.ptr) + (self.source_len + beam * self.beam_positions) * self.position_bytes


class KvPool:
    """Positions in one allocation; spans are taken first fit, so that use stays at its low end.

    Parameters
    ----------
    gpu : GpuBackend
    nbytes : int
        Size of the pool.
    position_bytes : int
        Size of a position.

    Raises
    ------
    OutOfMemory
        When the pool does not fit in device memory.
    """

    def __init__(self, gpu: GpuBackend, nbytes: int, position_bytes: int) -> None:
        self._gpu = gpu
        self._position_bytes = position_bytes
        self._nbytes = nbytes
        self.capacity = nbytes // position_bytes
        self.base = gpu.alloc(nbytes, tag="KV cache")
        self._taken: list[tuple[int, int]] = []  # (first, positions), in order

    @property
    def used(self) -> int:
        """Positions that spans hold."""
        return sum(positions for _, positions in self._taken)

    def take(self, positions: int) -> Span:
        """Return a new span.

        Raises
        ------
        OutOfMemory
            When no gap is long enough; nothing changes.
        """
        first = 0
        for start, length in self._taken:
            if start - first >= positions:
                break
            first = start + length
        if first + positions > self.capacity:
            raise OutOfMemory(
                f"KV cache: no {positions:,} positions in a row are free; {self.used:,} of {self.capacity:,} are "
                f"in use ({self._position_bytes:,} bytes each)",
                requested=positions * self._position_bytes,
                live=self.used * self._position_bytes,
                limit=self._nbytes,
            )
        self._taken.insert(bisect_left(self._taken, (first, 0)), (first, positions))
        return Span(first, positions, self.base.offset(first * self._position_bytes), self._position_bytes)

    def give_back(self, span: Span) -> None:
        """Return a span's positions to the pool."""
        self._taken.remove((span.first, span.positions))

    def free(self) -> None:
        """Free the pool."""
        base, self.base = self.base, DevicePtr.NULL
        self._gpu.free(base)
