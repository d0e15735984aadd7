# SPDX-License-Identifier: MIT OR Apache-2.0
"""The largest logit of each row, and whether the row may be trusted."""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs, row_parts

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="argmax",
    args=(
        tensor("logits", "in", "T", "rows", "vocab", row_stride="stride"),
        tensor("ids", "out", "i32", "rows"),
        tensor("flags", "out", "i32", "rows"),
        *row_parts.ARGS,
        scalar("rows", "i32"),
        scalar("vocab", "i32"),
        scalar("stride", "i64"),
    ),
    tolerance=EXACT,  # comparisons only
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """As `row_parts.plan` has it."""
    return row_parts.plan(SPEC.entry(dtype), dims, dtype, limits, programmatic=True)


def reference(
    *, logits: Array, ids: Array, flags: Array, parts: Array, arrivals: Array, rows: int, vocab: int, stride: int
) -> None:
    """`choose` for all rows. Raises as `row_parts.arrive` does."""
    row_parts.arrive(SPEC.name, arrivals)
    choose(logits, ids, flags)


def choose(logits: Array, ids: Array, flags: Array) -> None:
    """Compare in float32; the lowest index wins a tie, and NaN counts as minus infinity."""
    values = logits.astype(np.float32, copy=False)
    ids[...] = values.argmax(axis=1)  # a NaN, if there is one
    largest = values[np.arange(len(ids)), ids]
    flags[...] = ~(np.isfinite(largest) & np.isfinite(values.min(axis=1)))
    for row in np.flatnonzero(np.isnan(largest)):
        ids[row] = np.where(np.isnan(values[row]), -np.inf, values[row]).argmax()


SPECIAL: Final = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def spoil(rng: np.random.Generator, logits: Array, special: tuple[str, ...]) -> None:
    """Put a value named in `SPECIAL` into row ``i`` for each name: anywhere, at the end (``"last nan"``), or everywhere
    (``"all nan"``)."""
    for row, name in enumerate(special):
        place, _, value = name.rpartition(" ")
        where = {"all": slice(None), "last": -1, "": rng.integers(0, logits.shape[1])}[place]
        logits[row, where] = SPECIAL[value]


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    vocab: int,
    pad: int = 0,
    mean: float = 0.0,
    ties: tuple[int, ...] = (),
    special: tuple[str, ...] = (),
) -> Inputs:
    """``ties`` are columns that share the largest value of every row; ``special`` is as `spoil` takes it."""
    logits = inputs.normal(rng, (rows, vocab + pad), dtype, mean=mean)
    largest = dtypes.NUMPY[dtype].type(mean + 9)
    logits[:, vocab:] = np.inf  # padding must not be looked at
    if ties:
        logits[:, ties] = largest
    else:
        logits[0, 0] = logits[-1, vocab - 1] = largest  # the first and the last column count
    spoil(rng, logits[:, :vocab], special)
    return {
        "logits": logits,
        "ids": inputs.output((rows,), "i32"),
        "flags": inputs.output((rows,), "i32"),
        **row_parts.make_inputs(rng, rows),
        "rows": rows,
        "vocab": vocab,
        "stride": vocab + pad,
    }


CASES: Final = (
    {"rows": 1, "vocab": 1},
    {"rows": 3, "vocab": 97, "pad": 31},
    {"rows": 2, "vocab": 4096},
    {"rows": 4, "vocab": 8240, "ties": (2745, 2747, 8239)},
    {"rows": 8, "vocab": 303, "pad": 17, "special": ("nan", "inf", "-inf", "last nan", "all nan", "all -inf")},
    # rows at odd addresses, a tie in one thread's share of the CUDA kernel, and nothing above 0
    {"rows": 5, "vocab": 40003, "pad": 2, "mean": -30.0, "ties": (32773, 5)},
    {"rows": 2, "vocab": 256206, "pad": 50, "ties": (250000, 150000, 150001)},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def argmax(
    gpu: GpuBackend,
    logits: int,
    ids: int,
    flags: int,
    parts: int,
    arrivals: int,
    *,
    rows: int,
    vocab: int,
    stride: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue ``ids[r] = argmax(logits[r])`` and ``flags[r] = 1`` when the row has a NaN or an infinity, else 0.

    ``logits`` is ``dtype``, ``[rows, vocab]`` with rows ``stride`` elements apart; ``ids`` and ``flags`` are int32
    ``[rows]``. ``parts`` (uint32, ``[rows, 32, 4]``, at a multiple of 16 bytes) is scratch, and ``arrivals`` (uint32,
    ``[rows]``) are zeros at first, and then what earlier launches left there; no other launch may use either until
    this one has ended.
    """
    OP.launch(gpu, dtype, (logits, ids, flags, parts, arrivals, rows, vocab, stride), stream)
