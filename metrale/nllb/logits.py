# SPDX-License-Identifier: MIT OR Apache-2.0
"""The logits arena of a model: who writes a row, and how it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import LogitsArena
from gpu_runtime.backend import GpuBackend
from gpu_runtime.device_buffer import DeviceBuffer
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.checks import integer
from metrale.errors import InvalidInput, told
from metrale.nllb.limits import ModelShape
from metrale.nllb.turns import Turn
from metrale.nllb.workspace import Workspace, arrivals_bytes
from metrale.ops.head_linear import PART_BYTES, block_count


def maximum_at(gpu: GpuBackend, shape: ModelShape, space: Workspace, row: int) -> DevicePtr:
    """Return where a step leaves the parts of the maximum of a row of logits, as `metrale.ops.head_linear` has them."""
    return space["decoder.maxima"].offset(row * block_count(shape.head_rows, gpu.limits()) * PART_BYTES)


class LogitsRows:
    """Rows of logits on the device, and for each row the turn whose latest use says when it is written.

    Of some rows the device has the parts of their maxima, too, as long as nobody but the model has written to them.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape
    space : Workspace
    writer : Turn
        What counts as the writer of rows that nobody has written.
    """

    def __init__(self, gpu: GpuBackend, shape: ModelShape, space: Workspace, writer: Turn) -> None:
        self._gpu = gpu
        self._shape = shape
        self._space = space
        self._results, self._parts, self._arrivals = (
            space[name] for name in ("argmax", "argmax.parts", "argmax.arrivals")
        )
        gpu.memset(self._arrivals, 0, arrivals_bytes(shape))
        rows, stride = shape.logits_rows, shape.logits_stride
        self.arena = LogitsArena(
            gpu.alloc(rows * stride * shape.itemsize, tag="logits"), rows, shape.vocab, shape.dtype
        )
        self._writers = [writer] * rows
        self._has_maximum = [False] * rows
        try:
            self._clear()
        except BaseException:
            self.free()
            raise
        open_ranges(self, gpu.ranges)

    def _clear(self) -> None:
        """Set every element to minus infinity, so that rows that nobody has written have no logit to choose."""
        arena = self.arena
        self._gpu.copy_h2d(np.full(arena.row_elements, -np.inf, dtype=dtypes.NUMPY[arena.dtype]), arena.base)
        filled = 1
        while filled < arena.rows:
            count = min(filled, arena.rows - filled)
            self._gpu.copy_d2d(arena.base, arena.row(filled), count * arena.row_bytes)
            filled += count

    def writing(self, row: int, count: int) -> None:
        """Note that ``count`` rows from ``row`` are about to be written: their maxima are not known until they are."""
        self._has_maximum[row : row + count] = [False] * count

    def written(self, writer: Turn, row: int, count: int, *, maxima: bool = False) -> None:
        """Note that the latest use of ``writer`` writes ``count`` rows from ``row``, and perhaps their maxima."""
        self._writers[row : row + count] = [writer] * count
        self._has_maximum[row : row + count] = [maxima] * count

    def maxima(self, row: int, count: int) -> DevicePtr:
        """Return where the parts of the maxima of ``count`` rows from ``row`` are; NULL unless all have some."""
        if not all(self._has_maximum[row : row + count]):
            return DevicePtr.NULL
        return maximum_at(self._gpu, self._shape, self._space, row)

    def any_written_by(self, writer: Turn, row: int, count: int) -> bool:
        """Return whether ``writer`` wrote one of ``count`` rows from ``row``."""
        return writer in self._writers[row : row + count]

    def index(self, ptr: int, count: int = 1) -> int:
        """Return the row at an address. `InvalidInput` when no row starts there, or there are not ``count`` of them."""
        arena = self.arena
        try:
            index = arena.index(ptr)
        except (InvalidPointer, TypeError, ValueError):
            where = f"{arena.rows} rows of {arena.row_bytes} bytes from {int(arena.base):#x}"
            got = f"{ptr:#x}" if isinstance(ptr, int) and not isinstance(ptr, bool) else told(ptr)
            raise InvalidInput("ptr", f"the address of a logits row of this model ({where})", got) from None
        integer("n", count, 1, arena.rows - index, f"1 to {arena.rows - index} rows from row {index}")
        return index

    def event(self, ptr: int) -> int:
        """Return the event after which the row at ``ptr`` is written."""
        return self._writers[self.index(ptr)].event

    def view(self, ptr: int, count: int, stream: StreamLike) -> DeviceBuffer:
        """Return ``count`` rows from ``ptr``, ``[count, vocab]``, once ``stream`` waits for them on the device."""
        first = self._await(ptr, count, stream)
        return self.arena.buffer(self._gpu, first, count, stream=stream)

    def _await(self, ptr: int, count: int, stream: StreamLike) -> int:
        """Let ``stream`` come after the writers of ``count`` rows from ``ptr``; return the first row's index."""
        first = self.index(ptr, count)
        for writer in dict.fromkeys(self._writers[first : first + count]):
            writer.wait(stream)
        return first

    def read(self, ptr: int, out: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Wait for the row at ``ptr`` and return it as float32 ``[vocab]``."""
        writer = self._writers[self.index(ptr)]
        vocab = self.arena.vocab
        if out is None:
            out = np.empty(vocab, dtype=np.float32)
        elif not isinstance(out, np.ndarray) or out.shape != (vocab,) or out.dtype != np.float32:
            got = f"{type(out).__name__} {getattr(out, 'dtype', '')} {getattr(out, 'shape', '')}"
            raise InvalidInput("out", f"a float32 array of shape ({vocab},)", got)
        elif not out.flags.writeable:
            raise InvalidInput("out", "a writable array", "a read-only one")
        row: NDArray[Any] = np.empty(vocab, dtype=dtypes.NUMPY[self.arena.dtype])
        writer.wait(0)
        self._gpu.copy_d2h_on_stream(ptr, row)
        out[...] = row
        return out

    @ranged("argmax")
    def argmax(self, ptr: int, count: int, stream: StreamLike) -> tuple[list[int], list[int]]:
        """Return the largest logit's id of ``count`` rows from ``ptr``, and the rows that are not finite."""
        self._await(ptr, count, stream)
        flags = self._results.offset(count * dtypes.itemsize("i32"))
        ops.argmax(
            self._gpu,
            ptr,
            self._results,
            flags,
            self._parts,
            self._arrivals,
            rows=count,
            vocab=self.arena.vocab,
            stride=self.arena.row_elements,
            dtype=self.arena.dtype,
            stream=stream,
        )
        result = np.empty((2, count), dtype=np.int32)
        self._gpu.copy_d2h_on_stream(self._results, result, stream)
        return result[0].tolist(), np.flatnonzero(result[1]).tolist()

    def free(self) -> None:
        """Free the rows."""
        self._gpu.free(self.arena.base)
