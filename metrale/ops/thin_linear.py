# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dense layer for few rows, with the LayerNorm ahead of it: ``out = activation(n(x) @ weight^T + bias)``.

What `layer_norm` followed by `linear` computes, up to the order of sums, and `kv_scatter` after them;
`metrale.ops.dense` says more. With few rows, as in decoding, reading the weights is what takes the time; the kernel
begins to read them before the kernel ahead of it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar
from gpu_runtime.streams import StreamLike
from metrale.ops import dense
from metrale.ops.chains import UNIT, chain_units, chains_of
from metrale.ops.cluster_linear import cluster_of, part_chains
from metrale.ops.linear import ACTIVATION_NAMES

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """What an entry point is instantiated over.

    Attributes
    ----------
    groups : int
        Groups of eight rows of the weights in a block.
    chunks : int
        Chunks of k whose weights a warp holds in registers.
    streamed : bool
        Whether a warp may have more chunks than that.
    """

    groups: int
    chunks: int
    streamed: bool = False


VARIANTS: Final = {
    "": Variant(2, 8, streamed=True),
    "3x4": Variant(3, 4),
    "4x4": Variant(4, 4),
    "1x8": Variant(1, 8),
}
"""The entry points by their endings."""

MOST_ROWS: Final = 64

_GROUP: Final = 8  # rows of the weights in a group
_MOST_GROUPS: Final = 4  # of a block
_TILE: Final = 8  # rows of x that are multiplied at once
_CHUNK: Final = 32  # columns of a chunk
_UNIT_CHUNKS: Final = UNIT // _CHUNK
_PITCH: Final = _TILE * _GROUP + _GROUP  # floats of a group's sums
_MOST_STAGED: Final = 8192  # columns whose gamma and beta the kernel keeps in shared memory

SPEC: Final = OpSpec(
    name="thin_linear",
    args=(
        dense.X,
        *dense.WEIGHTS,
        *dense.RESULT,
        *dense.OPTIONS,
        scalar("part", "i32"),
    ),
    tolerance=dense.TOLERANCE,
    dtypes=dense.DTYPES,
    indirect=True,
    variants=tuple(VARIANTS)[1:],
)


def chunks_of(k: int) -> int:
    """Return how many chunks of k each warp of a block has: a chain of them."""
    return chain_units(k) * _UNIT_CHUNKS


