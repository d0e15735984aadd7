# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dense layer for up to 64 rows: ``out = activation(x @ weight^T + bias)``.

What `linear` computes, up to the order of sums, and `kv_scatter` after it; `metrale.ops.dense` says more. The blocks of
a cluster divide k among them, so that each reads a part of x alone; and the kernel begins to read the weights before
the kernel ahead of it has ended.

There are two kinds of entry points. The chained ones sum in the order of `thin_linear`; the others are faster.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar
from gpu_runtime.streams import StreamLike
from metrale.ops import dense
from metrale.ops.chains import UNIT, chain_units, chains_of
from metrale.ops.linear import ACTIVATION_NAMES

Array = np.ndarray[Any, np.dtype[Any]]

MOST_ROWS: Final = 64
COLUMNS: Final = 128
"""Of the result, that a block has."""

_WARPS: Final = 8  # of a block
_AT_ONCE: Final = 16  # rows of x that are multiplied at once
_UNIT_BYTES: Final = 2 * UNIT
_PAD_BYTES: Final = 16  # between rows of x, or of the weights
_CHAINED_PAD_BYTES: Final = 64
_COUNT_BYTES: Final = 16  # of what counts the bytes that are under way

SPEC: Final = OpSpec(
    name="cluster_linear",
    args=(
        dense.X,
        *dense.MATRIX,
        *dense.RESULT,
        *dense.PLACES,
        scalar("chained", "i32"),
    ),
    tolerance=dense.TOLERANCE,
    dtypes=dense.DTYPES,
    indirect=True,
    variants=("chained",),
)


