# SPDX-License-Identifier: MIT OR Apache-2.0
"""LayerNorm over the last axis (Ba, Kiros and Hinton 2016): ``(x - mean) / sqrt(var + eps) * weight + bias``."""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs
from metrale.ops.chains import chains_of

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="layer_norm",
    args=(
        tensor("x", "in", "T", "rows", "width"),
        tensor("weight", "in", "T", "width"),
        tensor("bias", "in", "T", "width"),
        tensor("out", "out", "T", "rows", "width"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("eps", "f32"),
    ),
    tolerance=inputs.ONE_ROUNDING,
    aliases=(("x", "out"),),
)


_GROUP: Final = 16  # threads of a chain


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block a row; some threads for each chain of it, in whole warps."""
    warps = -(-chains_of(dims["width"]) * _GROUP // limits.warp_size)
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size * warps, 1, 1), programmatic=True)


def reference(*, x: Array, weight: Array, bias: Array, out: Array, rows: int, width: int, eps: float) -> None:
    """Mean and biased variance in float32, in two passes."""
    values = x.astype(np.float32, copy=False)  # converted in pieces as it sums, NumPy would cut rows by their places
    centred = values - values.mean(axis=1, keepdims=True)
    variance = np.einsum("rc,rc->r", centred, centred) / np.float32(width)
    centred *= (1.0 / np.sqrt(variance + np.float32(eps)))[:, None]
    centred *= weight
    np.add(centred, bias, out=out, casting="unsafe")  # added in float32, rounded as it is stored


def make_inputs(rng: np.random.Generator, dtype: str, *, rows: int, width: int, std: float = 1.0) -> Inputs:
    return {
        "x": inputs.normal(rng, (rows, width), dtype, mean=std / 2, std=std),
        "weight": inputs.normal(rng, (width,), dtype, mean=1.0, std=0.3),
        "bias": inputs.normal(rng, (width,), dtype, std=0.3),
        "out": inputs.output((rows, width), dtype),
        "rows": rows,
        "width": width,
        "eps": 1e-5,
    }


CASES: Final = (
    {"rows": 1, "width": 256},
    {"rows": 5, "width": 33},
    {"rows": 3, "width": 2},
    {"rows": 70, "width": 1024},
    {"rows": 4, "width": 64, "std": 3e-3},  # a variance near eps, where eps decides
    {"rows": 2, "width": 9001},  # wider than what the CUDA kernel holds in registers
    {"rows": 2, "width": 8712},  # the same, in whole packs
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def layer_norm(
    gpu: GpuBackend,
    x: int,
    weight: int,
    bias: int,
    out: int,
    *,
    rows: int,
    width: int,
    eps: float,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue ``out[r] = LayerNorm(x[r])`` for ``rows`` rows; ``out`` may be ``x``.

    ``x`` and ``out`` are ``[rows, width]``, ``weight`` and ``bias`` are ``[width]``, all contiguous and of ``dtype``.
    """
    OP.launch(gpu, dtype, (x, weight, bias, out, rows, width, eps), stream)
