# SPDX-License-Identifier: MIT OR Apache-2.0
"""An output head for up to 64 rows: ``out = x @ weight^T + bias``, and the largest elements on the way.

What `linear` computes, up to the order of sums, for weights that are many times what the device holds beside its L2.
Blocks stay from the first weights to the last, and the kernel begins to read them before the kernel ahead of it has
ended.

Each block may also leave the largest of what it has of each row, as it was stored: a part of the row's maximum, as
`metrale.ops.sample` joins it. So nobody need read the row again to find its largest element.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Arg, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import dense, inputs
from metrale.ops.row_parts import found

Array = np.ndarray[Any, np.dtype[Any]]

MOST_ROWS: Final = 64
MOST_K: Final = 1024
"""Columns of x: what the registers of a block hold of it."""
MOST_N: Final = 1 << 30
COLUMNS: Final = 16
"""Of the result, in a tile: what a block has at a time."""

VARIANTS: Final = {16: "16", 32: "32", MOST_ROWS: ""}
"""The entry points' endings, by the most rows of each. All compute the same bits."""

MOST_SLOTS: Final = 16
"""Tiles of the weights that are on their way to a block, at most."""

PART_BYTES: Final = 16
"""Bytes of ``maxima`` for a row and a block."""

_MOST_BLOCKS: Final = 256
_BESIDE: Final = 16 * 1024  # bytes of shared memory that are left to blocks of the kernel ahead
_WARPS: Final = 8  # of a block
_BARRIER_BYTES: Final = 128  # at the beginning of a block's shared memory

SPEC: Final = OpSpec(
    name="head_linear",
    args=(
        dense.X,
        *dense.MATRIX,
        tensor("out", "out", "T", "rows", "n", row_stride="out_stride"),
        Arg("maxima", "out", "u32", ("rows", "blocks", 4), optional=True, align=16),
        scalar("rows", "i32"),
        scalar("n", "i32"),
        scalar("k", "i32"),
        scalar("x_stride", "i64"),
        scalar("out_stride", "i64"),
        scalar("counted", "i32"),
        scalar("blocks", "i32"),
    ),
    tolerance=inputs.ONE_ROUNDING,
    dtypes=dense.DTYPES,
    variants=tuple(name for name in VARIANTS.values() if name),
)


