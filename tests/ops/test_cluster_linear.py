# SPDX-License-Identifier: MIT OR Apache-2.0
"""A layer whose blocks divide k is a product; what it refuses; and on a GPU, that every cluster keeps a row's bits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM, PORTABLE_CLUSTER, Limits
from metrale.ops import cluster_linear
from metrale.ops.cluster_linear import COLUMNS, MOST_ROWS, OP, cluster_of, part_units, plan, plans, shared_bytes
from metrale.ops.linear import ACTIVATION_NAMES
from tests.backends import cuda_only
from tests.ops import dense_layers
from tests.ops.dense_layers import DECODER, REFUSED, drawn, layer_of
from tests.ops.harness import upload

LARGE: Final = replace(
    MINIMUM, compute_capability=(9, 0), sm_count=132, max_shared_bytes=227 * 1024, max_cluster=PORTABLE_CLUSTER
)
"""An H200."""

PADS: Final = {False: 16, True: 64}
"""Bytes between rows in shared memory, of the plain entry points and of the chained."""


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("activation", [*ACTIVATION_NAMES, "residual"])
def test_it_is_linear(gpu: GpuBackend, dtype: str, activation: str) -> None:
    dense_layers.check_beside_linear(gpu, OP, cluster_linear, dtype, activation, rows=5, n=40, k=520)


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("kv_from", [0, 8, 23])
def test_in_place_is_a_product_and_a_copy_to_the_bit(gpu: GpuBackend, dtype: str, kv_from: int) -> None:
    dense_layers.check_in_place(gpu, OP, cluster_linear, dtype, kv_from, rows=11, n=24, k=1024)


def test_what_is_refused(gpu: GpuBackend) -> None:
    rows = (f"rows: expected 1 to {MOST_ROWS}, got 65", {"rows": 65})
    dense_layers.check_refusals(gpu, OP, cluster_linear, [*REFUSED, rows], rows=1)


def test_the_launcher_chooses_the_entry_point(gpu: GpuBackend) -> None:
    layer = layer_of(gpu, OP, cluster_linear, "bf16", rows=3, n=8, k=16)
    out = upload(gpu, layer.v["out"])
    with gpu.launch_trace() as trace:
        layer(out)
        layer(out, chained=False)
        layer(out, chained=True)
    plain, chained = OP.spec.entry("bf16"), OP.spec.entry("bf16", "chained")
    assert [record.name for record in trace] == [plain, plain, chained]


@pytest.mark.parametrize("chained", PADS)
@pytest.mark.parametrize("limits", [MINIMUM, LARGE], ids=["minimum", "large"])
@pytest.mark.parametrize(("n", "k"), [*DECODER, (1, 1), (8, 33), (5000, 500), (16, 100_000), (40, 1 << 24)])
def test_every_plan_fits_the_device(limits: Limits, n: int, k: int, chained: bool) -> None:
    """And has room for whole units of all rows, no more of them than a block has of k, and then for the sums."""
    for rows in (1, 16, 17, 64):
        dims, padded = {"rows": rows, "n": n, "k": k, "chained": int(chained)}, -(-rows // 16) * 16
        every = plans(dims, "f16", limits)
        assert list(every) == [size for size in (1, 2, 4, 8) if size <= limits.max_cluster]
        for cluster, how in every.items():
            check_geometry(how.grid, how.block, how.shared_bytes, limits, how.cluster)
            assert how.cluster == cluster
            blocks = how.grid[0] // cluster
            assert blocks * COLUMNS >= n > (blocks - 1) * COLUMNS
            assert how.block == (256, 1, 1)
            room = how.shared_bytes - 16 - 64 * 8 - COLUMNS * 4
            units, rest = divmod(room // (COLUMNS + padded) - PADS[chained], 256)
            assert 1 <= units <= part_units(k, cluster, chained=chained)
            assert rest == 0
            assert room >= padded * (COLUMNS + 8) * 4
            assert how.programmatic
        assert plan(dims, "f16", limits) in every.values()


@pytest.mark.parametrize("limits", [MINIMUM, LARGE], ids=["minimum", "large"])
@pytest.mark.parametrize(("n", "k"), [*DECODER, (40, 17_000)])
def test_rows_decide_the_memory_alone(limits: Limits, n: int, k: int) -> None:
    for chained in (0, 1):
        every = [{"rows": rows, "n": n, "k": k, "chained": chained} for rows in range(1, MOST_ROWS + 1)]
        assert len({replace(plan(dims, "bf16", limits), shared_bytes=0) for dims in every}) == 1


def test_shared_memory() -> None:
    """Counts, places and bias; whole tiles of 16 rows of x, and the weights, with a pad after each row."""
    for chained, pad in PADS.items():
        assert shared_bytes(16, 2, chained=chained) == 16 + 64 * 8 + 128 * 4 + (128 + 16) * (2 * 256 + pad)
        assert shared_bytes(17, 3, chained=chained) == 16 + 64 * 8 + 128 * 4 + (128 + 32) * (3 * 256 + pad)
        long = plans({"rows": 64, "n": 40, "k": 9000, "chained": int(chained)}, "f16", LARGE)
        assert long[8].shared_bytes == shared_bytes(64, 3, chained=chained)  # of 9 or 10: half of it, and half again
        assert shared_bytes(64, 5, chained=chained) > LARGE.max_shared_bytes
        short = plans({"rows": 64, "n": 40, "k": 2049, "chained": int(chained)}, "f16", LARGE)
        assert short[8].shared_bytes == shared_bytes(64, 4 if chained else 3, chained=chained)


@pytest.mark.parametrize(
    ("k", "cluster", "plain", "chained"),
    [
        *((1, 8, 1, 1), (1024, 4, 2, 2), (1025, 4, 3, 3), (1300, 8, 2, 2), (128, 1, 1, 1)),
        *((4096, 8, 4, 4), (8192, 4, 16, 16), (9000, 8, 9, 10), (3000, 2, 12, 12), (2049, 8, 3, 4)),
    ],
)
def test_how_much_of_k_a_block_has(k: int, cluster: int, plain: int, chained: int) -> None:
    assert [part_units(k, cluster, chained=kind) for kind in (False, True)] == [plain, chained]


def test_the_kernel_counts_alike() -> None:
    assert OP.source is not None
    numbers = dict(re.findall(r"constexpr int (\w+) = (\d+);", OP.source.read_text(encoding="utf-8")))
    wanted = {"WARPS": 8, "MOST_ROWS": MOST_ROWS, "ROWS_AT_ONCE": 16, "MOST_RANKS": PORTABLE_CLUSTER}
    wanted |= {"PAD_BYTES": PADS[False], "CHAINED_PAD_BYTES": PADS[True]}
    found = {name: int(value) for name, value in numbers.items()}
    assert {name: found[name] for name in wanted} == wanted
    assert found["WARPS"] // found["ROW_WARPS"] * found["COLS"] * 8 == COLUMNS


def test_the_plans_of_a_decoder() -> None:
    chosen = {
        sizes: {
            plan({"rows": 9, "n": sizes[0], "k": sizes[1], "chained": kind}, "bf16", LARGE).cluster for kind in (0, 1)
        }
        for sizes in DECODER
    }
    assert {sizes: cluster for sizes, (cluster,) in chosen.items()} == {
        (3072, 1024): 4,
        (1024, 1024): 8,
        (4096, 1024): 4,
        (1024, 4096): 8,
        (6144, 2048): 2,
        (2048, 2048): 8,
        (8192, 2048): 2,
        (2048, 8192): 8,
    }


@pytest.mark.parametrize(
    ("n", "k", "cluster"),
    [
        *((40, 128, 1), (40, 129, 2), (40, 384, 2), (40, 385, 4), (40, 896, 4), (40, 897, 8), (40, 1 << 24, 8)),
        *((2048, 4096, 8), (2049, 4096, 4), (4224, 4096, 4), (4225, 4096, 2), (8449, 4096, 1), (256_256, 4096, 1)),
    ],
)
def test_the_largest_cluster_of_which_all_run_at_once(n: int, k: int, cluster: int) -> None:
    """And whose blocks have a chain of k each; or the largest that there may be."""
    for most in (1, 2, 4, 8):
        limits = replace(LARGE, max_cluster=most)
        assert cluster_of(n, k, limits) == min(most, cluster)
        for chained in (0, 1):
            dims = {"rows": 9, "n": n, "k": k, "chained": chained}
            assert plan(dims, "bf16", limits) == plans(dims, "bf16", LARGE)[min(most, cluster)]


# on a GPU: every plan

_SIZES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("f16", {"n": 41, "k": 320, "x_pad": 8}),
    ("bf16", {"n": 24, "k": 1024}),
    ("bf16", {"n": 135, "k": 328, "residual": True}),  # a last step that is not whole
    ("f16", {"n": 17, "k": 77, "x_pad": 3}),  # element by element
    ("f16", {"n": 40, "k": 2048, "activation": "relu"}),
    ("bf16", {"n": 100, "k": 1304, "out_pad": 3}),  # in the largest clusters, blocks without a column of x
    ("f16", {"n": 16, "k": 17_000, "residual": True}),  # more of k than there is room for
    ("bf16", {"n": 16, "k": 17_001}),
]
SIZES: Final = [(dtype, {**sizes, "chained": chained}) for chained in PADS for dtype, sizes in _SIZES]


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_every_plan_is_right_and_keeps_a_rows_bits(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    dense_layers.check_rows(gpu, OP, plans, MOST_ROWS, dtype, sizes)


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_a_row_that_is_not_sound_does_not_touch_others(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    dense_layers.check_bad_rows(gpu, OP, plans, dtype, sizes)


@cuda_only
@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("k", [320, 2048, 17_000])
@pytest.mark.parametrize("chained", PADS)
def test_alignment_does_not_change_bits(gpu: GpuBackend, dtype: str, k: int, chained: bool) -> None:
    dense_layers.check_odd_rows(gpu, OP, plans, dtype, n=24, k=k, chained=chained)
    values = drawn(OP, dtype, rows=19, n=24, k=k, residual=True, chained=chained)
    for way in dense_layers.ways(OP, plans, gpu, dtype, values):
        dense_layers.check_moved(gpu, way.op, dtype, values)


@cuda_only
@pytest.mark.parametrize("d", [1024, 2048])
@pytest.mark.parametrize("chained", PADS)
def test_a_chain_of_layers_that_start_early_is_in_order(gpu: GpuBackend, d: int, chained: bool) -> None:
    dense_layers.check_chain(gpu, OP, partial(cluster_linear, chained=chained), "bf16", d, rows=8)
