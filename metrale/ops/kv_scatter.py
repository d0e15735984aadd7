# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows into the KV cache: row ``r`` of ``src`` goes to position ``positions[r]`` of the span at ``spans[r]``.

A span is a sequence's memory: position ``p`` of it starts ``p * kv_stride`` elements after its address, and holds
keys and values of every layer; ``offset`` is where in a position the row goes.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="kv_scatter",
    args=(
        tensor("src", "in", "T", "rows", "width", row_stride="src_stride"),
        tensor("spans", "in", "u64", "rows"),
        tensor("positions", "in", "i32", "rows"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("src_stride", "i64"),
        scalar("offset", "i64"),
        scalar("kv_stride", "i64"),
    ),
    tolerance=EXACT,  # a copy
    indirect=True,
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row, a thread for each 16 bytes, in whole warps, at most 256."""
    warps = -(-dims["width"] * dtypes.itemsize(dtype) // (16 * limits.warp_size))
    return LaunchPlan(
        SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size * min(warps, 8), 1, 1), programmatic=True
    )


def reference(
    *,
    memory: DeviceMemory,
    src: Array,
    spans: Array,
    positions: Array,
    rows: int,
    width: int,
    src_stride: int,
    offset: int,
    kv_stride: int,
) -> None:
    """Copy the rows."""
    memory.scatter_rows(spans, positions, src, offset=offset, stride=kv_stride, dtype=dtypes.name_of(src.dtype))


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    width: int,
    depth: int = 5,
    layers: int = 3,
    layer: int = 1,
    pad: int = 0,
    regular: bool = True,
) -> Inputs:
    stride = layers * width
    return {
        "src": inputs.normal(rng, (rows, width + pad), dtype),
        "spans": inputs.spans(rng, rows, depth, stride, dtype, "inout", regular=regular),
        "positions": rng.integers(0, depth, rows).astype(np.int32),
        "rows": rows,
        "width": width,
        "src_stride": width + pad,
        "offset": layer * width,
        "kv_stride": stride,
    }


CASES: Final = (
    {"rows": 1, "width": 64, "layers": 1, "layer": 0},
    {"rows": 6, "width": 33, "pad": 7},
    {"rows": 4, "width": 16, "depth": 1, "layer": 2},
    {"rows": 5, "width": 24, "regular": False},
    {"rows": 70, "width": 512, "pad": 256},
    {"rows": 3, "width": 2180, "pad": 4},  # more packs than a block of the CUDA kernel has threads, and a rest
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def kv_scatter(
    gpu: GpuBackend,
    src: int,
    spans: int,
    positions: int,
    *,
    rows: int,
    width: int,
    src_stride: int,
    offset: int,
    kv_stride: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the copy of ``rows`` rows of ``width`` elements.

    ``src`` is ``dtype``, ``[rows, width]`` with rows ``src_stride`` elements apart; ``spans`` is uint64 ``[rows]``,
    device addresses; ``positions`` is int32 ``[rows]``. ``offset`` and ``kv_stride`` are elements.
    """
    OP.launch(gpu, dtype, (src, spans, positions, rows, width, src_stride, offset, kv_stride), stream)
