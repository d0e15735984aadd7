# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows that several blocks read: how many, and that the results have the same bits whatever their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, Op
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import MINIMUM
from metrale.ops import row_parts
from metrale.ops.argmax import OP as ARGMAX
from metrale.ops.row_parts import PARTS
from metrale.ops.sample import OP as SAMPLE
from tests.backends import host_only
from tests.ops.harness import Launched, run, upload

H200 = replace(MINIMUM, sm_count=132)
ARGMAX_DIMS = {"vocab": 256206, "stride": 256256}
SAMPLE_DIMS = {**ARGMAX_DIMS, "words": 8007, "adjust": 0, "greedy": 1}

OPTIONS: dict[str, Any] = {"pad": 1, "kinds": ("forced", "greedy", "score"), "special": ("nan",), "adjust": 0}
CASES = [
    (ARGMAX, {"rows": 3, "vocab": 70000, "ties": (69999, 4100), "special": ("nan", "last inf")}),
    (ARGMAX, {"rows": 2, "vocab": 8191, "pad": 2, "mean": -30.0}),
    (ARGMAX, {"rows": 3, "vocab": 3, "special": ("all nan", "all -inf")}),
    (SAMPLE, {"vocab": 140007, "greedy": 1, **OPTIONS}),
    (SAMPLE, {"vocab": 3001, "levels": 2, "greedy": 1, **OPTIONS}),
]


@pytest.mark.parametrize(("op", "dims"), [(ARGMAX, ARGMAX_DIMS), (SAMPLE, SAMPLE_DIMS)])
@pytest.mark.parametrize(
    ("rows", "parts"),
    [(0, 1), (1, 32), (33, 32), (34, 16), (64, 16), (66, 16), (256, 4), (264, 4), (1056, 1), (5000, 1)],
)
def test_as_many_blocks_as_run_at_once_twice_over(op: Op, dims: Mapping[str, int], rows: int, parts: int) -> None:
    assert op.plan is not None
    how = op.plan({**dims, "rows": rows}, "f16", H200)
    assert (how.grid, how.block) == ((rows * parts, 1, 1), (row_parts.THREADS, 1, 1))
    assert how.programmatic is (op is ARGMAX), "an upload stands between a step and its sample"
    assert (how.entry, how.shared_bytes) == (op.spec.entry("f16", *op.spec.variants), 0)


@pytest.mark.parametrize(
    ("vocab", "dtype", "parts"),
    [(1, "f16", 1), (8192, "f16", 1), (8193, "f16", 2), (40000, "bf16", 4), (40000, "f32", 8), (1 << 20, "f32", 32)],
)
def test_a_block_has_something_for_each_thread_to_read(vocab: int, dtype: str, parts: int) -> None:
    assert ARGMAX.plan is not None
    assert ARGMAX.plan({"rows": 1, "vocab": vocab, "stride": vocab}, dtype, H200).grid == (parts, 1, 1)


@pytest.mark.parametrize(("op", "case"), CASES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_same_bits_however_many_blocks_a_row_has(
    gpu: GpuBackend, op: Op, case: Mapping[str, Any], dtype: str
) -> None:
    values = op.make_inputs(np.random.default_rng(7), dtype, **case)
    plan = op.plan
    assert plan is not None
    usual = plan(op.spec.dims(list(values.values())), dtype, gpu.limits())
    first: dict[str, Any] | None = None
    for how in row_parts.plans(usual.entry, {"rows": int(values["rows"])}, usual.programmatic).values():  # type: ignore[arg-type]
        found = Launched(op, gpu, dtype, how).all(values)
        first = first or found
        assert all(found[name].tobytes() == first[name].tobytes() for name in found if name != "parts"), how.grid


def test_one_launch_after_the_other_uses_the_same_memory(gpu: GpuBackend) -> None:
    """Also with other numbers of rows and blocks: what is left of one launch is in no other's way."""
    values: dict[str, Any] = dict(ARGMAX.make_inputs(np.random.default_rng(8), "f16", rows=5, vocab=40000))
    pointers = [upload(gpu, values[arg.name]) for arg in ARGMAX.spec.args if arg.is_pointer]
    expected = run(ARGMAX, gpu, "f16", values)["ids"]
    for rows, count in ((5, 4), (1, 32), (5, 1), (3, 2), (5, 32)):
        how = row_parts.plans(ARGMAX.spec.entry("f16"), {"rows": rows}, programmatic=True)[count]
        replace(ARGMAX, plan=lambda *_, how=how: how).launch(gpu, "f16", (*pointers, rows, 40000, 40000))
    gpu.synchronize()
    ids, arrivals = np.empty(5, np.int32), np.empty(5, np.uint32)
    gpu.copy_d2h(pointers[1], ids)
    gpu.copy_d2h(pointers[4], arrivals)
    assert ids.tolist() == expected.tolist()
    assert (arrivals - values["arrivals"]).tolist() == [PARTS * n for n in (5, 4, 4, 3, 3)]


@host_only
def test_arrivals_that_were_not_zero_at_first_are_refused(gpu: GpuBackend) -> None:
    values: dict[str, Any] = dict(ARGMAX.make_inputs(np.random.default_rng(0), "f32", rows=2, vocab=9))
    values["arrivals"][1] = PARTS + 1
    with pytest.raises(InvalidPointer, match="argmax: arrivals: expected multiples of 32, got 33"):
        run(ARGMAX, gpu, "f32", values)
