# SPDX-License-Identifier: MIT OR Apache-2.0
"""The k largest logits of each row, in order, and what turns them into log-probabilities: ``value - lse``."""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, Tolerance, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs
from metrale.ops.argmax import spoil

Array = np.ndarray[Any, np.dtype[Any]]

MAX_K: Final = 64
"""Most elements of a row that can be asked for."""

SPEC: Final = OpSpec(
    name="top_k",
    args=(
        tensor("logits", "in", "T", "rows", "vocab", row_stride="stride"),
        tensor("values", "out", "f32", "rows", "k"),
        tensor("ids", "out", "i32", "rows", "k"),
        tensor("lse", "out", "f32", "rows"),
        tensor("flags", "out", "i32", "rows"),
        scalar("rows", "i32"),
        scalar("vocab", "i32"),
        scalar("k", "i32"),
        scalar("stride", "i64"),
    ),
    # Values, ids and flags are exact, and at 1e-6 of 256,205 one id is not taken for the next. The sum of `lse` is one
    # of float32 for every element type: its largest error over the edge shapes is 6e-8 of it.
    tolerance=Tolerance(f32=1e-6, f16=1e-6, bf16=1e-6),
)

THREADS: Final = 1024


def check_k(k: int, vocab: int) -> None:
    """Raise ValueError when ``k`` is not from 1 to `MAX_K`, or a row has fewer elements."""
    if not 1 <= k <= MAX_K:
        raise ValueError(f"top_k: k: expected 1 to {MAX_K}, got {k}")
    if k > vocab:
        raise ValueError(f"top_k: k: expected at most the {vocab} elements of a row, got {k}")


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block of 1,024 threads a row."""
    check_k(dims["k"], dims["vocab"])
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (THREADS, 1, 1))


def reference(
    *,
    logits: Array,
    values: Array,
    ids: Array,
    lse: Array,
    flags: Array,
    rows: int,
    vocab: int,
    k: int,
    stride: int,
) -> None:
    """Compare and sum in float32; the lowest index wins a tie, and NaN counts as minus infinity."""
    check_k(k, vocab)
    given = logits.astype(np.float32)
    flags[...] = ~np.isfinite(given).all(axis=1)
    given[np.isnan(given)] = -np.inf
    for row in range(rows):
        ids[row] = largest(given[row], k)
        values[row] = given[row, ids[row]]
    shift = np.where(np.isfinite(values[:, 0]), values[:, 0], np.float32(0))
    given -= shift[:, None]
    lse[...] = np.log(np.exp(given, out=given).sum(axis=1)) + shift


def largest(row: Array, k: int) -> Array:
    """Return where the ``k`` largest values of a row without NaN are, the largest first, the lowest index of a tie."""
    bound = np.partition(row, row.size - k)[row.size - k]
    candidates = np.flatnonzero(row >= bound)
    return np.asarray(candidates[np.argsort(-row[candidates], kind="stable")[:k]])


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    vocab: int,
    k: int,
    pad: int = 0,
    levels: int = 0,
    special: tuple[str, ...],
) -> Inputs:
    """``levels`` leaves so many different values, so that most are tied; ``special`` is as `spoil` takes it."""
    logits = inputs.normal(rng, (rows, vocab + pad), dtype, std=2)
    if levels:
        logits[:, :vocab] = rng.integers(-levels, 0, (rows, vocab))
    logits[-1, vocab - 1] = 9  # the last column counts
    spoil(rng, logits[:, :vocab], special)
    logits[:, vocab:] = np.inf  # padding must not be looked at
    return {
        "logits": logits,
        "values": inputs.output((rows, k), "f32"),
        "ids": inputs.output((rows, k), "i32"),
        "lse": inputs.output((rows,), "f32"),
        "flags": inputs.output((rows,), "i32"),
        "rows": rows,
        "vocab": vocab,
        "k": k,
        "stride": vocab + pad,
    }


# Each has a row with a flag: an all-zero result must not pass for the flags either.
CASES: Final = (
    {"rows": 3, "vocab": 97, "k": 5, "pad": 31, "special": ("nan",)},
    {"rows": 3, "vocab": 2, "k": 2, "special": ("-inf", "nan")},
    {"rows": 3, "vocab": 8240, "k": 64, "levels": 3, "special": ("inf",)},  # ties at the last place
    {"rows": 8, "vocab": 303, "k": 8, "pad": 17, "special": ("nan", "inf", "-inf", "last nan", "all nan", "all -inf")},
    {"rows": 2, "vocab": 2000, "k": 64, "special": ("nan",)},  # too few holders for a bound: the row is read k times
    {"rows": 4, "vocab": 20011, "k": 16, "pad": 2, "special": ("-inf",)},  # rows at odd addresses
    {"rows": 2, "vocab": 256206, "k": 8, "pad": 50, "special": ("-inf",)},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def top_k(
    gpu: GpuBackend,
    logits: int,
    values: int,
    ids: int,
    lse: int,
    flags: int,
    *,
    rows: int,
    vocab: int,
    k: int,
    stride: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the choice of the ``k`` largest logits of each of ``rows`` rows; the lowest id wins a tie.

    ``logits`` is ``dtype``, ``[rows, vocab]`` with rows ``stride`` elements apart. ``values`` (float32) and ``ids``
    (int32) are ``[rows, k]``, from the largest down; NaN counts as minus infinity. ``lse`` is float32 ``[rows]``, the
    logarithm of the sum of ``exp`` over the row, and ``flags`` int32 ``[rows]``, 1 when the row has a NaN or an
    infinity, else 0.

    Raises
    ------
    ValueError
        When ``k`` is not from 1 to `MAX_K`, or greater than ``vocab``.
    """
    OP.launch(gpu, dtype, (logits, values, ids, lse, flags, rows, vocab, k, stride), stream)
