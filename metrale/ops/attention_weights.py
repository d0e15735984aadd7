# SPDX-License-Identifier: MIT OR Apache-2.0
"""The weights that attention gives to the keys, themselves: ``out[r, h, p] = softmax_p(scale * q[r, h] . k[p, h])``.

They say which source positions a row looks at in cross-attention. `decode_attention` forms the same weights and mixes
the values with them at once; here they are written, in float32, and there are no values. Spans are laid out as there.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, Tolerance, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

WARPS: Final = 4
"""Warps of a block; each takes every fourth key."""

MOST_HEAD_DIM: Final = 256

SPEC: Final = OpSpec(
    name="attention_weights",
    args=(
        tensor("q", "in", "T", "rows", "heads*head_dim", row_stride="q_stride"),
        tensor("spans", "in", "u64", "rows"),
        tensor("lengths", "in", "i32", "rows"),
        tensor("out", "out", "f32", "rows", "heads*longest"),
        scalar("rows", "i32"),
        scalar("heads", "i32"),
        scalar("head_dim", "i32"),
        scalar("longest", "i32"),
        scalar("q_stride", "i64"),
        scalar("k_offset", "i64"),
        scalar("kv_stride", "i64"),
        scalar("scale", "f32"),
    ),
    # The result is float32 whatever the inputs are, so all types have the bound that attention has in float32.
    tolerance=Tolerance(inputs.ATTENTION.f32, inputs.ATTENTION.f32, inputs.ATTENTION.f32),
    indirect=True,
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row and head, in grid x. Scores lie in the output until they are weights, whatever the lengths.

    Raises
    ------
    ValueError
        When the heads are wider than the kernel can hold.
    """
    if dims["head_dim"] > MOST_HEAD_DIM:
        raise ValueError(f"attention_weights: head_dim: expected at most {MOST_HEAD_DIM}, got {dims['head_dim']}")
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"] * dims["heads"], 1, 1), (WARPS * limits.warp_size, 1, 1))


def reference(
    *,
    memory: DeviceMemory,
    q: Array,
    spans: Array,
    lengths: Array,
    out: Array,
    rows: int,
    heads: int,
    head_dim: int,
    longest: int,
    q_stride: int,
    k_offset: int,
    kv_stride: int,
    scale: float,
) -> None:
    """Scores and softmax in float32; positions past a row's length have weight 0."""
    if lengths.min() < 1 or lengths.max() > longest:
        raise InvalidPointer(
            f"attention_weights: lengths: expected 1 to {longest} keys a row, got {lengths.min()} to {lengths.max()}"
        )
    dtype = dtypes.name_of(q.dtype)
    where: dict[str, Any] = {"offset": k_offset, "stride": kv_stride, "width": heads * head_dim, "dtype": dtype}
    keys = memory.gather_rows(spans, lengths, **where, room=longest)  # as many, whoever has the most here
    keys = keys.astype(np.float32, copy=False).reshape(rows, longest, heads, head_dim)
    query = q.astype(np.float32).reshape(rows, heads, 1, head_dim)
    query *= np.float32(scale)
    scores = np.matmul(query, keys.transpose(0, 2, 3, 1))[:, :, 0]
    past = np.arange(longest) >= lengths[:, None]
    scores += np.where(past, np.float32(-np.inf), np.float32(0.0))[:, None, :]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out[...] = scores.reshape(rows, heads * longest)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    lengths: tuple[int, ...],
    heads: int,
    head_dim: int,
    longest: int | None = None,
    layers: int = 2,
    layer: int = 1,
    pad: int = 0,
    spread: float = 1.0,
    regular: bool = True,
) -> Inputs:
    """``longest`` is that of the lengths where it is not given."""
    rows, width = len(lengths), heads * head_dim
    stride = layers * 2 * width
    most = max(lengths) if longest is None else longest
    return {
        "q": inputs.normal(rng, (rows, width + pad), dtype, std=spread),
        "spans": inputs.spans(rng, rows, max(lengths), stride, dtype, "in", regular=regular),
        "lengths": np.asarray(lengths, dtype=np.int32),
        "out": inputs.output((rows, heads * most), "f32"),
        "rows": rows,
        "heads": heads,
        "head_dim": head_dim,
        "longest": most,
        "q_stride": width + pad,
        "k_offset": layer * 2 * width,
        "kv_stride": stride,
        "scale": head_dim**-0.5,
    }


CASES: Final = (
    {"lengths": (1,), "heads": 1, "head_dim": 8},
    {"lengths": (3, 1, 7, 2), "heads": 4, "head_dim": 16, "pad": 128, "longest": 10},
    {"lengths": (17, 33, 5), "heads": 2, "head_dim": 64, "layers": 3, "layer": 0},
    {"lengths": (4, 6), "heads": 3, "head_dim": 5, "regular": False, "longest": 7},
    {"lengths": (5, 3) * 33, "heads": 2, "head_dim": 16},
    {"lengths": (300, 129, 40), "heads": 2, "head_dim": 128, "longest": 450},  # more keys than a block has threads
    {"lengths": (200, 9), "heads": 2, "head_dim": 64, "spread": 45.0},  # scores far past what exp can hold unshifted
    {"lengths": (70, 3), "heads": 2, "head_dim": 256},
    {"lengths": (40, 9), "heads": 1, "head_dim": 101, "regular": False},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def attention_weights(
    gpu: GpuBackend,
    q: int,
    spans: int,
    lengths: int,
    out: int,
    *,
    rows: int,
    heads: int,
    head_dim: int,
    longest: int,
    q_stride: int,
    k_offset: int,
    kv_stride: int,
    scale: float,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the attention weights of ``rows`` queries.

    ``q`` is ``dtype``, ``[rows, heads * head_dim]`` with rows ``q_stride`` elements apart; ``out`` is float32,
    ``[rows, heads, longest]``, contiguous, and 0 from ``lengths[r]`` on. ``spans`` is uint64 ``[rows]``, device
    addresses; ``lengths`` is int32 ``[rows]``, each 1 to ``longest``. ``k_offset`` and ``kv_stride`` are elements.
    """
    sizes = (rows, heads, head_dim, longest, q_stride, k_offset, kv_stride, scale)
    OP.launch(gpu, dtype, (q, spans, lengths, out, *sizes), stream)
