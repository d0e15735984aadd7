# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dense layer of one row, with the LayerNorm ahead of it: ``out = activation(n(x) @ weight^T + bias)``.

`thin_linear` for one row, in which reading the weights is all that takes time; `metrale.ops.dense` says what it
computes. The kernel begins to read the weights before the kernel ahead of it has ended. An output head is such a layer,
too: the longest there is.

LayerNorm is applied to the products' sums, not to x, so that it takes no time of its own. With m and s the mean and the
deviation of x, the product of LayerNorm(x) with a row W of the weights is ``(sum gamma x W - m sum gamma W) / s + sum
beta W``, where the last two sums, which do not depend on x, are arguments. What is rounded to the element type is
``gamma x``: the result is that of an x whose elements are rounded once more, however far its mean is from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.gemm import finish, gemm_reference
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import dense
from metrale.ops.linear import ACTIVATION_NAMES

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """What an entry point is instantiated over.

    Attributes
    ----------
    rows : int
        Rows of the weights that a warp has in registers.
    slices : int
        Slices of k that it has of each.
    streamed : bool
        Whether there may be more slices than the warps of a block have at a time.
    ringed : bool
        Whether each warp has rows of its own, as many as the number of blocks makes it, which come to its registers
        through a ring in shared memory.
    """

    rows: int
    slices: int
    streamed: bool = False
    ringed: bool = False


VARIANTS: Final = {
    "": Variant(6, 1, streamed=True),
    "6x1": Variant(6, 1),
    "8x1": Variant(8, 1),
    "4x2": Variant(4, 2),
    "ring4x2": Variant(4, 2, ringed=True),
    "ring2x4": Variant(2, 4, ringed=True),
}
"""The entry points by their endings. All compute the same bits."""

MOST_N: Final = 1 << 30

_WARPS: Final = 8  # of a block, at most
_SLICE: Final = 512  # columns whose products a warp sums
_HEADROOM: Final = 0.0625  # gamma x may be past what float16 holds where x is not
_LONG: Final = 1 << 23  # elements of weights past which blocks that stay pay, or at least more rows a warp
_PACK: Final = 8  # elements that a ring's copies are multiples of
_RING: Final = 3 * 8192 + 128  # bytes of a warp's ring: slots, and a line for their barriers

SPEC: Final = OpSpec(
    name="gemv",
    args=(
        tensor("x", "in", "T", "k"),
        tensor("gamma", "in", "T", "k", optional=True),
        tensor("sums", "in", "f32", 2, "n", optional=True),
        *dense.MATRIX,
        tensor("out", "inout", "T", "kv_from", reads_when="residual"),
        tensor("spans", "in", "u64", 1, optional=True),
        tensor("positions", "in", "i32", 1, optional=True),
        scalar("n", "i32"),
        scalar("k", "i32"),
        *dense.OPTIONS,
    ),
    tolerance=dense.TOLERANCE,
    dtypes=dense.DTYPES,
    indirect=True,
    variants=tuple(VARIANTS)[1:],
)


def shared_bytes(variant: Variant) -> int:
    """Return the shared memory of a block without rings: its sums, those of x, and what all its warps have of x."""
    slices = _WARPS * variant.slices
    staged = variant.slices * _SLICE * 2 if variant.ringed else 0
    return slices * _WARPS * variant.rows * 4 + slices * 8 + staged


