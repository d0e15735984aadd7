# SPDX-License-Identifier: MIT OR Apache-2.0
"""Token embedding with scale and positions: ``out[r] = scale * table[ids[r]] + position_table[positions[r]]``.

A row's id may also come from a device cell, where an earlier launch left it. `sample` does, so that the next step can
be enqueued before the host knows what was chosen.

One id may be ``blank``: its rows have no position, and are ``scale * table[blank]``. Padding is such an id.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="embed",
    args=(
        tensor("ids", "in", "i32", "rows"),
        tensor("cells", "in", "i32", "cell_count", optional=True),
        tensor("cell_index", "in", "i32", "rows", optional=True),
        tensor("positions", "in", "i32", "rows"),
        tensor("table", "in", "T", "vocab", "width"),
        tensor("position_table", "in", "f32", "position_count", "width"),
        tensor("out", "out", "T", "rows", "width"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("vocab", "i32"),
        scalar("position_count", "i32"),
        scalar("cell_count", "i32"),
        scalar("blank", "i32"),
        scalar("scale", "f32"),
    ),
    tolerance=inputs.ONE_ROUNDING,
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row, a thread for each 16 bytes, in whole warps, at most 256."""
    warps = -(-dims["width"] * dtypes.itemsize(dtype) // (16 * limits.warp_size))
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size * min(warps, 8), 1, 1))


def reference(
    *,
    ids: Array,
    cells: Array | None,
    cell_index: Array | None,
    positions: Array,
    table: Array,
    position_table: Array,
    out: Array,
    rows: int,
    width: int,
    vocab: int,
    position_count: int,
    cell_count: int,
    blank: int,
    scale: float,
) -> None:
    """The sum in float32. A row that is not in its table is an error; on a GPU it would be a read out of bounds."""
    tokens = _tokens(ids, cells, cell_index)
    for name, index, count in (("ids", tokens, vocab), ("positions", positions, position_count)):
        if index.min() < 0 or index.max() >= count:
            raise InvalidPointer(f"embed: {name}: expected rows in [0, {count}), got {index.min()} to {index.max()}")
    embedded = table[tokens].astype(np.float32)
    embedded *= np.float32(scale)
    embedded += position_table[positions] * (tokens != blank)[:, None]
    out[...] = embedded


def _check_pair(cells: object, cell_index: object) -> None:
    """Raise ValueError when one is NULL and the other is not."""
    if (cells is None) != (cell_index is None):
        given, missing = ("cells", "cell_index") if cell_index is None else ("cell_index", "cells")
        raise ValueError(f"embed: {missing}: expected an address, as {given} has one, got NULL")


def _tokens(ids: Array, cells: Array | None, cell_index: Array | None) -> Array:
    """Return the id of each row: of its cell, or its own where it has no cell."""
    _check_pair(cells, cell_index)
    if cells is None or cell_index is None or cell_index.max() < 0:
        return ids
    if cell_index.max() >= len(cells):
        raise InvalidPointer(
            f"embed: cell_index: expected cells in [0, {len(cells)}), or less than 0 for none, got {cell_index.max()}"
        )
    return np.where(cell_index < 0, ids, cells[np.maximum(cell_index, 0)])


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    width: int,
    vocab: int = 19,
    position_count: int = 11,
    cell_count: int = 0,
    blank: int = -1,
) -> Inputs:
    """With ``cell_count``, some rows take their ids from cells, and their own are others. Every third is ``blank``."""
    ids = rng.integers(0, vocab, rows)
    positions = rng.integers(0, position_count, rows)
    ids[0], positions[-1] = vocab - 1, position_count - 1  # the last row of either table
    if blank >= 0:
        ids[::3] = blank
    cells = cell_index = None
    if cell_count:
        cells = rng.integers(0, vocab, cell_count).astype(np.int32)
        cell_index = rng.integers(-3, 0, rows).astype(np.int32)
        taken = rng.permutation(cell_count)[: rows // 2]
        celled = np.arange(rows)[1::2][: len(taken)]
        cells[taken] = ids[celled]
        cell_index[celled] = taken
        ids[celled] = (ids[celled] + 1) % vocab
    return {
        "ids": ids.astype(np.int32),
        "cells": cells,
        "cell_index": cell_index,
        "positions": positions.astype(np.int32),
        "table": inputs.normal(rng, (vocab, width), dtype, std=0.2),
        "position_table": inputs.normal(rng, (position_count, width), "f32"),
        "out": inputs.output((rows, width), dtype),
        "rows": rows,
        "width": width,
        "vocab": vocab,
        "position_count": position_count,
        "cell_count": cell_count,
        "blank": blank,
        "scale": width**0.5,
    }


CASES: Final = (
    {"rows": 1, "width": 256},
    {"rows": 7, "width": 33},
    {"rows": 130, "width": 1024},
    {"rows": 3, "width": 2056},  # more packs than a block of the CUDA kernel has threads
    {"rows": 2, "width": 1, "vocab": 1, "position_count": 1},
    {"rows": 9, "width": 40, "cell_count": 13},
    {"rows": 2, "width": 7, "cell_count": 1},
    {"rows": 10, "width": 24, "cell_count": 9, "blank": 18},
    {"rows": 5, "width": 3, "blank": 0},
    {"rows": 1, "width": 8, "cell_count": 3},  # cells that no row asks for
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def embed(
    gpu: GpuBackend,
    ids: int,
    positions: int,
    table: int,
    position_table: int,
    out: int,
    *,
    rows: int,
    width: int,
    vocab: int,
    position_count: int,
    scale: float,
    dtype: str,
    cells: int = 0,
    cell_index: int = 0,
    cell_count: int = 0,
    blank: int = -1,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the embedding of ``rows`` tokens.

    ``ids`` and ``positions`` are int32 ``[rows]``, rows of ``table`` (``dtype``, ``[vocab, width]``) and of
    ``position_table`` (float32, ``[position_count, width]``); ``out`` is ``dtype``, ``[rows, width]``.

    ``cells`` (int32, ``[cell_count]``) and ``cell_index`` (int32, ``[rows]``) are both addresses or both NULL. Where
    ``cell_index[r]`` is at least 0, the row's id is ``cells[cell_index[r]]``, and ``ids[r]`` may be anything.
    Rows whose id is ``blank`` have no position; -1 is no id.

    Raises
    ------
    ValueError
        When one of ``cells`` and ``cell_index`` is NULL and the other is not.
    """
    _check_pair(cells or None, cell_index or None)
    sizes = (rows, width, vocab, position_count, cell_count, blank, scale)
    OP.launch(gpu, dtype, (ids, cells, cell_index, positions, table, position_table, out, *sizes), stream)
