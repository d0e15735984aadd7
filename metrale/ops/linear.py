# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dense layer: ``out = activation(x @ weight^T + bias)``, or ``out += x @ weight^T + bias``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.gemm import ACTIVATIONS, Gemm, gemm_reference
from gpu_runtime.op import REGISTRY, Inputs, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

ACTIVATION_NAMES: Final = tuple(ACTIVATIONS)
"""The activations by the number that stands for them in the spec."""

ANY: Final = -1
"""The ``algorithm`` that leaves the choice to the library."""

SPEC: Final = OpSpec(
    name="linear",
    args=(
        tensor("x", "in", "T", "rows", "k", row_stride="x_stride"),
        tensor("weight", "in", "T", "n", "k"),
        tensor("bias", "in", "T", "n", optional=True),
        tensor("out", "inout", "T", "rows", "n", row_stride="out_stride", reads_when="residual"),
        scalar("rows", "i32"),
        scalar("n", "i32"),
        scalar("k", "i32"),
        scalar("x_stride", "i64"),
        scalar("out_stride", "i64"),
        scalar("activation", "i32"),
        scalar("residual", "i32"),
        tensor("workspace", "inout", "u8", "workspace_bytes", optional=True, reads_when=False),
        scalar("workspace_bytes", "i64"),
        scalar("algorithm", "i32"),
    ),
    tolerance=inputs.ONE_ROUNDING,
    library=True,
)


def enqueue(gpu: GpuBackend, dtype: str, values: Sequence[Any], stream: StreamLike) -> None:
    """Call the backend's product."""
    x, weight, bias, out, rows, n, k, x_stride, out_stride, activation, residual, *space, algorithm = values
    workspace, workspace_bytes = space
    gpu.gemm(
        x,
        weight,
        out,
        rows,
        n,
        k,
        dtype=dtype,
        bias=bias,
        activation=ACTIVATION_NAMES[activation],
        accumulate=bool(residual),
        lda=x_stride,
        ldc=out_stride,
        workspace=workspace,
        workspace_bytes=workspace_bytes,
        algorithm=None if algorithm == ANY else algorithm,
        stream=stream,
    )


def reference(
    *, x: Array, weight: Array, bias: Array | None, out: Array, activation: int, residual: int, algorithm: int, **_: Any
) -> None:
    """The product's own reference, which has no use for a workspace."""
    options: dict[str, Any] = {"activation": ACTIVATION_NAMES[activation], "accumulate": bool(residual)}
    gemm_reference(x, weight, out, bias, **options, by_row=algorithm != ANY)


def scratch_bytes(rows: int, n: int, k: int, dtype: str, activation: str) -> int:
    """Return the bytes of workspace that a layer cannot do without."""
    return Gemm.of(rows, n, k, dtype, None, None, None, None, 1.0, activation).scratch_bytes


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    n: int,
    k: int,
    bias: bool = True,
    activation: str = "none",
    residual: bool = False,
    x_pad: int = 0,
    out_pad: int = 0,
    spare: int = 0,
    algorithm: int = ANY,
) -> Inputs:
    """``spare`` is workspace in bytes beyond what the product cannot do without."""
    workspace_bytes = scratch_bytes(rows, n, k, dtype, activation) + spare
    return {
        "x": inputs.normal(rng, (rows, k + x_pad), dtype),
        "weight": inputs.normal(rng, (n, k), dtype, std=k**-0.5),
        "bias": inputs.normal(rng, (n,), dtype) if bias else None,
        "out": inputs.normal(rng, (rows, n + out_pad), dtype, std=2.0),
        "rows": rows,
        "n": n,
        "k": k,
        "x_stride": k + x_pad,
        "out_stride": n + out_pad,
        "activation": ACTIVATION_NAMES.index(activation),
        "residual": int(residual),
        "workspace": np.full(workspace_bytes, 0xA5, dtype=np.uint8) if workspace_bytes else None,
        "workspace_bytes": workspace_bytes,
        "algorithm": algorithm,
    }


CASES: Final = (
    {"rows": 1, "n": 1, "k": 1},
    {"rows": 1, "n": 97, "k": 256, "bias": False},
    {"rows": 7, "n": 33, "k": 17, "x_pad": 5, "out_pad": 3},
    {"rows": 5, "n": 64, "k": 48, "residual": True},
    {"rows": 3, "n": 31, "k": 64, "residual": True, "bias": False, "out_pad": 1},
    {"rows": 70, "n": 256, "k": 1024, "activation": "relu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu"},
    {"rows": 6, "n": 40, "k": 24, "activation": "gelu_tanh"},
    {"rows": 6, "n": 40, "k": 24, "activation": "silu", "out_pad": 8},
    {"rows": 9, "n": 72, "k": 40, "activation": "gelu", "x_pad": 8, "spare": 1 << 20},
    {"rows": 33, "n": 128, "k": 512, "spare": 1 << 20},
    {"rows": 2, "n": 16, "k": 4096},
    {"rows": 3, "n": 5, "k": 257},
    {"rows": 64, "n": 130, "k": 300, "algorithm": 0, "x_pad": 4},
    {"rows": 5, "n": 64, "k": 48, "algorithm": 0, "residual": True},
)

OP: Final = REGISTRY.register(Op(SPEC, reference, make_inputs, CASES, enqueue=enqueue))


def linear(
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
    workspace: int = NULL,
    workspace_bytes: int = 0,
    algorithm: int | None = None,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a dense layer of ``rows`` rows from ``k`` to ``n`` features.

    ``x`` is ``[rows, k]`` and ``out`` is ``[rows, n]``, rows ``x_stride`` and ``out_stride`` elements apart (None:
    contiguous); ``weight`` is ``[n, k]``; ``bias`` is ``[n]``, or NULL for none. With ``residual`` the result is added
    to what ``out`` holds, and no activation may be named. ``workspace`` is device memory of ``workspace_bytes`` bytes,
    at least `scratch_bytes`, that the layer may use until the stream has passed it; its content is then unspecified.
    ``algorithm`` is a fixed choice among the library's, as `gpu_runtime.GpuBackend.gemm` has it; None lets it choose.

    Raises
    ------
    ValueError
        When the activation is unknown or does not go with ``residual``, or the workspace is too small.
    """
    if activation not in ACTIVATION_NAMES:
        raise ValueError(f"linear: activation: expected one of {ACTIVATION_NAMES}, got {activation!r}")
    strides = (k if x_stride is None else x_stride, n if out_stride is None else out_stride)
    fixed = ANY if algorithm is None else algorithm
    options = (ACTIVATION_NAMES.index(activation), int(residual), workspace, workspace_bytes, fixed)
    values = (x, weight, bias or NULL, out, rows, n, k, *strides, *options)
    OP.launch(gpu, dtype, values, stream)
