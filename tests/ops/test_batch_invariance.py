# SPDX-License-Identifier: MIT OR Apache-2.0
"""A row's result has the same bits alone and beside any others, for every op that is a kernel of ours.

And for its reference, which is what the host computes; there, fewer neighbours are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

from gpu_runtime import AddressTable, GpuBackend, Op, dtypes
from gpu_runtime.op import REGISTRY
from metrale.ops import gemv
from metrale.ops.beam_candidates import ROWS as BEAM_ROWS
from metrale.ops.beam_layout import GROUP_COLUMNS
from metrale.ops.beam_select import OP as BEAM_SELECT
from metrale.ops.beam_states import KINDS as SEARCHES
from metrale.ops.gemv import OP as GEMV
from metrale.ops.sample import ROWS as SAMPLE_ROWS
from tests.ops.harness import Array, Values, download, run, seed_of, upload

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
        {  # rows of several blocks, the fewer rows the more
            "vocab": 40003,
            "kinds": tuple(islice(cycle(("score", "greedy", "forced")), ROWS)),
            "adjust": 0,
            "greedy": 1,
        },
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
        {  # enough pairs for one warp each, where all rows are there
            "lengths": tuple(1 + (7 * row) % 90 for row in range(ROWS)),
            "heads": 33,
            "head_dim": 64,
            "fresh": 1,
        },
    ),
    "thin_linear": (
        {"rows": ROWS, "n": 3072, "k": 1024, "norm": True, "kv": 2048},
        {"rows": ROWS, "n": 97, "k": 2048, "residual": True, "x_pad": 8},
        {"rows": ROWS, "n": 40, "k": 4096, "out_pad": 3},
        {"rows": ROWS, "n": 24, "k": 8192, "residual": True},
        {"rows": ROWS, "n": 33, "k": 77, "norm": True, "x_pad": 3, "activation": "relu"},
    ),
    "cluster_linear": (
        {"rows": ROWS, "n": 3072, "k": 1024, "kv": 2048, "chained": True},
        {"rows": ROWS, "n": 97, "k": 2048, "residual": True, "x_pad": 8},
        {"rows": ROWS, "n": 40, "k": 17_000, "out_pad": 3, "chained": True},
        {"rows": ROWS, "n": 33, "k": 77, "x_pad": 3, "activation": "relu"},
    ),
    "head_linear": (
        {"rows": ROWS, "n": 700, "k": 1024, "spare": 30, "maxima": True},
        {"rows": ROWS, "n": 97, "k": 520, "x_pad": 8},
        {"rows": ROWS, "n": 33, "k": 77, "x_pad": 3, "out_pad": 1, "maxima": True},
    ),
    "join_maxima": ({"rows": ROWS, "blocks": 40, "columns": 900, "levels": 5},),
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


def subsets_on(gpu: GpuBackend) -> tuple[list[int], ...]:
    return SUBSETS if gpu.kind() == "cuda" else SUBSETS[2::4]


def test_every_kernel_is_covered() -> None:
    assert {*CASES, BEAM_SELECT.spec.name, GEMV.spec.name} == {op.spec.name for op in REGISTRY if not op.spec.library}


PARAMETERS = [
    pytest.param(op, case, dtype, id=f"{op.spec.name}-{index}-{dtype}")
    for op in REGISTRY
    for index, case in enumerate(CASES.get(op.spec.name, ()))
    for dtype in op.spec.dtypes
]


@pytest.mark.parametrize(("op", "case", "dtype"), PARAMETERS)
def test_the_same_bits_in_any_company(gpu: GpuBackend, op: Op, case: Mapping[str, Any], dtype: str) -> None:
    inputs = op.make_inputs(np.random.default_rng(seed_of(op, dtype, case)), dtype, **case)
    pick = sequences_of if op.spec.name == "packed_attention" else rows_of
    whole = results(op, gpu, dtype, inputs)
    for subset in subsets_on(gpu):
        part, where = pick(op, inputs, subset)
        for name, found in results(op, gpu, dtype, part).items():
            before = inputs[name]
            if isinstance(before, AddressTable):  # a pool: only what the rows of the subset wrote
                changed = found.view(np.uint8) != before.pool.view(np.uint8)
                assert changed.any()
                assert np.array_equal(found.view(np.uint8)[changed], whole[name].view(np.uint8)[changed]), subset
            else:
                assert found.tobytes() == whole[name][where].tobytes(), (name, subset)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("case", SEARCH_CASES)
def test_a_search_has_the_same_bits_in_any_company(gpu: GpuBackend, case: Mapping[str, Any]) -> None:
    """All that a search has of the tables by slot, and its cells; what the others have stays as it was."""
    inputs: dict[str, Any] = dict(BEAM_SELECT.make_inputs(np.random.default_rng(5), "f32", **case))
    whole = run(BEAM_SELECT, gpu, "f32", inputs)
    first, count = (inputs["counts"][:, GROUP_COLUMNS.index(name)] for name in ("member", "beams"))
    for subset in subsets_on(gpu):
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


@pytest.mark.parametrize("dtype", GEMV.spec.dtypes)
def test_one_row_has_the_same_bits_wherever_it_lies(gpu: GpuBackend, dtype: str) -> None:
    """`gemv` has no rows beside its own: the rows of a matrix, which begin at any element, by one launch each."""
    n, k = 40, 1031
    inputs: Any = GEMV.make_inputs(np.random.default_rng(3), dtype, n=n, k=k, norm=True)
    matrix = np.random.default_rng(4).normal(size=(ROWS, k)).astype(dtypes.NUMPY[dtype])
    weight, bias, gamma, sums = (upload(gpu, inputs[name]) for name in ("weight", "bias", "gamma", "sums"))
    sizes: Any = {"n": n, "k": k, "dtype": dtype, "gamma": gamma, "sums": sums, "eps": inputs["eps"]}
    written = np.zeros((ROWS, n), matrix.dtype)
    x, out = upload(gpu, matrix), upload(gpu, written)
    for row in range(ROWS):
        gemv(gpu, int(x) + row * matrix[0].nbytes, weight, bias, int(out) + row * written[0].nbytes, **sizes)
    gpu.synchronize()
    together = download(gpu, out, written)
    for row in range(ROWS):
        alone = run(GEMV, gpu, dtype, {**inputs, "x": matrix[row]})["out"]
        assert alone.tobytes() == together[row].tobytes(), row


def results(op: Op, gpu: GpuBackend, dtype: str, inputs: Values) -> dict[str, Array]:
    """Return what the op wrote: its outputs, rows that it added to, or the pool that a table leads to."""
    rows = {arg.name for arg in op.spec.args if arg.role == "inout" and arg.shape[0] == "rows"}
    outputs = rows | {arg.name for arg in op.spec.args if arg.role == "out"}
    outputs |= {name for name, value in inputs.items() if isinstance(value, AddressTable) and value.role == "inout"}
    assert outputs
    return {name: array for name, array in run(op, gpu, dtype, inputs).items() if name in outputs}


def rows_of(op: Op, inputs: Values, rows: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs of some rows alone, and where in the whole result theirs are."""
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
    return part, rows


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
