# SPDX-License-Identifier: MIT OR Apache-2.0
"""A row's result has the same bits alone and beside any others, for every op that is a kernel of ours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

import metrale.ops  # noqa: F401  (registers the ops)
from gpu_runtime import AddressTable, GpuBackend, Op
from gpu_runtime.op import REGISTRY
from metrale.ops.beam_candidates import ROWS as BEAM_ROWS
from metrale.ops.beam_layout import GROUP_COLUMNS
from metrale.ops.beam_select import OP as BEAM_SELECT
from metrale.ops.beam_states import KINDS as SEARCHES
from metrale.ops.sample import ROWS as SAMPLE_ROWS
from tests.backends import cuda_only
from tests.ops.harness import Array, Values, run, seed_of

pytestmark = cuda_only

ROWS = 64
CASES: dict[str, tuple[Mapping[str, Any], ...]] = {
    "layer_norm": ({"rows": ROWS, "width": 1024}, {"rows": ROWS, "width": 33}),
    "embed": ({"rows": ROWS, "width": 1024}, {"rows": ROWS, "width": 33}),
    "kv_scatter": ({"rows": ROWS, "width": 512, "pad": 256},),
    "row_gather": ({"rows": ROWS, "width": 1024},),
    "argmax": ({"rows": ROWS, "vocab": 8240, "pad": 16}, {"rows": ROWS, "vocab": 97}),
    "top_k": ({"rows": ROWS, "vocab": 8240, "k": 8, "pad": 16, "special": ()},),
    "sample": (
        {"vocab": 8240, "pad": 16, "kinds": tuple(islice(cycle(SAMPLE_ROWS), ROWS)), "length": 100},
        {"vocab": 97, "kinds": tuple(islice(cycle(SAMPLE_ROWS), ROWS))},
    ),
    "beam_candidates": (
        {"vocab": 8240, "pad": 16, "kinds": tuple(islice(cycle(BEAM_ROWS), ROWS)), "most": 70, "length": 100},
        {"vocab": 97, "kinds": tuple(islice(cycle(BEAM_ROWS), ROWS)), "most": 97},
    ),
    "decode_attention": (
        {"lengths": tuple(1 + (7 * row) % 150 for row in range(ROWS)), "heads": 4, "head_dim": 64, "spread": 5.0},
        {"lengths": tuple(1 + (5 * row) % 70 for row in range(ROWS)), "heads": 2, "head_dim": 24},
        {
            "lengths": tuple(1 + (7 * row) % 50 for row in range(ROWS)),
            "heads": 2,
            "head_dim": 64,
            "beams": tuple(row % 5 for row in range(ROWS)),
        },
    ),
    "attention_weights": (
        {"lengths": tuple(1 + (7 * row) % 150 for row in range(ROWS)), "heads": 4, "head_dim": 64, "longest": 160},
        {"lengths": tuple(1 + (5 * row) % 70 for row in range(ROWS)), "heads": 2, "head_dim": 24},
    ),
    "packed_attention": (
        {"lengths": tuple(1 + (11 * row) % 90 for row in range(ROWS)), "heads": 4, "head_dim": 64, "spread": 5.0},
        {"lengths": tuple(1 + (3 * row) % 40 for row in range(ROWS)), "heads": 2, "head_dim": 24, "pad": 3},
    ),
    "lora_down": (
        {"rows": ROWS, "k": 1024, "ranks": ((16, 8, 0), (5, 16, 1)), "room": 16},
        {"rows": ROWS, "k": 97, "ranks": ((3,), (7,), (1,)), "room": 9, "x_pad": 3},
    ),
    "lora_up": (
        {"rows": ROWS, "width": 1024, "ranks": ((16, 8, 0), (5, 16, 1)), "room": 16},
        {"rows": ROWS, "width": 97, "ranks": ((3,), (7,), (1,)), "room": 9, "activation": "silu"},
    ),
}
SEARCH_CASES: tuple[Mapping[str, Any], ...] = (
    {"kinds": tuple(islice(cycle(SEARCHES), ROWS)), "spare": 3},
    {"kinds": tuple(islice(cycle(SEARCHES), ROWS))[::-1], "levels": True, "capacity": 40},
)
"""Of ``beam_select``, whose rows are whole searches."""
SUBSETS = ([0], [1], [31], [ROWS - 1], [0, 1], list(range(7)), list(range(5, 38)), list(range(ROWS))[::-1])


def test_every_kernel_is_covered(gpu: GpuBackend) -> None:
    assert {*CASES, BEAM_SELECT.spec.name} == {op.spec.name for op in REGISTRY if not op.spec.library}


PARAMETERS = [
    pytest.param(op, case, id=f"{op.spec.name}-{index}")
    for op in REGISTRY
    for index, case in enumerate(CASES.get(op.spec.name, ()))
]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("op", "case"), PARAMETERS)
def test_the_same_bits_in_any_company(gpu: GpuBackend, op: Op, case: Mapping[str, Any], dtype: str) -> None:
    inputs = op.make_inputs(np.random.default_rng(seed_of(op, dtype, case)), dtype, **case)
    pick = sequences_of if op.spec.name == "packed_attention" else rows_of
    whole = results(op, gpu, dtype, inputs)
    for subset in SUBSETS:
        part, where = pick(op, inputs, subset)
        for name, found in results(op, gpu, dtype, part).items():
            expected = whole[name] if where is None else whole[name][where]
            if where is None:  # a pool: only what the rows of the subset wrote
                changed = found.view(np.uint8) != pool_of(inputs).view(np.uint8)
                assert changed.any()
                assert np.array_equal(found.view(np.uint8)[changed], expected.view(np.uint8)[changed]), (name, subset)
            else:
                assert found.tobytes() == expected.tobytes(), (name, subset)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("case", SEARCH_CASES)
def test_a_search_has_the_same_bits_in_any_company(gpu: GpuBackend, case: Mapping[str, Any]) -> None:
    """All that a search has of the tables by slot, and its cells; what the others have stays as it was."""
    inputs: dict[str, Any] = dict(BEAM_SELECT.make_inputs(np.random.default_rng(5), "f32", **case))
    whole = run(BEAM_SELECT, gpu, "f32", inputs)
    first, count = (inputs["counts"][:, GROUP_COLUMNS.index(name)] for name in ("member", "beams"))
    for subset in SUBSETS:
        part = {name: np.ascontiguousarray(inputs[name][subset]) for name in ("counts", "settings", "results")}
        found = run(BEAM_SELECT, gpu, "f32", {**inputs, **part, "groups": len(subset)})
        members = [inputs["members"][first[group] : first[group] + count[group]] for group in subset]
        mine = np.isin(np.arange(inputs["slot_count"]), np.concatenate(members))
        assert found["results"].tolist() == whole["results"][subset].tolist()
        for name in ("running", "history", "ancestry", "logps", "pool", "state"):
            assert found[name][mine].tobytes() == whole[name][mine].tobytes(), (name, subset)
            assert found[name][~mine].tobytes() == inputs[name][~mine].tobytes(), (name, subset)
        cells = inputs["cell_base"] + np.flatnonzero(mine)
        assert found["cells"][cells].tobytes() == whole["cells"][cells].tobytes(), subset
        gpu.sweep_unreleased()


def results(op: Op, gpu: GpuBackend, dtype: str, inputs: Values) -> dict[str, Array]:
    """Return what the op wrote: its outputs, rows that it added to, or the pool that a table leads to."""
    rows = {arg.name for arg in op.spec.args if arg.role == "inout" and arg.shape[0] == "rows"}
    outputs = rows | {arg.name for arg in op.spec.args if arg.role == "out"}
    outputs |= {name for name, value in inputs.items() if isinstance(value, AddressTable) and value.role == "inout"}
    assert outputs
    return {name: array for name, array in run(op, gpu, dtype, inputs).items() if name in outputs}


def pool_of(inputs: Values) -> Array:
    (table,) = (value for value in inputs.values() if isinstance(value, AddressTable))
    return table.pool


def rows_of(op: Op, inputs: Values, rows: list[int]) -> tuple[dict[str, Any], list[int] | None]:
    """Return the inputs of some rows alone, and where in the whole result theirs are (None: in a pool)."""
    part: dict[str, Any] = dict(inputs)
    for arg in op.spec.args:
        value = part[arg.name]
        if value is None or not arg.shape or arg.shape[0] != "rows":
            continue
        if isinstance(value, AddressTable):
            part[arg.name] = AddressTable(value.pool, value.starts[rows], value.role)
        else:
            part[arg.name] = np.ascontiguousarray(value[rows])
    part["rows"] = len(rows)
    written_table = any(isinstance(value, AddressTable) and value.role == "inout" for value in inputs.values())
    return part, None if written_table else rows


def sequences_of(op: Op, inputs: Values, sequences: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs of some packed sequences alone, and where in the whole result their rows are."""
    offsets: Any = inputs["offsets"]
    where = [row for one in sequences for row in range(offsets[one], offsets[one + 1])]
    lengths = np.diff(offsets)[sequences]
    part: dict[str, Any] = dict(inputs)
    for name in ("q", "k", "v", "out"):
        part[name] = np.ascontiguousarray(part[name][where])
    part["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    part |= {"tokens": len(where), "offset_count": len(sequences) + 1, "longest": int(lengths.max())}
    return part, where
