# SPDX-License-Identifier: MIT OR Apache-2.0
"""Full attention inside each of several sequences packed one after another, without padding.

Sequence ``s`` owns rows ``offsets[s]`` to ``offsets[s + 1]``; each of them attends to all of them:
``out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h]) v[j, h]`` (Vaswani et al. 2017).
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="packed_attention",
    args=(
        tensor("q", "in", "T", "tokens", "heads*head_dim", row_stride="stride"),
        tensor("k", "in", "T", "tokens", "heads*head_dim", row_stride="stride"),
        tensor("v", "in", "T", "tokens", "heads*head_dim", row_stride="stride"),
        tensor("offsets", "in", "i32", "offset_count"),
        tensor("out", "out", "T", "tokens", "heads*head_dim"),
        scalar("tokens", "i32"),
        scalar("offset_count", "i32"),
        scalar("longest", "i32"),
        scalar("heads", "i32"),
        scalar("head_dim", "i32"),
        scalar("stride", "i64"),
        scalar("scale", "f32"),
    ),
    tolerance=inputs.ATTENTION,
)

MOST_HEAD_DIM: Final = 256

WARP_QUERIES: Final = {"f32": 8, "f16": 16, "bf16": 16}
"""Queries of a warp, by element type: a product of the tensor cores has 16 rows."""

_TILE = 32  # keys in shared memory, and their values
_TILE_QUERIES = 8  # of a warp in shared memory, where the tensor cores do not serve


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block for some queries of each head and sequence. Shared memory holds one tile of keys and one of values.

    Raises
    ------
    ValueError
        When the heads are wider than the kernel can hold.
    """
    head_dim = dims["head_dim"]
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"packed_attention: head_dim: expected at most {MOST_HEAD_DIM}, got {head_dim}")
    warps = 4 if head_dim <= 128 else 2
    pitch = -(-head_dim // 8) * 8 + 4
    return LaunchPlan(
        SPEC.entry(dtype),
        (-(-dims["longest"] // (warps * WARP_QUERIES[dtype])), dims["heads"], dims["offset_count"] - 1),
        (warps * limits.warp_size, 1, 1),
        4 * (pitch * (2 * _TILE + warps * _TILE_QUERIES) + warps * _TILE_QUERIES * _TILE),
    )


def reference(
    *,
    q: Array,
    k: Array,
    v: Array,
    offsets: Array,
    out: Array,
    tokens: int,
    offset_count: int,
    longest: int,
    heads: int,
    head_dim: int,
    stride: int,
    scale: float,
) -> None:
    """Scores, softmax and weighted sum in float32, for runs of sequences of equal length at a time."""
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != tokens or lengths.min() < 1 or lengths.max() > longest:
        raise InvalidPointer(
            f"packed_attention: offsets: expected lengths of 1 to {longest} that cover {tokens} rows, got {offsets}"
        )
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))  # where the length changes
    for first, after in zip(starts, [*starts[1:], len(lengths)], strict=True):
        rows = slice(int(offsets[first]), int(offsets[after]))
        shape = (after - first, int(lengths[first]), heads, head_dim)
        query, key, value = (x[rows].astype(np.float32, copy=False).reshape(shape) for x in (q, k, v))
        scores = np.matmul(query.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1))
        scores *= np.float32(scale)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = np.matmul(scores, value.transpose(0, 2, 1, 3))
        mixed /= scores.sum(axis=-1, keepdims=True)
        out[rows] = mixed.transpose(0, 2, 1, 3).reshape(-1, heads * head_dim)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    lengths: tuple[int, ...],
    heads: int,
    head_dim: int,
    pad: int = 0,
    spread: float = 1.0,
) -> Inputs:
    tokens, width = sum(lengths), heads * head_dim
    return {
        "q": inputs.normal(rng, (tokens, width + pad), dtype, std=spread),
        "k": inputs.normal(rng, (tokens, width + pad), dtype),
        "v": inputs.normal(rng, (tokens, width + pad), dtype),
        "offsets": inputs.offsets(lengths),
        "out": inputs.output((tokens, width), dtype),
        "tokens": tokens,
        "offset_count": len(lengths) + 1,
        "longest": max(lengths),
        "heads": heads,
        "head_dim": head_dim,
        "stride": width + pad,
        "scale": head_dim**-0.5,
    }


CASES: Final = (
    {"lengths": (1,), "heads": 1, "head_dim": 8},
    {"lengths": (5, 1, 3, 3, 3, 9), "heads": 4, "head_dim": 16, "pad": 128},
    {"lengths": (33, 64), "heads": 2, "head_dim": 64},
    {"lengths": (2, 7), "heads": 3, "head_dim": 5, "pad": 1},
    {"lengths": (1050,), "heads": 1, "head_dim": 128},
    {"lengths": (33, 12), "heads": 2, "head_dim": 64, "spread": 30.0},  # scores far past what exp can hold unshifted
    {"lengths": (1, 17, 32, 65), "heads": 2, "head_dim": 64, "pad": 8},  # at the edges of tiles
    {"lengths": (33, 16), "heads": 2, "head_dim": 72},
    {"lengths": (70, 35), "heads": 1, "head_dim": 36, "pad": 3},  # rows that start anywhere
    {"lengths": (40, 3), "heads": 1, "head_dim": 200},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path("packed_attention"))
)


def packed_attention(
    gpu: GpuBackend,
    q: int,
    k: int,
    v: int,
    offsets: int,
    out: int,
    *,
    tokens: int,
    sequences: int,
    longest: int,
    heads: int,
    head_dim: int,
    stride: int,
    scale: float,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the attention of ``tokens`` rows in ``sequences`` sequences, none longer than ``longest``.

    ``q``, ``k``, ``v`` are ``dtype``, ``[tokens, heads * head_dim]`` with rows ``stride`` elements apart; ``out`` the
    same, contiguous. ``offsets`` is int32 ``[sequences + 1]``, from 0 to ``tokens``, strictly rising.
    """
    values = (q, k, v, offsets, out, tokens, sequences + 1, longest, heads, head_dim, stride, scale)
    OP.launch(gpu, dtype, values, stream)