def shared_bytes(variant: Variant, warps: int, k: int) -> int:
    """Return the shared memory of a block: the warps' sums and moments, places, bias, gamma, beta."""
    batches = -(-chunks_of(k) // variant.chunks)
    staged = batches * variant.chunks * 2 * _CHUNK * 2 if k <= _MOST_STAGED else 0
    return warps * (variant.groups * _PITCH * 4 + _TILE * 8 + staged) + MOST_ROWS * 8 + _MOST_GROUPS * _GROUP * 4


def plans(dims: Dims, dtype: str, limits: Limits) -> dict[tuple[str, int], LaunchPlan]:
    """Return every way to launch the kernel at full speed, by variant and warps. Rows of x have no part in it."""
    n, k = dims["n"], dims["k"]
    found = {}
    for name, variant in VARIANTS.items():
        for warps in (8, 16):
            if chains_of(k) <= warps and (variant.streamed or chunks_of(k) <= variant.chunks):
                found[name, warps] = LaunchPlan(
                    SPEC.entry(dtype, name),
                    (-(-n // (_GROUP * variant.groups)), 1, 1),
                    (limits.warp_size * warps, 1, 1),
                    shared_bytes(variant, warps, k),
                    programmatic=True,
                )
    return found


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Choose by n and k alone, so that a row has the same bits in every batch.

    A warp's chain of k fits into registers where k is at most 4,096. Of short weights a block takes more rows, so that
    blocks of the kernel behind find room beside it; of longer ones there are more chains. What is chosen was the
    fastest on an H200, or close to it, for the layers of decoders 1,024 and 2,048 wide (`python -m
    benchmarks.thin_linear`).

    Raises
    ------
    ValueError
        When there are more rows than the op is for, or k is beyond what the kernel's numbers hold.
    """
    dense.check_sizes(SPEC.name, dims, {"rows": MOST_ROWS, "k": dense.MOST_K})
    k = dims["k"]
    if k <= 1024:
        choice = "3x4", 8
    elif k <= 2048:
        choice = "4x4", 16
    elif k <= 4096:
        choice = "1x8", 16
    else:
        choice = "", 16
    return plans(dims, dtype, limits)[choice]


def reference(*, memory: DeviceMemory, x: Array, out: Array, **values: Any) -> None:
    """`metrale.ops.dense.reference`."""
    dense.reference(SPEC.name, memory, values, x, out)


def make_inputs(rng: np.random.Generator, dtype: str, *, part: int = 3, **sizes: Any) -> Inputs:
    """Return inputs of a case."""
    return {**dense.make_inputs(rng, dtype, **sizes), "part": part}


CASES: Final = (
    {"rows": 1, "n": 1, "k": 1},
    {"rows": 1, "n": 97, "k": 256, "bias": False},
    {"rows": 7, "n": 33, "k": 17, "x_pad": 5, "out_pad": 3},
    {"rows": 5, "n": 64, "k": 48, "residual": True},
    {"rows": 19, "n": 31, "k": 64, "residual": True, "bias": False, "out_pad": 1},
    {"rows": 64, "n": 256, "k": 1024, "activation": "relu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu_tanh"},
    {"rows": 6, "n": 40, "k": 24, "activation": "silu", "out_pad": 8},
    {"rows": 3, "n": 5, "k": 257},
    {"rows": 4, "n": 24, "k": 64, "norm": True, "std": 3e-3},  # a variance near eps, where eps decides
    {"rows": 17, "n": 24, "k": 1024, "norm": True, "std": 30.0},
    {"rows": 33, "n": 40, "k": 200, "norm": True, "bias": False, "x_pad": 8},
    {"rows": 18, "n": 20, "k": 333, "norm": True, "x_pad": 3},  # element by element
    {"rows": 3, "n": 2501, "k": 1000, "norm": True, "activation": "relu"},  # three groups a block
    {"rows": 17, "n": 4096, "k": 512, "residual": True},  # four
    {"rows": 9, "n": 1500, "k": 768},  # two
    {"rows": 8, "n": 56, "k": 2048, "norm": True},  # a warp's columns in two windows
    {"rows": 20, "n": 56, "k": 2040, "norm": True},
    {"rows": 20, "n": 24, "k": 4096},
    {"rows": 7, "n": 24, "k": 4096, "norm": True},
    {"rows": 6, "n": 40, "k": 8192, "norm": True},
    {"rows": 35, "n": 24, "k": 8000, "norm": True, "residual": True},
    {"rows": 10, "n": 24, "k": 9000, "residual": True},  # weights in several batches
    {"rows": 9, "n": 96, "k": 64, "norm": True, "kv": 64, "out_pad": 5},  # keys and values in place
    {"rows": 21, "n": 40, "k": 320, "kv": 23, "bias": False, "regular": False},
    {"rows": 64, "n": 30, "k": 77, "norm": True, "kv": 20, "regular": False},  # element by element
    {"rows": 2, "n": 16, "k": 9000, "norm": True},  # more columns than the kernel keeps gamma and beta of
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def thin_linear(
    gpu: GpuBackend,
    x: int,
    weight: int,
    bias: int,
    out: int,
    *,
    rows: int,
    n: int,
    k: int,
    dtype: str,
    gamma: int = NULL,
    beta: int = NULL,
    eps: float = 1e-5,
    x_stride: int | None = None,
    out_stride: int | None = None,
    activation: str = "none",
    residual: bool = False,
    spans: int = NULL,
    positions: int = NULL,
    kv_from: int | None = None,
    kv_offset: int = 0,
    kv_stride: int = 0,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a dense layer of at most `MOST_ROWS` rows from ``k`` to ``n`` features.

    ``x`` is ``[rows, k]`` and ``out`` is ``[rows, n]``, rows ``x_stride`` and ``out_stride`` elements apart (None:
    contiguous); ``weight`` is ``[n, k]``; ``bias`` is ``[n]``, or NULL for none; all of ``dtype``, which is f16 or
    bf16. With ``gamma`` and ``beta``, both ``[k]``, it is ``LayerNorm(x)`` that is multiplied. With ``residual`` the
    result is added to what ``out`` holds, and no activation may be named.

    With ``spans`` (uint64 ``[rows]``) and ``positions`` (int32 ``[rows]``) the columns from ``kv_from`` on go into the
    KV cache as `metrale.ops.dense` says, and ``out`` is ``[rows, kv_from]``. Neither a residual nor an activation goes
    with it.

    On a device a row has the bits that `layer_norm` and a chained `cluster_linear` give it there, one after the other.

    The kernel may start before the ones ahead of it on the stream have ended. No kernel that may still run then may
    write ``gamma``, ``beta``, ``weight``, ``bias``, ``spans`` or ``positions``.

    Raises
    ------
    ValueError
        When there are too many rows, the activation is unknown, options do not go together, or only one of ``gamma``
        and ``beta`` or of ``spans`` and ``positions`` is NULL.
    """
    kv_from = n if kv_from is None else kv_from
    norm = (("gamma", gamma), ("beta", beta))
    dense.check(SPEC.name, norm, spans, positions, n, kv_from, activation, residual)
    strides = (k if x_stride is None else x_stride, kv_from if out_stride is None else out_stride)
    tensors = (x, gamma or NULL, beta or NULL, weight, bias or NULL, out, spans or NULL, positions or NULL)
    options = (eps, ACTIVATION_NAMES.index(activation), int(residual), kv_from, kv_offset, kv_stride)
    part = part_chains(k, cluster_of(n, k, gpu.limits()))
    OP.launch(gpu, dtype, (*tensors, rows, n, k, *strides, *options, part), stream)