def part_chains(k: int, cluster: int) -> int:
    """Return how many chains of k each block of a cluster has, the last ones perhaps fewer."""
    return -(-chains_of(k) // cluster)


def part_units(k: int, cluster: int, *, chained: bool) -> int:
    """Return how many units of k each block of a cluster has, or fewer; whole chains if ``chained``."""
    return part_chains(k, cluster) * chain_units(k) if chained else -(-k // (cluster * UNIT))


def cluster_of(n: int, k: int, limits: Limits) -> int:
    """Return the size of a cluster: a power of two.

    It is the largest of which all run at once, and whose blocks have a chain of k each. That was the fastest on an
    H200, or close to it, for the layers of decoders 1,024 and 2,048 wide.
    """
    cluster, most = 1, min(limits.max_cluster, chains_of(k))
    while 2 * cluster <= most and _blocks(n) * 2 * cluster <= limits.sm_count:
        cluster *= 2
    return cluster


def _blocks(n: int) -> int:
    return -(-n // COLUMNS)


def shared_bytes(rows: int, units: int, *, chained: bool) -> int:
    """Return the shared memory of a block that has room for so many units of k at once.

    Counts, places and bias; then weights and x, which leave their place to the sums: these take less.
    """
    padded = -(-rows // _AT_ONCE) * _AT_ONCE
    operands = (COLUMNS + padded) * (units * _UNIT_BYTES + (_CHAINED_PAD_BYTES if chained else _PAD_BYTES))
    return _COUNT_BYTES + MOST_ROWS * 8 + COLUMNS * 4 + operands


def plans(dims: Dims, dtype: str, limits: Limits) -> dict[int, LaunchPlan]:
    """Return every way to launch the kernel, by the size of the cluster. Rows of x decide the memory alone.

    ``dims["chained"]`` says which kind of entry point it is.
    """
    rows, n, k, chained = dims["rows"], dims["n"], dims["k"], bool(dims["chained"])
    entry = SPEC.entry(dtype, "chained" if chained else "")
    found = {}
    cluster = 1
    while cluster <= limits.max_cluster:
        units = part_units(k, cluster, chained=chained)
        while shared_bytes(rows, units, chained=chained) > limits.max_shared_bytes:
            units = -(-units // 2)
        found[cluster] = LaunchPlan(
            entry,
            (_blocks(n) * cluster, 1, 1),
            (limits.warp_size * _WARPS, 1, 1),
            shared_bytes(rows, units, chained=chained),
            programmatic=True,
            cluster=cluster,
        )
        cluster *= 2
    return found


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Choose the cluster by n, k and the device, so that a row has the same bits in every batch.

    Raises
    ------
    ValueError
        When there are more rows than the op is for, or k is beyond what the kernel's numbers hold.
    """
    dense.check_sizes(SPEC.name, dims, {"rows": MOST_ROWS, "k": dense.MOST_K})
    return plans(dims, dtype, limits)[cluster_of(dims["n"], dims["k"], limits)]


def reference(*, memory: DeviceMemory, x: Array, out: Array, **values: Any) -> None:
    """`metrale.ops.dense.reference`."""
    dense.reference(SPEC.name, memory, {"gamma": None, "beta": None, **values}, x, out)


def make_inputs(rng: np.random.Generator, dtype: str, *, chained: bool = False, **sizes: Any) -> Inputs:
    """Return inputs of a case."""
    inputs = {**dense.make_inputs(rng, dtype, **sizes), "chained": int(chained)}
    return {name: value for name, value in inputs.items() if name not in ("gamma", "beta", "eps")}


CASES: Final = (
    {"rows": 1, "n": 1, "k": 1},
    {"rows": 1, "n": 97, "k": 256, "bias": False, "chained": True},
    {"rows": 7, "n": 33, "k": 17, "x_pad": 5, "out_pad": 3},
    {"rows": 5, "n": 64, "k": 48, "residual": True},
    {"rows": 19, "n": 31, "k": 64, "residual": True, "bias": False, "out_pad": 1, "chained": True},
    {"rows": 64, "n": 256, "k": 1024, "activation": "relu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu_tanh"},
    {"rows": 6, "n": 40, "k": 24, "activation": "silu", "out_pad": 8},
    {"rows": 3, "n": 5, "k": 257},
    {"rows": 33, "n": 40, "k": 200, "bias": False, "x_pad": 8},
    {"rows": 18, "n": 20, "k": 333, "x_pad": 3},  # element by element
    {"rows": 3, "n": 2501, "k": 1000, "activation": "relu", "chained": True},
    {"rows": 17, "n": 4096, "k": 512, "residual": True},
    {"rows": 20, "n": 56, "k": 2040},  # a last step that is not whole
    {"rows": 49, "n": 1030, "k": 4096, "residual": True, "chained": True},
    {"rows": 20, "n": 24, "k": 1096},  # blocks without a column of x
    {"rows": 34, "n": 24, "k": 1096, "chained": True},
    {"rows": 35, "n": 24, "k": 9000, "residual": True, "chained": True},
    {"rows": 64, "n": 40, "k": 17_000},  # more of k than there is room for
    {"rows": 2, "n": 40, "k": 17_001, "chained": True},
    {"rows": 9, "n": 96, "k": 64, "kv": 64, "out_pad": 5},  # keys and values in place
    {"rows": 21, "n": 40, "k": 320, "kv": 23, "bias": False, "regular": False, "chained": True},
    {"rows": 64, "n": 30, "k": 77, "kv": 20, "regular": False},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def cluster_linear(
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
    x_stride: int | None = None,
    out_stride: int | None = None,
    activation: str = "none",
    residual: bool = False,
    spans: int = NULL,
    positions: int = NULL,
    kv_from: int | None = None,
    kv_offset: int = 0,
    kv_stride: int = 0,
    chained: bool = False,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a dense layer of at most `MOST_ROWS` rows from ``k`` to ``n`` features.

    ``x`` is ``[rows, k]`` and ``out`` is ``[rows, n]``, rows ``x_stride`` and ``out_stride`` elements apart (None:
    contiguous); ``weight`` is ``[n, k]``; ``bias`` is ``[n]``, or NULL for none; all of ``dtype``, which is f16 or
    bf16. With ``residual`` the result is added to what ``out`` holds, and no activation may be named.

    With ``spans`` (uint64 ``[rows]``) and ``positions`` (int32 ``[rows]``) the columns from ``kv_from`` on go into the
    KV cache as `metrale.ops.dense` says, and ``out`` is ``[rows, kv_from]``. Neither a residual nor an activation goes
    with it.

    If ``chained``, a row has on a device the bits that `thin_linear` gives it there, whose LayerNorm is that of
    `layer_norm`. That is slower.

    The kernel may start before the ones ahead of it on the stream have ended. No kernel that may still run then may
    write ``weight``, ``bias``, ``spans`` or ``positions``.

    Raises
    ------
    ValueError
        When there are too many rows, the activation is unknown, options do not go together, or only one of ``spans``
        and ``positions`` is NULL.
    """
    kv_from = n if kv_from is None else kv_from
    dense.check(SPEC.name, (("gamma", NULL), ("beta", NULL)), spans, positions, n, kv_from, activation, residual)
    strides = (k if x_stride is None else x_stride, kv_from if out_stride is None else out_stride)
    tensors = (x, weight, bias or NULL, out, spans or NULL, positions or NULL)
    options = (ACTIVATION_NAMES.index(activation), int(residual), kv_from, kv_offset, kv_stride, int(chained))
    OP.launch(gpu, dtype, (*tensors, rows, n, k, *strides, *options), stream)
