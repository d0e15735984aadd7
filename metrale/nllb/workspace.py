# SPDX-License-Identifier: MIT OR Apache-2.0
"""Activations, and the small tables that tell a pass which tokens, positions and KV spans its rows have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import Arena, Layout
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.limits import ModelShape
from metrale.nllb.staging import Ring
from metrale.ops.linear import scratch_bytes

CROSS_KV_ROWS: Final = 2048
"""Source tokens whose cross-attention keys and values, of all layers, are computed in one product."""

ENCODER_COLUMNS: Final = {"spans": "u64", "ids": "i32", "positions": "i32", "offsets": "i32"}
DECODER_COLUMNS: Final = {
    "self_spans": "u64",
    "cross_spans": "u64",
    "ids": "i32",
    "positions": "i32",
    "self_lengths": "i32",
    "cross_lengths": "i32",
}


UPLOADS_AHEAD: Final = 4
"""Passes of one side that the host may enqueue before the device has begun the first of them."""


class Table:
    """Columns of one value per row, kept on the device and filled by one copy a pass.

    The values go through page-locked memory: an asynchronous copy from other memory is staged by the driver, which
    takes longer, and past some size waits for the work before it.

    Parameters
    ----------
    gpu : GpuBackend
    base : DevicePtr
        Device memory with the places of `table_layout`.
    columns : mapping of str to str
        Element type of each column.
    rows : int
        Most rows of a column.
    """

    def __init__(self, gpu: GpuBackend, base: DevicePtr, columns: Mapping[str, str], rows: int) -> None:
        layout = table_layout(columns, rows)
        self._base = base
        self._places = {name: base.offset(start) for name, start in layout.offsets.items()}
        self._ring = Ring(gpu, layout.nbytes, UPLOADS_AHEAD)
        self._columns = [
            {
                name: slot[start : start + rows * dtypes.itemsize(columns[name])].view(dtypes.NUMPY[columns[name]])
                for name, start in layout.offsets.items()
            }
            for slot in self._ring.slots
        ]

    def upload(self, stream: StreamLike, **values: NDArray[Any] | list[int]) -> Mapping[str, DevicePtr]:
        """Enqueue one copy of all columns and return each column's address, which is always the same.

        Work that reads what the table held before must come before this on ``stream``. The host waits only when it is
        `UPLOADS_AHEAD` uploads ahead of the device. Whole columns are copied, whatever the number of values: that takes
        hardly longer, and makes equal launches of passes that differ only in what their tables hold.
        """
        for name, column in self._columns[self._ring.take()].items():
            column[: len(values[name])] = values[name]
        self._ring.send(self._base, stream)
        return self._places

    def free(self) -> None:
        """Free the page-locked memory, from which all copies must be done; the device memory is not the table's."""
        self._columns.clear()
        self._ring.free()


def table_layout(columns: Mapping[str, str], rows: int) -> Layout:
    """Return the places of a table's columns, of ``rows`` rows each."""
    layout = Layout()
    for name, kind in columns.items():
        layout.add(name, rows * dtypes.itemsize(kind))
    return layout


def workspace_layout(shape: ModelShape) -> Layout:
    """Return the places of all activations and tables.

    Each side has ``x`` (the residual stream), ``h`` (what a norm or an attention hands on) and ``wide`` (q, k and v, or
    the inside of the feed-forward block). The encoder's ``wide`` also takes the cross-attention keys and values.
    """
    config, limits, layout = shape.config, shape.limits, Layout()
    d, tokens = config.d_model, limits.encoder_tokens
    wide = max(tokens * max(3 * d, config.encoder_ffn_dim), min(tokens, CROSS_KV_ROWS) * shape.kv_width)
    for name, elements in (
        ("encoder.x", tokens * d),
        ("encoder.h", tokens * d),
        ("encoder.wide", wide),
        ("decoder.x", shape.decoder_rows * d),
        ("decoder.h", shape.decoder_rows * d),
        ("decoder.wide", shape.decoder_rows * max(3 * d, config.decoder_ffn_dim)),
        ("decoder.hidden", shape.decoder_rows * d),
    ):
        layout.add(name, elements * shape.itemsize)
    layout.add("encoder.table", table_layout(ENCODER_COLUMNS, tokens + 1).nbytes)
    layout.add("decoder.table", table_layout(DECODER_COLUMNS, shape.decoder_rows).nbytes)
    layout.add("argmax", 2 * shape.logits_rows * dtypes.itemsize("i32"))
    layout.add("gemm", gemm_bytes(shape))
    return layout


def gemm_bytes(shape: ModelShape) -> int:
    """Return the workspace of the products: what suits the device, and at least what no product can do without.

    Only the first product of a feed-forward block ends in an activation, which is what some need scratch memory for.
    """
    config = shape.config
    sides = (shape.limits.encoder_tokens, config.encoder_ffn_dim), (shape.decoder_rows, config.decoder_ffn_dim)
    needs = (scratch_bytes(rows, n, config.d_model, shape.dtype, config.activation_function) for rows, n in sides)
    return max(shape.gemm_workspace_bytes, *needs)


class GemmSpace(NamedTuple):
    """The workspace that products take turns with: its address, and its size in bytes."""

    workspace: DevicePtr
    workspace_bytes: int


class Workspace:
    """The allocation behind `workspace_layout`, with its regions by name.

    Raises
    ------
    OutOfMemory
        When it does not fit; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, shape: ModelShape) -> None:
        with ExitStack() as undo:
            self.arena = Arena(gpu, workspace_layout(shape), tag="workspace")
            undo.callback(self.arena.free)
            self.encoder_table = Table(
                gpu, self.arena["encoder.table"], ENCODER_COLUMNS, shape.limits.encoder_tokens + 1
            )
            undo.callback(self.encoder_table.free)
            self.decoder_table = Table(gpu, self.arena["decoder.table"], DECODER_COLUMNS, shape.decoder_rows)
            undo.callback(self.decoder_table.free)
            self._teardown = undo.pop_all()
        size = gemm_bytes(shape)
        self.gemm: Final = GemmSpace(self.arena["gemm"] if size else DevicePtr.NULL, size)

    def __getitem__(self, name: str) -> DevicePtr:
        return self.arena[name]

    def free(self) -> None:
        """Free everything; the work that uses it must be done. Calling it again does nothing."""
        self._teardown.close()