def shape(variant: Variant, k: int) -> tuple[int, int]:
    """Return how many warps of a block share a row of the weights, and how many such groups it has."""
    along = min(-(-k // (_SLICE * variant.slices)), _WARPS)
    return along, _WARPS // along


def plans(dims: Dims, dtype: str, limits: Limits) -> dict[str, LaunchPlan]:
    """Return every way to launch the kernel at full speed, by variant."""
    n, k = dims["n"], dims["k"]
    found = {}
    for name, variant in VARIANTS.items():
        shared = shared_bytes(variant)
        if variant.ringed:
            along, groups = 1, min((limits.max_shared_bytes - shared) // _RING, _WARPS)
            blocks, shared = limits.sm_count, shared + groups * _RING
        else:
            along, groups = shape(variant, k)
            blocks = -(-n // (groups * variant.rows))
        fits = variant.streamed or along * variant.slices * _SLICE >= k
        if fits and not (variant.ringed and k % _PACK):
            threads = (limits.warp_size * along, groups, 1)
            found[name] = LaunchPlan(SPEC.entry(dtype, name), (blocks, 1, 1), threads, shared, programmatic=True)
    return found


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Choose by n and k what was fastest on an H200, or close to it, for decoders 1,024 and 2,048 wide.

    Long weights, as an output head's, go through rings where they can.

    Raises
    ------
    ValueError
        When n or k is beyond what the kernel's numbers hold.
    """
    dense.check_sizes(SPEC.name, dims, {"n": MOST_N, "k": dense.MOST_K})
    n, k = dims["n"], dims["k"]
    found = plans(dims, dtype, limits)
    rings = [name for name in found if VARIANTS[name].ringed]
    if rings and n * k > _LONG:
        choice = rings[0]
    elif k > 2 * _WARPS * _SLICE:
        choice = ""
    elif k > _WARPS * _SLICE:
        choice = "4x2"
    else:
        choice = "8x1" if n * k > _LONG else "6x1"
    return found[choice]


def reference(*, memory: DeviceMemory, x: Array, out: Array, n: int, **values: Any) -> None:
    """`metrale.ops.dense.reference` of one row, but for LayerNorm, which is applied to the sums."""
    gamma, sums, weight, bias = (values[name] for name in ("gamma", "sums", "weight", "bias"))
    dense.check_pairs(SPEC.name, ("gamma", gamma), ("sums", sums))

    def multiply(c: Array, **options: Any) -> None:
        if gamma is None:
            gemm_reference(x[None], weight, c, bias, by_row=True, **options)
            return
        x32 = x.astype(np.float32)
        scaled = (x32 * gamma.astype(np.float32) * np.float32(_HEADROOM)).astype(x.dtype)
        product = np.empty((1, n), dtype=np.float32)
        gemm_reference(scaled[None], weight, product, by_row=True)
        mean = x32.mean(dtype=np.float32)
        deviation = np.sqrt(np.mean(np.square(x32 - mean), dtype=np.float32) + np.float32(values["eps"]))
        product /= np.float32(_HEADROOM)
        product -= mean * sums[0]
        product /= deviation
        product += sums[1]
        finish(product, c, bias, **options)

    dense.bring(SPEC.name, memory, values, out[None], multiply)


def make_inputs(rng: np.random.Generator, dtype: str, **options: Any) -> Inputs:
    """Return those of `metrale.ops.dense.make_inputs` with one row."""
    found = dict(dense.make_inputs(rng, dtype, rows=1, **options))
    x, out, gamma, beta, weight = (found[name] for name in ("x", "out", "gamma", "beta", "weight"))
    assert isinstance(x, np.ndarray)
    assert isinstance(out, np.ndarray)
    sums = None
    if isinstance(gamma, np.ndarray) and isinstance(beta, np.ndarray) and isinstance(weight, np.ndarray):
        sums = np.stack((gamma, beta)).astype(np.float32) @ weight.astype(np.float32).T
    one_row = {**found, "x": x[0], "out": out[0], "sums": sums}
    return {arg.name: one_row[arg.name] for arg in SPEC.args}


CASES: Final = (
    {"n": 1, "k": 1},
    {"n": 97, "k": 256, "bias": False},
    {"n": 33, "k": 17},  # element by element
    {"n": 33, "k": 17, "norm": True, "kv": 10},
    {"n": 1750, "k": 77, "bias": False},  # element by element
    {"n": 64, "k": 48, "residual": True},
    {"n": 31, "k": 520, "residual": True, "bias": False},
    {"n": 40, "k": 24, "activation": "relu"},
    {"n": 40, "k": 24, "activation": "gelu"},
    {"n": 40, "k": 24, "activation": "gelu_tanh"},
    {"n": 40, "k": 24, "activation": "silu"},
    {"n": 24, "k": 64, "norm": True, "std": 3e-3},  # a variance near eps, where eps decides
    {"n": 24, "k": 1024, "norm": True, "std": 30.0},
    {"n": 24, "k": 1024, "norm": True, "std": 12_000.0, "gain": 8.0},  # gamma x is past what float16 holds
    {"n": 45, "k": 1032, "norm": True, "bias": False},  # three warps a row
    {"n": 9, "k": 3, "norm": True, "residual": True},
    {"n": 3072, "k": 1024, "norm": True, "kv": 2048},  # keys and values in place
    {"n": 1600, "k": 600, "norm": True, "activation": "relu"},
    {"n": 2400, "k": 1024, "kv": 40, "regular": False},
    {"n": 58, "k": 2048, "norm": True, "kv": 29, "regular": False},
    {"n": 30, "k": 2048, "kv": 29, "bias": False},
    {"n": 41, "k": 4096, "residual": True},
    {"n": 19, "k": 8192},
    {"n": 501, "k": 5000, "residual": True},
    {"n": 21, "k": 7000, "norm": True},  # more columns than the threads have packs of
    {"n": 10, "k": 9000, "residual": True},  # weights in several batches
    {"n": 6, "k": 17000, "norm": True},
    {"n": 5, "k": 9001, "norm": True},
    {"n": 8456, "k": 1004, "norm": True, "activation": "relu"},  # eight rows a warp
    {"n": 8195, "k": 2048, "norm": True},  # through rings, with shares that differ by a row
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def gemv(
    gpu: GpuBackend,
    x: int,
    weight: int,
    bias: int,
    out: int,
    *,
    n: int,
    k: int,
    dtype: str,
    gamma: int = NULL,
    sums: int = NULL,
    eps: float = 1e-5,
    activation: str = "none",
    residual: bool = False,
    spans: int = NULL,
    positions: int = NULL,
    kv_from: int | None = None,
    kv_offset: int = 0,
    kv_stride: int = 0,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a dense layer of one row from ``k`` to ``n`` features.

    ``x`` is ``[k]``, ``weight`` is ``[n, k]``, ``bias`` is ``[n]``, or NULL for none, and ``out`` is ``[n]``; all of
    ``dtype``, which is f16 or bf16. With ``gamma``, ``[k]``, and ``sums``, float32 ``[2, n]``, it is ``LayerNorm(x)``
    that is multiplied: ``sums`` are those of gamma, and of beta, times each row of the weights. With ``residual`` the
    result is added to what ``out`` holds, and no activation may be named.

    With ``spans`` (uint64 ``[1]``) and ``positions`` (int32 ``[1]``) the columns from ``kv_from`` on go into the KV
    cache as `metrale.ops.dense` says, and ``out`` is ``[kv_from]``. Neither a residual nor an activation goes with it.

    The kernel may start before the ones ahead of it on the stream have ended. No kernel that may still run then may
    write ``gamma``, ``sums``, ``weight``, ``bias``, ``spans`` or ``positions``.

    Raises
    ------
    ValueError
        When the activation is unknown, options do not go together, only one of ``gamma`` and ``sums`` or of ``spans``
        and ``positions`` is NULL, or a size is too large.
    """
    kv_from = n if kv_from is None else kv_from
    norm = (("gamma", gamma), ("sums", sums))
    dense.check(SPEC.name, norm, spans, positions, n, kv_from, activation, residual)
    tensors = (x, gamma or NULL, sums or NULL, weight, bias or NULL, out, spans or NULL, positions or NULL)
    options = (eps, ACTIVATION_NAMES.index(activation), int(residual), kv_from, kv_offset, kv_stride)
    OP.launch(gpu, dtype, (*tensors, n, k, *options), stream)
