# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the ops of a fused dense layer share: ``activation(n(x) @ weight^T + bias)``, or that added to ``out``.

``n(x)`` is ``x``, or ``LayerNorm(x)`` rounded to the element type. The last columns may go straight into the KV cache,
as `kv_scatter` would bring them there: column ``c >= kv_from`` of row ``r`` becomes element ``positions[r] * kv_stride
+ kv_offset + c - kv_from`` of the span at ``spans[r]``, and ``out`` has the columns before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.op import DeviceMemory, Inputs, Tolerance, scalar, tensor
from metrale.ops import inputs
from metrale.ops.layer_norm import reference as normalise
from metrale.ops.linear import ACTIVATION_NAMES

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: Final = ("f16", "bf16")
"""Element types of the ops."""

MATRIX: Final = (tensor("weight", "in", "T", "n", "k"), tensor("bias", "in", "T", "n", optional=True))
"""What x is multiplied with, as arguments of the ops."""

WEIGHTS: Final = (
    tensor("gamma", "in", "T", "k", optional=True),
    tensor("beta", "in", "T", "k", optional=True),
    *MATRIX,
)
"""The same with what x is normalised with before."""

X: Final = tensor("x", "in", "T", "rows", "k", row_stride="x_stride")

RESULT: Final = (
    tensor("out", "inout", "T", "rows", "kv_from", row_stride="out_stride", reads_when="residual"),
    tensor("spans", "in", "u64", "rows", optional=True),
    tensor("positions", "in", "i32", "rows", optional=True),
    scalar("rows", "i32"),
    scalar("n", "i32"),
    scalar("k", "i32"),
    scalar("x_stride", "i64"),
    scalar("out_stride", "i64"),
)
"""Where the result of some rows goes, and the sizes. x and this are arguments of the ops of more than one row."""

PLACES: Final = (
    scalar("activation", "i32"),
    scalar("residual", "i32"),
    scalar("kv_from", "i32"),
    scalar("kv_offset", "i64"),
    scalar("kv_stride", "i64"),
)
"""Their last arguments: what becomes of the result, and where it goes."""

OPTIONS: Final = (scalar("eps", "f32"), *PLACES)
"""The last arguments of those that normalise."""

TOLERANCE: Final = Tolerance(f32=2e-6, f16=1.5 * 2**-11, bf16=1.5 * 2**-8)
"""One rounding; and where LayerNorm's result lies between two elements, its last bit may choose the other one."""

MOST_K: Final = 1 << 24
"""Columns of x: what the kernels' numbers hold."""


def check_sizes(op: str, dims: Any, most: dict[str, int]) -> None:
    """Raise ValueError when a size is not what the op is for: from 1 to its most."""
    for name, limit in most.items():
        if not 1 <= dims[name] <= limit:
            raise ValueError(f"{op}: {name}: expected 1 to {limit}, got {dims[name]}")


def check_pairs(op: str, *pairs: tuple[str, object]) -> None:
    """Raise ValueError when some of a few addresses, each with its name, are None and others are not."""
    missing = next((name for name, address in pairs if address is None), None)
    given = next((name for name, address in pairs if address is not None), None)
    if missing is not None and given is not None:
        raise ValueError(f"{op}: {missing}: expected an address, as {given} has one, got NULL")


def check_columns(op: str, n: int, kv_from: int, *, in_place: bool, activation: str, residual: bool) -> None:
    """Raise ValueError when the options do not go together.

    An activation goes with neither ``residual`` nor columns in the KV cache, nor do these two go together.
    """
    if activation not in ACTIVATION_NAMES:
        raise ValueError(f"{op}: activation: expected one of {ACTIVATION_NAMES}, got {activation!r}")
    if residual and activation != "none":
        raise ValueError(f"{op}: activation: expected 'none' together with residual, got {activation!r}")
    if in_place and (residual or activation != "none"):
        got = "residual" if residual else repr(activation)
        raise ValueError(f"{op}: spans: expected neither residual nor an activation with them, got {got}")
    checks.integer(f"{op}: kv_from", kv_from, 0 if in_place else n, n)


