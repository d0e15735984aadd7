# SPDX-License-Identifier: MIT OR Apache-2.0
"""A thin layer is LayerNorm and a product; what it refuses; and on a GPU, that every launch plan keeps a row's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from metrale.ops import thin_linear
from metrale.ops.chains import chain_units, chains_of
from metrale.ops.linear import ACTIVATION_NAMES
from metrale.ops.thin_linear import MOST_ROWS, OP, VARIANTS, plan, plans, shared_bytes
from tests.backends import cuda_only
from tests.ops import dense_layers
from tests.ops.dense_layers import DECODER, REFUSED, refused_norms


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("activation", [*ACTIVATION_NAMES, "residual"])
def test_it_is_layer_norm_followed_by_linear(gpu: GpuBackend, dtype: str, activation: str) -> None:
    dense_layers.check_beside_linear(gpu, OP, thin_linear, dtype, activation, rows=5, n=40, k=72, norm=True)


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("kv_from", [0, 8, 23])
def test_in_place_is_a_product_and_a_copy_to_the_bit(gpu: GpuBackend, dtype: str, kv_from: int) -> None:
    dense_layers.check_in_place(gpu, OP, thin_linear, dtype, kv_from, rows=11, n=24, k=320, norm=True)


def test_what_is_refused(gpu: GpuBackend) -> None:
    rows = (f"rows: expected 1 to {MOST_ROWS}, got 65", {"rows": 65})
    dense_layers.check_refusals(gpu, OP, thin_linear, [*REFUSED, *refused_norms("beta"), rows], rows=1)


@pytest.mark.parametrize(("n", "k"), [*DECODER, (1, 1), (8, 33), (5000, 500), (16, 100_000), (40, 1 << 24)])
def test_every_plan_fits_the_least_device_and_rows_do_not_matter(n: int, k: int) -> None:
    dims = {"rows": 1, "n": n, "k": k}
    every = plans(dims, "f16", MINIMUM)
    assert {warps for _, warps in every} == ({8, 16} if chains_of(k) <= 8 else {16})
    for (name, warps), how in every.items():
        check_geometry(how.grid, how.block, how.shared_bytes, MINIMUM)
        assert how.grid[0] * VARIANTS[name].groups * 8 >= n
        assert how.block == (32 * warps, 1, 1)
        assert chains_of(k) <= warps
        assert VARIANTS[name].streamed or 32 * VARIANTS[name].chunks >= 128 * chain_units(k), "they fit into registers"
        assert how.programmatic
    chosen = plan(dims, "f16", MINIMUM)
    assert chosen in every.values()
    assert {plan({**dims, "rows": rows}, "f16", MINIMUM) for rows in range(1, MOST_ROWS + 1)} == {chosen}


def test_shared_memory() -> None:
    """Places and bias; sums and moments of the warps; gamma and beta of whole batches of chunks, as far as kept."""
    early = 64 * 8 + 4 * 8 * 4
    assert shared_bytes(VARIANTS["3x4"], 8, 1024) == 8 * (3 * 72 * 4 + 8 * 8) + 2 * 1024 * 2 + early
    assert shared_bytes(VARIANTS["1x8"], 16, 4000) == 16 * (72 * 4 + 8 * 8) + 2 * 4096 * 2 + early
    assert shared_bytes(VARIANTS[""], 16, 8000) == 16 * (2 * 72 * 4 + 8 * 8) + 2 * 8192 * 2 + early
    assert shared_bytes(VARIANTS[""], 16, 8200) == 16 * (2 * 72 * 4 + 8 * 8) + early
    assert OP.source is not None
    assert "constexpr int MOST_STAGED = 8192;" in OP.source.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("k", "name", "warps"),
    [
        (1, "3x4", 8),
        (1024, "3x4", 8),
        (1025, "4x4", 16),
        (2048, "4x4", 16),
        (2049, "1x8", 16),
        (4096, "1x8", 16),
        (4097, "", 16),
        (8192, "", 16),
    ],
)
def test_the_choice_is_by_k(k: int, name: str, warps: int) -> None:
    """Weights stay in registers up to k of 4,096."""
    large = replace(MINIMUM, sm_count=132, compute_capability=(9, 0))
    for limits in (MINIMUM, large):
        dims = {"rows": 9, "n": 4096, "k": k}
        assert plan(dims, "bf16", limits) == plans(dims, "bf16", limits)[name, warps]


def test_all_entry_points_are_in_use() -> None:
    """By the cases that conformance runs, or by some layer of a decoder; the streaming one where k is long."""
    sizes = [(case["n"], case["k"]) for case in OP.cases] + DECODER
    used = {plan({"rows": 1, "n": n, "k": k}, "f16", MINIMUM).entry for n, k in sizes}
    assert used == {OP.spec.entry("f16", name) for name in VARIANTS}


# on a GPU: every plan

SIZES: Final = [
    ("f16", {"n": 41, "k": 320, "norm": True}),
    ("bf16", {"n": 24, "k": 1024, "norm": True, "x_pad": 8}),
    ("bf16", {"n": 20, "k": 328, "residual": True}),
    ("f16", {"n": 17, "k": 77, "norm": True, "x_pad": 3}),
    ("f16", {"n": 40, "k": 2048, "norm": True, "activation": "relu"}),
    ("bf16", {"n": 16, "k": 4096, "out_pad": 3}),
    ("f16", {"n": 16, "k": 8192, "residual": True}),
]


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
@pytest.mark.parametrize("k", [320, 2048])
def test_alignment_does_not_change_bits(gpu: GpuBackend, dtype: str, k: int) -> None:
    dense_layers.check_odd_rows(gpu, OP, plans, dtype, n=24, k=k, norm=True)


@cuda_only
def test_a_chain_of_layers_that_start_early_is_in_order(gpu: GpuBackend) -> None:
    dense_layers.check_chain(gpu, OP, thin_linear, "bf16", 1024, rows=8, norm=True)
