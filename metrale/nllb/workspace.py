# SPDX-License-Identifier: MIT OR Apache-2.0
"""Activations, and the small tables that tell a pass which tokens, positions and KV spans its rows have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import REGION_ALIGNMENT, Arena, Layout
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.limits import ModelShape

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


class Table:
    """Columns of one value per row, kept on the device and filled by one copy a pass.

    Parameters
    ----------
    base : DevicePtr
        Device memory of `table_bytes` bytes.
    columns : mapping of str to str
        Element type of each column.
    rows : int
        Most rows of a column.
    """

    def __init__(self, base: DevicePtr, columns: Mapping[str, str], rows: int) -> None:
        self._base = base
        self._columns = dict(columns)
        self._rows = rows

    def upload(self, gpu: GpuBackend, stream: StreamLike, **values: NDArray[Any] | list[int]) -> dict[str, DevicePtr]:
        """Enqueue one copy of every column and return each column's address, valid until the next upload."""
        layout = Layout()
        arrays = {name: np.asarray(values[name], dtype=dtypes.NUMPY[kind]) for name, kind in self._columns.items()}
        for name, array in arrays.items():
            layout.add(name, array.nbytes)
        staging = np.zeros(layout.nbytes, dtype=np.uint8)
        for name, array in arrays.items():
            at = layout.offsets[name]
            staging[at : at + array.nbytes] = array.view(np.uint8)
        gpu.copy_h2d_async(staging, self._base, stream)  # the backend keeps this one-use buffer alive
        return {name: self._base.offset(at) for name, at in layout.offsets.items()}


def table_bytes(columns: Mapping[str, str], rows: int) -> int:
    """Return the device memory that a table of ``rows`` rows needs."""
    return sum(dtypes.itemsize(kind) * rows + REGION_ALIGNMENT for kind in columns.values())


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
    layout.add("encoder.table", table_bytes(ENCODER_COLUMNS, tokens + 1))
    layout.add("decoder.table", table_bytes(DECODER_COLUMNS, shape.decoder_rows))
    layout.add("argmax", 2 * shape.logits_rows * dtypes.itemsize("i32"))
    return layout


class Workspace:
    """The allocation behind `workspace_layout`, with its regions by name."""

    def __init__(self, gpu: GpuBackend, shape: ModelShape) -> None:
        self.arena = Arena(gpu, workspace_layout(shape), tag="workspace")
        self.encoder_table = Table(self.arena["encoder.table"], ENCODER_COLUMNS, shape.limits.encoder_tokens + 1)
        self.decoder_table = Table(self.arena["decoder.table"], DECODER_COLUMNS, shape.decoder_rows)

    def __getitem__(self, name: str) -> DevicePtr:
        return self.arena[name]