def block_count(n: int, limits: Limits) -> int:
    """Return how many blocks a launch has, and so in how many parts the maximum of a row comes."""
    return min(-(-n // COLUMNS), limits.sm_count, _MOST_BLOCKS)


def maxima_bytes(rows: int, n: int) -> int:
    """Return the bytes of ``maxima`` that suffice on every device."""
    return rows * min(-(-n // COLUMNS), _MOST_BLOCKS) * PART_BYTES


def room_of(rows: int) -> int:
    """Return for how many rows the entry point is that takes ``rows``."""
    return min(most for most in VARIANTS if rows <= most)


def shared_bytes(room: int, k: int, slots: int) -> int:
    """Return the shared memory of a block: barriers, the warps' sums with two tiles, and tiles on their way."""
    sums = 2 * _WARPS * (COLUMNS // 8) * (room * 8 + 16) * 4
    return _BARRIER_BYTES + sums + slots * COLUMNS * k * 2


def plans(dims: Dims, dtype: str, limits: Limits) -> dict[int, LaunchPlan]:
    """Return every way to launch the kernel, by the number of tiles on their way; where there are no bulk copies, none.

    The results have the same bits.
    """
    room, k = room_of(dims["rows"]), dims["k"]
    least, most = (1, MOST_SLOTS) if limits.max_cluster > 1 else (0, 0)
    return {
        slots: LaunchPlan(
            SPEC.entry(dtype, VARIANTS[room]),
            (dims["blocks"], 1, 1),
            (limits.warp_size * _WARPS, 1, 1),
            shared_bytes(room, k, slots),
            programmatic=True,
        )
        for slots in range(least, most + 1)
        if shared_bytes(room, k, slots) <= limits.max_shared_bytes
    }


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Have as many tiles under way as there is room for beside a block of the kernel ahead.

    A block for 64 rows takes all registers of a multiprocessor, so that there is nothing beside it.

    Raises
    ------
    ValueError
        When a size is not what the op is for.
    """
    dense.check_sizes(SPEC.name, dims, {"rows": MOST_ROWS, "n": MOST_N, "k": MOST_K})
    every = plans(dims, dtype, limits)
    most = limits.max_shared_bytes - (_BESIDE if room_of(dims["rows"]) < MOST_ROWS else 0)
    return every[max((slots for slots, how in every.items() if how.shared_bytes <= most), default=min(every))]


def reference(
    *,
    x: Array,
    weight: Array,
    bias: Array | None,
    out: Array,
    maxima: Array | None,
    n: int,
    counted: int,
    blocks: int,
    **_: Any,
) -> None:
    """The product's reference by rows; of block ``b`` the tiles ``b``, ``b + blocks`` and so on."""
    gemm_reference(x, weight, out, bias, by_row=True)
    if maxima is not None:
        block_of = np.arange(n) // COLUMNS % blocks
        for block in range(blocks):
            columns = np.flatnonzero(block_of[:counted] == block)
            maxima[:, block] = found(out[:, columns], columns)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    n: int,
    k: int,
    bias: bool = True,
    x_pad: int = 0,
    out_pad: int = 0,
    spare: int = 0,
    maxima: bool = False,
    blocks: int = 3,
) -> Inputs:
    """``spare`` of the columns are those of a padded vocabulary: zeros, with minus infinity for bias."""
    weight = inputs.normal(rng, (n, k), dtype, std=k**-0.5)
    biases = inputs.normal(rng, (n,), dtype)
    weight[n - spare :], biases[n - spare :] = 0, -np.inf
    return {
        "x": inputs.normal(rng, (rows, k + x_pad), dtype),
        "weight": weight,
        "bias": biases if bias else None,
        "out": inputs.normal(rng, (rows, n + out_pad), dtype, std=2.0),
        "maxima": rng.integers(0, 1 << 32, (rows, blocks, 4), np.uint32) if maxima else None,
        "rows": rows,
        "n": n,
        "k": k,
        "x_stride": k + x_pad,
        "out_stride": n + out_pad,
        "counted": n - spare,
        "blocks": blocks,
    }


CASES: Final = (
    {"rows": 1, "n": 1, "k": 1, "blocks": 1},
    {"rows": 1, "n": 97, "k": 256, "bias": False},
    {"rows": 7, "n": 33, "k": 17, "x_pad": 5, "out_pad": 3, "maxima": True},  # element by element
    {"rows": 5, "n": 64, "k": 48, "blocks": 4},
    {"rows": 19, "n": 31, "k": 64, "bias": False, "out_pad": 1, "blocks": 5},  # blocks without a tile
    {"rows": 64, "n": 1003, "k": 1024, "spare": 40, "maxima": True},
    {"rows": 16, "n": 640, "k": 1024, "out_pad": 8, "maxima": True, "blocks": 2},
    {"rows": 33, "n": 300, "k": 1000, "x_pad": 8},
    {"rows": 18, "n": 20, "k": 333, "x_pad": 3, "maxima": True},
    {"rows": 32, "n": 777, "k": 520, "spare": 1, "blocks": 7},
    {"rows": 50, "n": 4096, "k": 8, "blocks": 9, "maxima": True},
    {"rows": 3, "n": 2501, "k": 1004, "blocks": 132},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def head_linear(
    gpu: GpuBackend,
    x: int,
    weight: int,
    bias: int,
    out: int,
    maxima: int = NULL,
    *,
    rows: int,
    n: int,
    k: int,
    dtype: str,
    x_stride: int | None = None,
    out_stride: int | None = None,
    counted: int | None = None,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a product of at most `MOST_ROWS` rows of at most `MOST_K` columns with a long matrix.

    ``x`` is ``[rows, k]`` and ``out`` is ``[rows, n]``, rows ``x_stride`` and ``out_stride`` elements apart (None:
    contiguous); ``weight`` is ``[n, k]``; ``bias`` is ``[n]``, or NULL for none; all of ``dtype``, which is f16 or
    bf16. ``maxima`` is uint32 ``[rows, block_count, 4]``, or NULL: it gets the parts of each row's maximum among the
    first ``counted`` columns (None: all).

    The kernel may start before the ones ahead of it on the stream have ended. No kernel that may still run then may
    write ``weight`` or ``bias``.

    Raises
    ------
    ValueError
        When there are too many rows or columns.
    """
    strides = (k if x_stride is None else x_stride, n if out_stride is None else out_stride)
    sizes = (rows, n, k, *strides, n if counted is None else counted, block_count(n, gpu.limits()))
    OP.launch(gpu, dtype, (x, weight, bias or NULL, out, maxima or NULL, *sizes), stream)
