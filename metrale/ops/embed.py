# SPDX-License-Identifier: MIT OR Apache-2.0
"""Token embedding with scale and positions: ``out[r] = scale * table[ids[r]] + position_table[positions[r]]``."""

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
        tensor("positions", "in", "i32", "rows"),
        tensor("table", "in", "T", "vocab", "width"),
        tensor("position_table", "in", "f32", "position_count", "width"),
        tensor("out", "out", "T", "rows", "width"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("vocab", "i32"),
        scalar("position_count", "i32"),
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
    positions: Array,
    table: Array,
    position_table: Array,
    out: Array,
    rows: int,
    width: int,
    vocab: int,
    position_count: int,
    scale: float,
) -> None:
    """The sum in float32. A row that is not in its table is an error; on a GPU it would be a read out of bounds."""
    for name, index, count in (("ids", ids, vocab), ("positions", positions, position_count)):
        if index.min() < 0 or index.max() >= count:
            raise InvalidPointer(f"embed: {name}: expected rows in [0, {count}), got {index.min()} to {index.max()}")
    embedded = table[ids].astype(np.float32)
    embedded *= np.float32(scale)
    embedded += position_table[positions]
    out[...] = embedded


def make_inputs(
    rng: np.random.Generator, dtype: str, *, rows: int, width: int, vocab: int = 19, position_count: int = 11
) -> Inputs:
    ids = rng.integers(0, vocab, rows)
    positions = rng.integers(0, position_count, rows)
    ids[0], positions[-1] = vocab - 1, position_count - 1  # the last row of either table
    return {
        "ids": ids.astype(np.int32),
        "positions": positions.astype(np.int32),
        "table": inputs.normal(rng, (vocab, width), dtype, std=0.2),
        "position_table": inputs.normal(rng, (position_count, width), "f32"),
        "out": inputs.output((rows, width), dtype),
        "rows": rows,
        "width": width,
        "vocab": vocab,
        "position_count": position_count,
        "scale": width**0.5,
    }


CASES: Final = (
    {"rows": 1, "width": 256},
    {"rows": 7, "width": 33},
    {"rows": 130, "width": 1024},
    {"rows": 3, "width": 2056},  # more packs than a block of the CUDA kernel has threads
    {"rows": 2, "width": 1, "vocab": 1, "position_count": 1},
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
    stream: StreamLike = 0,
) -> None:
    """Enqueue the embedding of ``rows`` tokens.

    ``ids`` and ``positions`` are int32 ``[rows]``, rows of ``table`` (``dtype``, ``[vocab, width]``) and of
    ``position_table`` (float32, ``[position_count, width]``); ``out`` is ``dtype``, ``[rows, width]``.
    """
    OP.launch(
        gpu, dtype, (ids, positions, table, position_table, out, rows, width, vocab, position_count, scale), stream
    )
