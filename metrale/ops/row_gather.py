# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chosen rows, in a chosen order: ``out[r] = src[index[r]]``."""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="row_gather",
    args=(
        tensor("src", "in", "T", "src_rows", "width", row_stride="src_stride"),
        tensor("index", "in", "i32", "rows"),
        tensor("out", "out", "T", "rows", "width", row_stride="out_stride"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("src_rows", "i32"),
        scalar("src_stride", "i64"),
        scalar("out_stride", "i64"),
    ),
    tolerance=EXACT,  # a copy
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row, a thread for each 16 bytes, in whole warps, at most 256."""
    warps = -(-dims["width"] * dtypes.itemsize(dtype) // (16 * limits.warp_size))
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size * min(warps, 8), 1, 1))


def reference(
    *, src: Array, index: Array, out: Array, rows: int, width: int, src_rows: int, src_stride: int, out_stride: int
) -> None:
    """Copy the rows. An index outside ``src`` is an error; on a GPU it would be a read out of bounds."""
    if index.min() < 0 or index.max() >= src_rows:
        raise InvalidPointer(f"row_gather: index: expected rows in [0, {src_rows}), got {index.min()} to {index.max()}")
    out[...] = src[index]


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    width: int,
    src_rows: int = 7,
    src_pad: int = 0,
    out_pad: int = 0,
) -> Inputs:
    index = rng.integers(0, src_rows, rows)
    index[-1] = src_rows - 1  # the last row of the source
    return {
        "src": inputs.normal(rng, (src_rows, width + src_pad), dtype),
        "index": index.astype(np.int32),
        "out": inputs.output((rows, width + out_pad), dtype),
        "rows": rows,
        "width": width,
        "src_rows": src_rows,
        "src_stride": width + src_pad,
        "out_stride": width + out_pad,
    }


CASES: Final = (
    {"rows": 1, "width": 256},
    {"rows": 9, "width": 33, "src_pad": 7, "out_pad": 2},
    {"rows": 12, "width": 64, "src_pad": 64, "out_pad": 8},
    {"rows": 6, "width": 20, "src_pad": 4, "out_pad": 5},  # the rows of one side alone lie at multiples of 16 bytes
    {"rows": 5, "width": 1, "src_rows": 1},
    {"rows": 70, "width": 4100, "src_rows": 3, "src_pad": 60},  # more packs than threads
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def row_gather(
    gpu: GpuBackend,
    src: int,
    index: int,
    out: int,
    *,
    rows: int,
    width: int,
    src_rows: int,
    src_stride: int,
    out_stride: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the copy of ``rows`` rows of ``width`` elements; a row of ``src`` may be asked for again and again.

    ``src`` is ``dtype``, ``[src_rows, width]`` with rows ``src_stride`` elements apart; ``out`` is ``dtype``, ``[rows,
    width]`` with rows ``out_stride`` elements apart, and what lies between them stays. ``index`` is int32 ``[rows]``.
    """
    OP.launch(gpu, dtype, (src, index, out, rows, width, src_rows, src_stride, out_stride), stream)