def check(
    op: str,
    norm: tuple[tuple[str, int], tuple[str, int]],
    spans: int,
    positions: int,
    n: int,
    kv_from: int,
    activation: str,
    residual: bool,
) -> None:
    """Check a launcher's arguments, in which NULL is 0 or None. ``norm``: what it normalises by, with the names."""
    check_pairs(op, *((name, address or None) for name, address in norm))
    check_pairs(op, ("spans", spans or None), ("positions", positions or None))
    check_columns(op, n, kv_from, in_place=bool(spans), activation=activation, residual=residual)


Multiply = Callable[..., None]
"""Computes a product with its epilogue into an array, given ``activation`` and ``accumulate`` by name."""


def reference(op: str, memory: DeviceMemory, v: dict[str, Any], x: Array, out: Array) -> None:
    """LayerNorm's reference, rounded to the element type, and the product's by rows, which ``x`` and ``out`` have."""
    gamma, beta = v["gamma"], v["beta"]
    check_pairs(op, ("gamma", gamma), ("beta", beta))
    rows, k = len(x), v["weight"].shape[1]
    if gamma is not None:
        plain, x = x, np.empty((rows, k), dtype=x.dtype)
        normalise(x=plain, weight=gamma, bias=beta, out=x, rows=rows, width=k, eps=v["eps"])
    bring(op, memory, v, out, lambda c, **options: gemm_reference(x, v["weight"], c, v["bias"], by_row=True, **options))


def bring(op: str, memory: DeviceMemory, v: dict[str, Any], out: Array, multiply: Multiply) -> None:
    """Let ``multiply`` make the product, ``[rows, n]``, and bring its columns where the options say."""
    spans, positions = v["spans"], v["positions"]
    check_pairs(op, ("spans", spans), ("positions", positions))
    activation, residual = ACTIVATION_NAMES[v["activation"]], bool(v["residual"])
    in_place, kv_from, n = spans is not None, v["kv_from"], len(v["weight"])
    check_columns(op, n, kv_from, in_place=in_place, activation=activation, residual=residual)
    product = np.empty((len(out), n), dtype=out.dtype) if in_place else out
    multiply(product, activation=activation, accumulate=residual)
    if in_place:
        out[...] = product[:, :kv_from]
        where = {"offset": v["kv_offset"], "stride": v["kv_stride"], "dtype": dtypes.name_of(out.dtype)}
        if kv_from < n:
            memory.scatter_rows(spans, positions, product[:, kv_from:], **where)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    n: int,
    k: int,
    norm: bool = False,
    bias: bool = True,
    activation: str = "none",
    residual: bool = False,
    kv: int = 0,
    regular: bool = True,
    x_pad: int = 0,
    out_pad: int = 0,
    std: float = 1.0,
    gain: float = 1.0,
) -> Inputs:
    """Return inputs of an op whose ``x`` and ``out`` have rows; the last ``kv`` columns go into the KV cache.

    ``std`` is the deviation of x, and ``gain`` the mean of gamma.
    """
    width, depth = 3 * kv + 8, 5
    spans = inputs.spans(rng, rows, depth, width, dtype, "inout", regular=regular) if kv else None
    return {
        "x": inputs.normal(rng, (rows, k + x_pad), dtype, mean=std / 2 if norm else 0.0, std=std),
        "gamma": inputs.normal(rng, (k,), dtype, mean=gain, std=0.3) if norm else None,
        "beta": inputs.normal(rng, (k,), dtype, std=0.3) if norm else None,
        "weight": inputs.normal(rng, (n, k), dtype, std=k**-0.5),
        "bias": inputs.normal(rng, (n,), dtype) if bias else None,
        "out": inputs.normal(rng, (rows, n - kv + out_pad), dtype, std=2.0),
        "spans": spans,
        "positions": rng.integers(0, depth, rows).astype(np.int32) if kv else None,
        "rows": rows,
        "n": n,
        "k": k,
        "x_stride": k + x_pad,
        "out_stride": n - kv + out_pad,
        "eps": 1e-5,
        "activation": ACTIVATION_NAMES.index(activation),
        "residual": int(residual),
        "kv_from": n - kv,
        "kv_offset": kv if kv else 0,
        "kv_stride": width if kv else 0,
    }
