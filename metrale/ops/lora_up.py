# SPDX-License-Identifier: MIT OR Apache-2.0
"""The second half of a LoRA product (Hu et al. 2021), added to the product that it adapts, and the activation.

``out[r, s] = activation(out[r, s] + scale[a, s] * sum_i t[r, s * room + i] B[a][s][i])`` with ``a = adapters[r]``, for
each segment ``s`` of ``width`` columns and each rank ``i`` that the adapter has in it. A row without adapter gets the
activation alone. ``t`` is what `lora_down` writes.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.gemm import ACTIVATIONS, gemm_reference
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import adapter_rows, inputs
from metrale.ops.linear import ACTIVATION_NAMES

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="lora_up",
    args=(
        tensor("t", "in", "f32", "rows", "segments*room"),
        tensor("adapters", "in", "i32", "rows"),
        tensor("ranks", "in", "i32", "adapter_count", "segments"),
        tensor("scales", "in", "f32", "adapter_count", "segments"),
        tensor("b", "in", "T", "adapter_count", "segments*room*width"),
        tensor("out", "inout", "T", "rows", "segments*width"),
        scalar("rows", "i32"),
        scalar("segments", "i32"),
        scalar("width", "i32"),
        scalar("room", "i32"),
        scalar("adapter_count", "i32"),
        scalar("activation", "i32"),
    ),
    tolerance=inputs.ONE_ROUNDING,
)

MOST_WARPS: Final = 4
"""Of a block: small blocks spread the few rows of a decode step over more multiprocessors."""


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Blocks for each row and segment, a thread for each 16 bytes, in whole warps."""
    packs = -(-dims["width"] * dtypes.itemsize(dtype) // 16)
    threads = limits.warp_size * max(min(-(-packs // limits.warp_size), MOST_WARPS), 1)
    blocks = dims["rows"] * dims["segments"] * -(-packs // threads)
    return LaunchPlan(SPEC.entry(dtype), (blocks, 1, 1), (threads, 1, 1))


def reference(
    *,
    t: Array,
    adapters: Array,
    ranks: Array,
    scales: Array,
    b: Array,
    out: Array,
    rows: int,
    segments: int,
    width: int,
    room: int,
    adapter_count: int,
    activation: int,
) -> None:
    """One product for each segment of each adapter that is asked for; all in float32, rounded as it is stored."""
    groups = adapter_rows.by_adapter(SPEC.name, adapters, ranks, adapter_count, room)
    values = out.astype(np.float32)
    for adapter, group in groups:
        matrices = b[adapter].reshape(segments, room, width)
        delta = np.empty((len(group), width), np.float32)
        for segment in np.flatnonzero(ranks[adapter]):
            rank = ranks[adapter, segment]
            factors = t[group, segment * room : segment * room + rank]
            options: dict[str, Any] = {"alpha": float(scales[adapter, segment]), "by_row": True}
            gemm_reference(factors, matrices[segment, :rank].T, delta, **options)
            values[group, segment * width : (segment + 1) * width] += delta
    function = ACTIVATIONS[ACTIVATION_NAMES[activation]]
    if function is not None:
        function(values)
    out[...] = values


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    width: int,
    ranks: adapter_rows.Ranks,
    room: int,
    activation: str = "none",
    adapted: bool = True,
) -> Inputs:
    """``ranks`` are those of each adapter's segments; the rows choose at random, some of them none, or (unless
    ``adapted``) all of them none.
    """
    table, b = adapter_rows.matrices(rng, dtype, ranks, room, width, std=max(map(max, ranks)) ** -0.5)
    adapter_count, segments = table.shape
    adapters = adapter_rows.choose(rng, rows, adapter_count) if adapted else np.full(rows, -1, np.int32)
    t = inputs.normal(rng, (rows, segments * room), "f32")
    for row, adapter in enumerate(adapters):
        t[row, ~adapter_rows.held(table[adapter] if adapter >= 0 else 0 * table[0], room)] = adapter_rows.NOWHERE
    return {
        "t": t,
        "adapters": adapters,
        "ranks": table,
        "scales": inputs.normal(rng, table.shape, "f32", mean=1.5),
        "b": b,
        "out": inputs.normal(rng, (rows, segments * width), dtype, std=2.0),
        "rows": rows,
        "segments": segments,
        "width": width,
        "room": room,
        "adapter_count": adapter_count,
        "activation": ACTIVATION_NAMES.index(activation),
    }


CASES: Final = (
    {"rows": 1, "width": 1024, "ranks": ((16,),), "room": 16},
    {"rows": 7, "width": 33, "ranks": ((3,), (1,)), "room": 5, "activation": "silu"},
    {"rows": 70, "width": 64, "ranks": ((8, 0, 4), (2, 2, 2), (0, 16, 1)), "room": 16},
    {"rows": 5, "width": 2056, "ranks": ((0, 7), (9, 0)), "room": 9, "activation": "relu"},  # more than one block
    {"rows": 4, "width": 1, "ranks": ((1,), (0,), (2,)), "room": 2, "activation": "gelu_tanh"},
    {"rows": 3, "width": 40, "ranks": ((256,), (130,)), "room": 256, "activation": "gelu"},
    {"rows": 3, "width": 24, "ranks": (tuple(s % 4 for s in range(96)),), "room": 3},
    {"rows": 6, "width": 20, "ranks": ((4, 4),), "room": 4, "adapted": False, "activation": "relu"},
    {"rows": 6, "width": 20, "ranks": ((4, 4),), "room": 4, "adapted": False},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def lora_up(
    gpu: GpuBackend,
    t: int,
    adapters: int,
    ranks: int,
    scales: int,
    b: int,
    out: int,
    *,
    rows: int,
    segments: int,
    width: int,
    room: int,
    adapter_count: int,
    dtype: str,
    activation: str = "none",
    stream: StreamLike = 0,
) -> None:
    """Enqueue the addition of the adapters' products to ``rows`` rows, and the activation after it.

    ``t`` is float32 ``[rows, segments * room]``, as `lora_down` leaves it; ``adapters``, ``ranks`` and ``room`` are as
    there. ``scales`` is float32 ``[adapter_count, segments]``. ``b`` is ``dtype``, ``[adapter_count, segments, room,
    width]``: the second matrices, transposed, of which the first ``ranks[adapter, segment]`` rows of a segment hold
    data, and the rest is not read. ``out`` is ``dtype``, ``[rows, segments * width]``, contiguous; what it holds is
    added to, in float32, and rounded once.

    Raises
    ------
    ValueError
        When the activation is unknown.
    """
    if activation not in ACTIVATION_NAMES:
        raise ValueError(f"lora_up: activation: expected one of {ACTIVATION_NAMES}, got {activation!r}")
    sizes = (rows, segments, width, room, adapter_count, ACTIVATION_NAMES.index(activation))
    OP.launch(gpu, dtype, (t, adapters, ranks, scales, b, out, *sizes), stream)
