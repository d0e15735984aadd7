# SPDX-License-Identifier: MIT OR Apache-2.0
"""The first half of a LoRA product (Hu et al. 2021), each row with an adapter of its own or none.

``t[r, s * room + i] = x[r] . A[adapters[r]][s][i]`` for each rank ``i`` that the adapter has in segment ``s``, and 0
for the others and for rows without adapter. `lora_up` takes it from there.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, Tolerance, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import adapter_rows, inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="lora_down",
    args=(
        tensor("x", "in", "T", "rows", "k", row_stride="x_stride"),
        tensor("adapters", "in", "i32", "rows"),
        tensor("ranks", "in", "i32", "adapter_count", "segments"),
        tensor("a", "in", "T", "adapter_count", "segments*room*k"),
        tensor("t", "out", "f32", "rows", "segments*room"),
        scalar("rows", "i32"),
        scalar("k", "i32"),
        scalar("segments", "i32"),
        scalar("room", "i32"),
        scalar("adapter_count", "i32"),
        scalar("x_stride", "i64"),
    ),
    tolerance=Tolerance(f32=2e-6, f16=2e-6, bf16=2e-6),  # the result is float32 whatever T is: nothing is rounded to T
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block for each row and segment, a warp for each two ranks that there is room for, at most 8."""
    warps = min(-(-dims["room"] // 2), 8)
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"] * dims["segments"], 1, 1), (limits.warp_size * warps, 1, 1))


def reference(
    *,
    x: Array,
    adapters: Array,
    ranks: Array,
    a: Array,
    t: Array,
    rows: int,
    k: int,
    segments: int,
    room: int,
    adapter_count: int,
    x_stride: int,
) -> None:
    """One product for each adapter that is asked for, with the ranks of all its segments together."""
    groups = adapter_rows.by_adapter(SPEC.name, adapters, ranks, adapter_count, room)
    t[...] = 0
    for adapter, group in groups:
        held = adapter_rows.held(ranks[adapter], room)
        if held.any():
            product = np.empty((len(group), int(held.sum())), np.float32)
            gemm_reference(x[group], a[adapter].reshape(-1, k)[held], product, by_row=True)
            t[np.ix_(group, held)] = product


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    k: int,
    ranks: adapter_rows.Ranks,
    room: int,
    x_pad: int = 0,
) -> Inputs:
    """``ranks`` are those of each adapter's segments; the rows choose at random, some of them none."""
    table, a = adapter_rows.matrices(rng, dtype, ranks, room, k, std=k**-0.5)
    adapter_count, segments = table.shape
    return {
        "x": inputs.normal(rng, (rows, k + x_pad), dtype),
        "adapters": adapter_rows.choose(rng, rows, adapter_count),
        "ranks": table,
        "a": a,
        "t": inputs.output((rows, segments * room), "f32"),
        "rows": rows,
        "k": k,
        "segments": segments,
        "room": room,
        "adapter_count": adapter_count,
        "x_stride": k + x_pad,
    }


CASES: Final = (
    {"rows": 1, "k": 1024, "ranks": ((16,),), "room": 16},
    {"rows": 7, "k": 33, "ranks": ((3,), (1,)), "room": 5, "x_pad": 3},
    {"rows": 70, "k": 64, "ranks": ((8, 0, 4), (2, 2, 2), (0, 16, 1)), "room": 16, "x_pad": 8},
    {"rows": 5, "k": 520, "ranks": ((0, 7), (9, 0)), "room": 9},  # a rank without a partner
    {"rows": 4, "k": 1, "ranks": ((1,), (0,), (2,)), "room": 2},
    {"rows": 3, "k": 2056, "ranks": ((256,), (130,)), "room": 256, "x_pad": 1},  # more ranks than a block has warps
    {"rows": 3, "k": 24, "ranks": (tuple(s % 4 for s in range(96)),), "room": 3},
    {"rows": 2, "k": 8192, "ranks": ((1, 4),), "room": 4},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def lora_down(
    gpu: GpuBackend,
    x: int,
    adapters: int,
    ranks: int,
    a: int,
    t: int,
    *,
    rows: int,
    k: int,
    segments: int,
    room: int,
    adapter_count: int,
    dtype: str,
    x_stride: int | None = None,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the products of ``rows`` rows with the first matrices of their adapters.

    ``x`` is ``dtype``, ``[rows, k]`` with rows ``x_stride`` elements apart (None: contiguous). ``adapters`` is int32
    ``[rows]``: the row's adapter, or any number below 0 for none. ``ranks`` is int32 ``[adapter_count, segments]``,
    each from 0 to ``room``. ``a`` is ``dtype``, ``[adapter_count, segments, room, k]``, of which the first
    ``ranks[adapter, segment]`` rows of a segment hold data, and the rest is not read. ``t`` is float32
    ``[rows, segments * room]``, and written in full.
    """
    sizes = (rows, k, segments, room, adapter_count, k if x_stride is None else x_stride)
    OP.launch(gpu, dtype, (x, adapters, ranks, a, t, *sizes), stream)
