# SPDX-License-Identifier: MIT OR Apache-2.0
"""The next id of each row, of whose largest logit all parts have been found by `head_linear`.

It is what `sample` with ``greedy`` chooses where no log-probability is wanted, and goes to the same places; but nobody
reads a logit.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, REGISTRY, Arg, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs, row_parts
from metrale.ops.argmax import spoil
from metrale.ops.processing import in_range
from metrale.ops.sample import COUNT_COLUMNS, KEEP, NOT_FINITE, NOTHING_LEFT, keep

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="join_maxima",
    args=(
        Arg("maxima", "in", "u32", ("rows", "blocks", 4), align=16),
        tensor("counts", "in", "i32", "rows", len(COUNT_COLUMNS)),
        tensor("history", "inout", "i32", "slot_count", "capacity"),
        tensor("cells", "inout", "i32", "cell_count"),
        tensor("ids", "out", "i32", "rows"),
        tensor("logprobs", "out", "f32", "rows"),
        tensor("flags", "out", "i32", "rows"),
        scalar("rows", "i32"),
        scalar("blocks", "i32"),
        scalar("slot_count", "i32"),
        scalar("capacity", "i32"),
        scalar("cell_count", "i32"),
    ),
    tolerance=EXACT,  # comparisons only
    dtypes=("f32",),  # whatever the logits are
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """A warp for each row."""
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size, 1, 1))


def reference(
    *,
    maxima: Array,
    counts: Array,
    history: Array,
    cells: Array,
    ids: Array,
    logprobs: Array,
    flags: Array,
    rows: int,
    blocks: int,
    slot_count: int,
    capacity: int,
    cell_count: int,
) -> None:
    """Compare keys: a value and a column as one number. What is out of range is an error, as in `sample`."""
    column = dict(zip(COUNT_COLUMNS, counts.T, strict=True))
    slots = column["slot"][column["mode"] & KEEP != 0]
    for name, values, low, after in (
        ("slot", slots, 0, slot_count),
        ("length", column["length"], 0, 1 << 31),
        ("cell", column["cell"], -1, cell_count),
    ):
        in_range(SPEC.name, name, values, low, after)
    words = maxima.astype(np.uint64)
    best = (words[:, :, 1] << np.uint64(32) | words[:, :, 0]).max(axis=1)
    forced, nothing = column["forced"], best == 0
    ids[...] = np.where(forced >= 0, forced, np.where(nothing, 0, ~best & np.uint64(0xFFFFFFFF)))
    flags[...] = np.where(maxima[:, :, 2].any(axis=1), NOT_FINITE, 0) | np.where(
        nothing & (forced < 0), NOTHING_LEFT, 0
    )
    logprobs.fill(0)
    keep(counts, ids, history, cells)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    rows: int,
    blocks: int,
    columns: int = 200,
    levels: int = 0,
    special: tuple[str, ...] = (),
    capacity: int = 20,
) -> Inputs:
    """Parts of rows of ``columns`` logits, `head_linear`'s tile in each block's turn. ``levels`` and ``special`` are as
    for `sample`."""
    logits = inputs.normal(rng, (rows, columns), "f32", std=2.0)
    if levels:
        logits[...] = rng.integers(0, levels, logits.shape)
    spoil(rng, logits, special)
    block_of = np.arange(columns) // 16 % blocks
    parts = [
        row_parts.found(logits[:, block_of == block], np.flatnonzero(block_of == block)) for block in range(blocks)
    ]
    counts = np.full((rows, len(COUNT_COLUMNS)), -1, np.int32)
    counts[:, 0], counts[:, 1], counts[:, 4] = rng.permutation(rows + 1)[:rows], capacity - 1, 0
    counts[1::2, 4] = KEEP  # one of them has no room for more
    counts[3::4, 1] = capacity
    counts[:, 7] = rng.permutation(rows + 2)[:rows]
    counts[::5, 7] = -1
    counts[2::3, 8] = rng.integers(0, columns, len(counts[2::3]))
    counts[2:3, 8] = 0  # the first id may be forced as well
    return {
        "maxima": np.stack(parts, axis=1),
        "counts": counts,
        "history": rng.integers(0, columns, (rows + 1, capacity)).astype(np.int32),
        "cells": inputs.output((rows + 2,), "i32"),
        "ids": inputs.output((rows,), "i32"),
        "logprobs": inputs.output((rows,), "f32"),
        "flags": inputs.output((rows,), "i32"),
        "rows": rows,
        "blocks": blocks,
        "slot_count": rows + 1,
        "capacity": capacity,
        "cell_count": rows + 2,
    }


CASES: Final = (
    {"rows": 1, "blocks": 1},
    {"rows": 4, "blocks": 3, "levels": 2},
    {"rows": 9, "blocks": 33, "columns": 900, "special": inputs.SPECIALS},
    {"rows": 64, "blocks": 132, "columns": 4000, "special": ("inf",), "levels": 9},
    {"rows": 8, "blocks": 40, "special": ("all nan", "all -inf", "-inf"), "capacity": 1},  # blocks without a column
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def join_maxima(
    gpu: GpuBackend,
    maxima: int,
    counts: int,
    history: int,
    cells: int,
    ids: int,
    logprobs: int,
    flags: int,
    *,
    rows: int,
    blocks: int,
    slot_count: int,
    capacity: int,
    cell_count: int,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the choice of an id for each of ``rows`` rows: the one that is forced, or that of the largest logit.

    ``maxima`` is uint32 ``[rows, blocks, 4]``, as `head_linear` leaves it. All else is as for `sample`: ``counts``, of
    which the slot, the length, `KEEP`, the cell and the forced id are looked at; and ``history``, ``cells``, ``ids``,
    ``logprobs`` (which become 0) and ``flags``, where results go.
    """
    outputs = (history, cells, ids, logprobs, flags)
    OP.launch(gpu, "f32", (maxima, counts, *outputs, rows, blocks, slot_count, capacity, cell_count), stream)
