# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chains: how k is cut; and on a GPU, that kernels which divide it in their own ways give a row the same bits."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.limits import MINIMUM
from metrale.ops.chains import MOST_CHAINS, UNIT, chain_units, chains_of
from metrale.ops.cluster_linear import OP as CLUSTER
from metrale.ops.cluster_linear import cluster_of, part_chains
from metrale.ops.layer_norm import OP as LAYER_NORM
from metrale.ops.thin_linear import MOST_ROWS, plans
from metrale.ops.thin_linear import OP as THIN
from tests.backends import cuda_only
from tests.ops.dense_layers import DECODER, drawn, ways
from tests.ops.harness import Array, run


@pytest.mark.parametrize(
    ("k", "units", "chains"),
    [
        *((1, 1, 1), (128, 1, 1), (129, 1, 2), (1024, 1, 8), (1025, 1, 9), (2048, 1, 16), (2049, 2, 9)),
        *((4096, 2, 16), (4097, 3, 11), (8192, 4, 16), (9000, 5, 15), (1 << 24, 8192, 16)),
    ],
)
def test_how_k_is_cut(k: int, units: int, chains: int) -> None:
    assert (chain_units(k), chains_of(k)) == (units, chains)


@pytest.mark.parametrize(
    ("k", "cluster", "chains"), [(1, 8, 1), (1024, 1, 8), (1024, 4, 2), (1025, 4, 3), (1300, 8, 2), (4096, 8, 2)]
)
def test_how_many_a_block_of_a_cluster_has(k: int, cluster: int, chains: int) -> None:
    assert part_chains(k, cluster) == chains


def test_the_kernels_count_alike() -> None:
    assert THIN.source is not None
    header = THIN.source.parent / "common" / "chains.cuh"
    numbers = dict(re.findall(r"constexpr int (\w+) = (\d+);", header.read_text(encoding="utf-8")))
    assert (int(numbers["UNIT"]), int(numbers["MOST_CHAINS"])) == (UNIT, MOST_CHAINS)


@pytest.mark.parametrize(("width", "threads"), [(1, 32), (257, 64), (1024, 128), (1025, 160), (2048, 256), (9001, 256)])
def test_layer_norm_has_sixteen_threads_for_a_chain(width: int, threads: int) -> None:
    assert LAYER_NORM.plan is not None
    for dtype in LAYER_NORM.spec.dtypes:
        assert LAYER_NORM.plan({"rows": 3, "width": width}, dtype, MINIMUM).block == (threads, 1, 1)


# on a GPU: bits

SIZES: Final[list[dict[str, Any]]] = [
    *({"n": n, "k": k, "norm": n >= k, "residual": n < k} for n, k in DECODER),
    {"n": 1024, "k": 1024, "residual": True},
    {"n": 2048, "k": 2048, "residual": True},
    {"n": 200, "k": 328, "norm": True, "residual": True},
    {"n": 41, "k": 77, "norm": True, "activation": "gelu"},  # element by element
    {"n": 135, "k": 1304, "norm": True},  # in the largest clusters, blocks without a column of x
    {"n": 24, "k": 3000, "norm": True},  # chains of two units, the last one short
    {"n": 40, "k": 9000, "residual": True},  # of five, of which a cluster's block has not enough room
    {"n": 16, "k": 8192, "norm": True},
]


def thin_then_wide(gpu: GpuBackend, dtype: str, values: dict[str, Any]) -> tuple[Array, Array]:
    """Return what `thin_linear`, and `layer_norm` and a chained `cluster_linear`, make of the same rows."""
    part = part_chains(values["k"], cluster_of(values["n"], values["k"], gpu.limits()))
    thin = run(THIN, gpu, dtype, {**values, "part": part})["out"]
    x = values["x"]
    if values["gamma"] is not None:
        norm = {"x": x, "weight": values["gamma"], "bias": values["beta"], "out": np.zeros_like(x)}
        sizes = {"rows": values["rows"], "width": values["k"], "eps": values["eps"]}
        x = run(LAYER_NORM, gpu, dtype, {**norm, **sizes})["out"]
    wide = {**values, "x": x, "chained": 1}
    return thin, run(CLUSTER, gpu, dtype, {arg.name: wide[arg.name] for arg in CLUSTER.spec.args})["out"]


@cuda_only
@pytest.mark.parametrize("dtype", THIN.spec.dtypes)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['n']}x{sizes['k']}")
def test_a_row_has_the_same_bits_by_either_kernel(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    """Among any number of rows; and by every plan of `thin_linear`."""
    most = drawn(THIN, dtype, rows=MOST_ROWS, **sizes)
    rows = ("x", "out")
    expected, wide = thin_then_wide(gpu, dtype, most)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert wide.tobytes() == expected.tobytes()
    for count in (1, 2, 5, 8, 9, 17, 33):
        few = {**most, "rows": count} | {name: most[name][:count] for name in rows}
        for found in thin_then_wide(gpu, dtype, few):
            assert found.tobytes() == expected[:count].tobytes(), count
    most["part"] = part_chains(most["k"], cluster_of(most["n"], most["k"], gpu.limits()))
    for way in ways(THIN, plans, gpu, dtype, most):
        assert run(way.op, gpu, dtype, most)["out"].tobytes() == expected.tobytes()
