# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checked launch's reference is given to reach memory through a table of addresses: two calls, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.errors import DeviceError, InvalidPointer, UninitializedRead
from gpu_runtime.host.checked_memory import CheckedMemory
from gpu_runtime.host.shadow import Block

Array = np.ndarray[Any, np.dtype[Any]]


class TableMemory:
    """`gpu_runtime.op.DeviceMemory` that judges what is read and notes what is written.

    Parameters
    ----------
    memory : CheckedMemory
    op : str
        The op's name, for reports.
    arguments : mapping
        The reference's arguments, by which a table is named.
    note_rows : callable
        Told of the rows that are written, as `gpu_runtime.host.footprint.Footprint.note_rows` is.
    """

    def __init__(
        self,
        memory: CheckedMemory,
        op: str,
        arguments: Mapping[str, Any],
        note_rows: Callable[[Block, Array, int], None],
    ) -> None:
        self._memory = memory
        self._op = op
        self._arguments = arguments
        self._note_rows = note_rows

    def gather_rows(
        self,
        addresses: Array,
        lengths: Array,
        *,
        offset: int,
        stride: int,
        width: int,
        dtype: str,
        room: int | None = None,
    ) -> Array:
        """See `gpu_runtime.op.DeviceMemory.gather_rows`."""
        name, size = self._name(addresses), dtypes.itemsize(dtype)
        try:
            rows = self._memory.gather_rows(
                addresses, lengths, offset=offset, stride=stride, width=width, dtype=dtype, room=room
            )
        except InvalidPointer as error:
            raise InvalidPointer(f"{name}: {error}") from None
        run, pitch = width * size, stride * size
        counts = np.asarray(lengths).tolist()
        for block, entries, starts in self._blocks(addresses.astype(np.int64) + offset * size):
            for entry, start in zip(entries.tolist(), starts.tolist(), strict=True):
                row = block.shadow.first_unwritten_row(start, counts[entry], pitch, run)
                if row is not None:
                    self._refuse(name, block, entry, start, row, counts[entry], pitch)
        return rows

    def _refuse(self, name: str, block: Block, entry: int, start: int, row: int, count: int, pitch: int) -> None:
        place = block.entry.place(int(block.entry.ptr) + start + row * pitch)
        raise UninitializedRead(
            f"{name}[{entry}]: never written: something in row {row:,} of {count:,}, which begins at {place}; "
            f"read at {self._memory.site()}"
        )

    def scatter_rows(
        self, addresses: Array, positions: Array, values: Array, *, offset: int, stride: int, dtype: str
    ) -> None:
        """See `gpu_runtime.op.DeviceMemory.scatter_rows`.

        Raises
        ------
        DeviceError
            Also when two entries write the same bytes: on a GPU either may come last.
        """
        name, size = self._name(addresses), dtypes.itemsize(dtype)
        try:
            self._memory.scatter_rows(addresses, positions, values, offset=offset, stride=stride, dtype=dtype)
        except InvalidPointer as error:
            raise InvalidPointer(f"{name}: {error}") from None
        run = values.shape[1] * size
        at = addresses.astype(np.int64) + (offset + np.asarray(positions, dtype=np.int64) * stride) * size
        order = np.argsort(at, kind="stable")
        close = np.flatnonzero(np.diff(at[order]) < run)
        if close.size:
            first, second = sorted(order[close[0] : close[0] + 2].tolist())
            place = self._memory.block_at(int(at[second])).entry.place(int(at[second]))
            raise DeviceError(
                f"{name}: entries {first} and {second} write the same bytes, at {place}: on a GPU either may come "
                f"last; used at {self._memory.site()}"
            )
        for block, _, starts in self._blocks(at):
            self._note_rows(block, starts, run)

    def _blocks(self, at: Array) -> Iterator[tuple[Block, Array, Array]]:
        """Yield each block that addresses point into, the entries that do, and where in it; one block as a rule."""
        rest = np.arange(at.size)
        while rest.size:
            block = self._memory.block_at(int(at[rest[0]]))
            starts = at[rest] - int(block.entry.ptr)
            inside = (starts >= 0) & (starts < block.entry.nbytes)
            yield block, rest[inside], starts[inside]
            rest = rest[~inside]

    def _name(self, addresses: Array) -> str:
        for name, value in self._arguments.items():
            if isinstance(value, np.ndarray) and np.may_share_memory(value, addresses):
                return f"{self._op}: {name}"
        return f"{self._op}: address table"
