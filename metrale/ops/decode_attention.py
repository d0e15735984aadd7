# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of one query row each over the first ``lengths[r]`` positions of its own span of the KV cache.

``out[r, h] = sum_p softmax_p(scale * q[r, h] . k[p, h]) v[p, h]`` (Vaswani et al. 2017). It serves self-attention,
where a span is a sequence's decoder positions, and cross-attention, where it is its source. Spans are laid out as in
`kv_scatter`; ``k_offset`` and ``v_offset`` say where in a position a layer's keys and values are.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="decode_attention",
    args=(
        tensor("q", "in", "T", "rows", "heads*head_dim", row_stride="q_stride"),
        tensor("spans", "in", "u64", "rows"),
        tensor("lengths", "in", "i32", "rows"),
        tensor("out", "out", "T", "rows", "heads*head_dim"),
        scalar("rows", "i32"),
        scalar("heads", "i32"),
        scalar("head_dim", "i32"),
        scalar("q_stride", "i64"),
        scalar("k_offset", "i64"),
        scalar("v_offset", "i64"),
        scalar("kv_stride", "i64"),
        scalar("scale", "f32"),
    ),
    tolerance=inputs.ATTENTION,
    indirect=True,
)

WARPS: Final = 4
"""Warps of a block; each keeps a running maximum, sum and weighted value of the keys that it takes. Part of the order
in which a row is summed, so the same for every launch."""

MOST_HEAD_DIM: Final = 256


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row and head, in grid x. Shared memory holds each warp's part of the result, whatever the lengths.

    Raises
    ------
    ValueError
        When the heads are wider than the kernel can hold.
    """
    if dims["head_dim"] > MOST_HEAD_DIM:
        raise ValueError(f"decode_attention: head_dim: expected at most {MOST_HEAD_DIM}, got {dims['head_dim']}")
    return LaunchPlan(
        SPEC.entry(dtype),
        (dims["rows"] * dims["heads"], 1, 1),
        (WARPS * limits.warp_size, 1, 1),
        WARPS * (dims["head_dim"] + 2) * 4,
    )


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
    q_stride: int,
    k_offset: int,
    v_offset: int,
    kv_stride: int,
    scale: float,
) -> None:
    """Scores, softmax and weighted sum in float32; keys past a row's length have weight 0."""
    if lengths.min() < 1:
        raise InvalidPointer(f"decode_attention: lengths: expected at least 1 key a row, got {lengths.min()}")
    width = heads * head_dim
    first = min(k_offset, v_offset)  # keys and values are neighbours as a rule: one gather fetches both
    cached = memory.gather_rows(
        spans,
        lengths,
        offset=first,
        stride=kv_stride,
        width=max(k_offset, v_offset) + width - first,
        dtype=dtypes.name_of(q.dtype),
    ).astype(np.float32, copy=False)

    def per_head(offset: int) -> Array:
        return cached[:, :, offset - first :][:, :, :width].reshape(rows, -1, heads, head_dim)

    query = q.astype(np.float32).reshape(rows, heads, 1, head_dim)
    query *= np.float32(scale)
    scores = np.matmul(query, per_head(k_offset).transpose(0, 2, 3, 1))
    past = np.arange(scores.shape[-1]) >= lengths[:, None]
    scores += np.where(past, np.float32(-np.inf), np.float32(0.0))[:, None, None, :]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed = np.matmul(scores, per_head(v_offset).transpose(0, 2, 1, 3))
    mixed /= scores.sum(axis=-1, keepdims=True)
    out[...] = mixed.reshape(rows, width)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    lengths: tuple[int, ...],
    heads: int,
    head_dim: int,
    layers: int = 2,
    layer: int = 1,
    pad: int = 0,
    spread: float = 1.0,
    regular: bool = True,
) -> Inputs:
    rows, width = len(lengths), heads * head_dim
    stride = layers * 2 * width
    return {
        "q": inputs.normal(rng, (rows, width + pad), dtype, std=spread),
        "spans": inputs.spans(rng, rows, max(lengths), stride, dtype, "in", regular=regular),
        "lengths": np.asarray(lengths, dtype=np.int32),
        "out": inputs.output((rows, width), dtype),
        "rows": rows,
        "heads": heads,
        "head_dim": head_dim,
        "q_stride": width + pad,
        "k_offset": layer * 2 * width,
        "v_offset": (layer * 2 + 1) * width,
        "kv_stride": stride,
        "scale": head_dim**-0.5,
    }


CASES: Final = (
    {"lengths": (1,), "heads": 1, "head_dim": 8},
    {"lengths": (3, 1, 7, 2), "heads": 4, "head_dim": 16, "pad": 128},
    {"lengths": (17, 33, 5), "heads": 2, "head_dim": 64, "layers": 3, "layer": 0},
    {"lengths": (4, 6), "heads": 3, "head_dim": 5, "regular": False},
    {"lengths": (5, 3) * 33, "heads": 2, "head_dim": 16},
    {"lengths": (1100, 40), "heads": 2, "head_dim": 128},
    {"lengths": (400, 9), "heads": 2, "head_dim": 64, "spread": 30.0},  # scores far past what exp can hold unshifted
    {"lengths": (65, 64, 1, 300), "heads": 2, "head_dim": 64},  # about as many keys as a block takes at a time
    {"lengths": (70, 3), "heads": 2, "head_dim": 200},  # wide heads: more than a load for a lane
    {"lengths": (9, 40), "heads": 2, "head_dim": 64, "regular": False},
    {"lengths": (40, 9), "heads": 1, "head_dim": 101, "regular": False},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path("decode_attention"))
)


def decode_attention(
    gpu: GpuBackend,
    q: int,
    spans: int,
    lengths: int,
    out: int,
    *,
    rows: int,
    heads: int,
    head_dim: int,
    q_stride: int,
    k_offset: int,
    v_offset: int,
    kv_stride: int,
    scale: float,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the attention of ``rows`` queries.

    ``q`` is ``dtype``, ``[rows, heads * head_dim]`` with rows ``q_stride`` elements apart; ``out`` is contiguous.
    ``spans`` is uint64 ``[rows]``, device addresses; ``lengths`` is int32 ``[rows]``, each at least 1. Offsets and
    ``kv_stride`` are elements.
    """
    values = (q, spans, lengths, out, rows, heads, head_dim, q_stride, k_offset, v_offset, kv_stride, scale)
    OP.launch(gpu, dtype, values, stream)
