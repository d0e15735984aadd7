# SPDX-License-Identifier: MIT OR Apache-2.0
"""One row: LayerNorm, a product and a copy into the KV cache; what is refused; that no plan changes bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from metrale.ops import gemv
from metrale.ops.gemv import MOST_N, OP, VARIANTS, plan, plans, shape, shared_bytes
from metrale.ops.linear import ACTIVATION_NAMES
from tests.backends import cuda_only, host_only
from tests.ops import dense_layers
from tests.ops.dense_layers import DECODER, REFUSED, drawn, refused_norms
from tests.ops.harness import Launched, both_ways, run, upload
from tests.ops.oracles import ORACLES
from tests.ops.test_conformance import close

HEADS: Final = [(256256, 1024), (256256, 2048), (128128, 1024)]
"""Of their output heads, and that of M2M-100."""

LARGE: Final = replace(MINIMUM, sm_count=132, max_shared_bytes=227 * 1024, compute_capability=(9, 0))


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("activation", [*ACTIVATION_NAMES, "residual"])
@pytest.mark.parametrize("norm", [False, True])
def test_it_is_layer_norm_followed_by_linear(gpu: GpuBackend, dtype: str, activation: str, norm: bool) -> None:
    dense_layers.check_beside_linear(gpu, OP, gemv, dtype, activation, n=40, k=72, norm=norm)


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("far", [0.0, 3.0, 30.0])
def test_a_mean_far_from_zero_costs_no_more_than_a_rounding_of_x(gpu: GpuBackend, dtype: str, far: float) -> None:
    """The mean of x is ``far`` times its deviation; beside it, LayerNorm of x in float64.

    A rounding of x to half an ulp changes what LayerNorm makes of it by about ``1 + far`` as much; four times that, as
    errors of many columns seldom all add up.
    """
    v = drawn(OP, dtype, n=64, k=1024, norm=True, bias=False)
    x = np.random.default_rng(5).normal(far, 1.0, 1024).astype(v["x"].dtype)
    found = run(OP, gpu, dtype, {**v, "x": x})["out"].astype(np.float64)
    arrays = {"gamma": v["gamma"], "beta": dense_layers.beta_of(dtype, n=64, k=1024, norm=True, bias=False)}
    wide = {name: array.astype(np.float64) for name, array in (arrays | {"weight": v["weight"]}).items()}
    x64 = x.astype(np.float64)
    normed = (x64 - x64.mean()) / np.sqrt(x64.var() + v["eps"]) * wide["gamma"] + wide["beta"]
    error = np.abs(found - wide["weight"] @ normed).max()
    half_ulp = {"f16": 2**-11, "bf16": 2**-8}[dtype] / 2
    assert error < 4 * half_ulp * (1 + far) * np.abs(normed).std() + half_ulp * 2 * np.abs(found).max()


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("kv_from", [0, 8, 23, 24])
def test_in_place_is_a_product_and_a_copy_to_the_bit(gpu: GpuBackend, dtype: str, kv_from: int) -> None:
    dense_layers.check_in_place(gpu, OP, gemv, dtype, kv_from, n=24, k=320, norm=True)


def test_columns_before_those_in_place_are_all_that_out_has() -> None:
    (out,) = (arg for arg in OP.spec.args if arg.name == "out")
    assert out.sizes({"kv_from": 7, "n": 20}) == (7,)


@host_only
def test_a_span_that_is_too_short_is_refused(gpu: GpuBackend) -> None:
    v = drawn(OP, "f16", n=8, k=16)
    x, weight, bias, out = (upload(gpu, v[name]) for name in ("x", "weight", "bias", "out"))
    span = gpu.alloc(2 * 8)
    tables = upload(gpu, np.array([int(span)], np.uint64)), upload(gpu, np.array([1], np.int32))
    in_place: Any = {"spans": tables[0], "positions": tables[1], "kv_from": 0, "kv_stride": 8}
    with pytest.raises(InvalidPointer):
        gemv(gpu, x, weight, bias, out, n=8, k=16, dtype="f16", **in_place)


def test_what_is_refused(gpu: GpuBackend) -> None:
    longer = (f"n: expected 1 to {MOST_N}, got {MOST_N + 1}", {"n": MOST_N + 1})
    dense_layers.check_refusals(gpu, OP, gemv, [*REFUSED, *refused_norms("sums"), longer])


@pytest.mark.parametrize(("n", "k"), [*DECODER, *HEADS, (1, 1), (8, 33), (5000, 500), (16, 100_000), (40, 1 << 24)])
def test_every_plan_fits_the_least_device(n: int, k: int) -> None:
    dims = {"n": n, "k": k}
    every = plans(dims, "f16", MINIMUM)
    for name, how in every.items():
        check_geometry(how.grid, how.block, how.shared_bytes, MINIMUM)
        threads, groups, _ = how.block
        variant = VARIANTS[name]
        if variant.ringed:
            assert (how.grid[0], threads, k % 8) == (MINIMUM.sm_count, 32, 0)
        else:
            assert how.grid[0] * variant.rows * groups >= n > (how.grid[0] - 1) * variant.rows * groups
        assert threads % 32 == 0
        assert threads * groups <= 256
        assert variant.streamed or threads * variant.slices * 16 >= k, "the weights fit into registers"
        assert how.programmatic
    assert plan(dims, "f16", MINIMUM) in every.values()


def test_the_plans_of_a_decoder() -> None:
    """Six rows a warp, two slices of the widest rows; long weights through rings."""
    chosen = {sizes: plan(dict(zip("nk", sizes, strict=True)), "bf16", LARGE) for sizes in DECODER}
    entries = {sizes: how.entry.removeprefix("gemv_bf16_") for sizes, how in chosen.items()}
    special = {(2048, 8192): "4x2", **dict.fromkeys([(6144, 2048), (8192, 2048)], "ring2x4")}
    assert entries == dict.fromkeys(DECODER, "6x1") | special


def test_long_weights_go_through_rings_where_they_can() -> None:
    """Not past 2,048 columns, nor where rows are no whole packs; as many rings a block as it has memory for."""
    sizes = [*HEADS, (256256, 512), (8193, 1024), (8192, 1024), (256256, 2056), (256256, 1022)]
    chosen = [plan({"n": n, "k": k}, "f16", LARGE) for n, k in sizes]
    ends = ["ring4x2", "ring2x4", "ring4x2", "ring4x2", "ring4x2", "6x1", "8x1", "8x1"]
    assert [how.entry for how in chosen] == [OP.spec.entry("f16", end) for end in ends]
    assert all((how.grid, how.block) == ((132, 1, 1), (32, 8, 1)) for how in chosen[:5])
    small = plan({"n": 256256, "k": 2048}, "f16", MINIMUM)
    assert (small.grid, small.block) == ((108, 1, 1), (32, 3, 1))
    assert small.shared_bytes == shared_bytes(VARIANTS["ring2x4"]) + 3 * (3 * 8192 + 128)
    assert OP.source is not None
    assert "using Ring = PieceRing<3, 8192>;" in OP.source.read_text(encoding="utf-8")
    header = (OP.source.parent / "common" / "piece_ring.cuh").read_text(encoding="utf-8")
    assert "LINE = 128;" in header


def test_shared_memory() -> None:
    """Sums of all warps, two of x for each slice, and x in whole slices where rows come through rings."""
    assert shared_bytes(VARIANTS["8x1"]) == 8 * 8 * 8 * 4 + 8 * 8
    assert shared_bytes(VARIANTS["4x2"]) == 8 * 2 * 8 * 4 * 4 + 16 * 8
    assert shared_bytes(VARIANTS["ring4x2"]) == 8 * 2 * 8 * 4 * 4 + 16 * 8 + 1024 * 2


@pytest.mark.parametrize(("k", "expected"), [(1, (1, 8)), (512, (1, 8)), (513, (2, 4)), (1025, (3, 2)), (9000, (8, 1))])
def test_warps_along_k_and_beside_each_other(k: int, expected: tuple[int, int]) -> None:
    assert shape(VARIANTS["6x1"], k) == expected


def test_all_entry_points_are_in_use() -> None:
    """By the cases that conformance runs, and an output head."""
    sizes = [(case["n"], case["k"]) for case in OP.cases] + HEADS
    used = {plan({"n": n, "k": k}, "f16", MINIMUM).entry for n, k in sizes}
    assert used == {OP.spec.entry("f16", name) for name in VARIANTS}


# on a GPU: every plan

SIZES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("f16", {"n": 41, "k": 320, "norm": True}),
    ("bf16", {"n": 24, "k": 1024, "norm": True, "kv": 7, "regular": False}),
    ("bf16", {"n": 21, "k": 328, "residual": True}),
    ("f16", {"n": 17, "k": 77, "norm": True}),
    ("f16", {"n": 40, "k": 2048, "norm": True, "activation": "relu"}),
    ("bf16", {"n": 2049, "k": 1536, "kv": 2048}),
    ("bf16", {"n": 19, "k": 4096}),
    ("f16", {"n": 16, "k": 8192, "residual": True}),
    ("f16", {"n": 5, "k": 9000, "norm": True}),
]
APART: Final = [(dtype, sizes) for dtype, sizes in SIZES if "kv" not in sizes]


def ways(gpu: GpuBackend, dtype: str, values: dict[str, Any]) -> Iterator[Launched]:
    return both_ways(OP, gpu, dtype, plans({"n": values["n"], "k": values["k"]}, dtype, gpu.limits()).values())


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_every_plan_is_right_and_has_the_same_bits(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    values = drawn(OP, dtype, **sizes)
    exact, seen = ORACLES["gemv"](values), set()
    for launched in ways(gpu, dtype, values):
        found = launched.all(values)
        for name, right in exact.items():
            close(found[name], right, OP.spec.tolerance.of(dtype), f"{name}: {launched.how}")
        seen.add(b"".join(found[name].tobytes() for name in exact))
        gpu.sweep_unreleased()
    assert len(seen) == 1


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), APART)
def test_an_element_does_not_depend_on_those_beside_it(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    """With other rows of the weights beside its own, sound or not, it has the same bits."""
    values = drawn(OP, dtype, **sizes)
    for launched in ways(gpu, dtype, values):
        whole = launched(values)
        for begin, end in ((0, 1), (1, 4), (3, sizes["n"])):
            part = {name: values[name][begin:end] for name in ("weight", "bias", "out")}
            part["sums"] = None if values["sums"] is None else np.ascontiguousarray(values["sums"][:, begin:end])
            op = replace(OP, plan=plan)
            alone = Launched(op, gpu, dtype, plan({"n": end - begin, "k": sizes["k"]}, dtype, gpu.limits()))
            found = alone({**values, **part, "n": end - begin, "kv_from": end - begin})
            assert found.tobytes() == whole[begin:end].tobytes(), (launched.how, begin, end)
        spoilt = values["weight"].copy()
        spoilt[3] = np.nan
        found = launched({**values, "weight": spoilt})
        others = np.arange(sizes["n"]) != 3
        assert np.isnan(np.float32(found[3])) == (sizes.get("activation") != "none")
        assert found[others].tobytes() == whole[others].tobytes(), launched.how
        gpu.sweep_unreleased()


@cuda_only
@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize(("n", "k"), [(301, 1024), (259, 2048), (170, 520), (133, 8)])
def test_rings_have_the_same_bits_whoever_shares_the_rows(gpu: GpuBackend, dtype: str, n: int, k: int) -> None:
    """Any number of blocks and of warps: with few of them a warp has many times what its ring holds."""
    values = drawn(OP, dtype, n=n, k=k, norm=True)
    every = plans({"n": n, "k": k}, dtype, gpu.limits())
    expected = Launched(OP, gpu, dtype, every["6x1"])(values)
    close(expected, ORACLES["gemv"](values)["out"], OP.spec.tolerance.of(dtype), "out")
    for name, how in every.items():
        for blocks, warps in ((1, 1), (1, 3), (2, 8), (7, 2), (n, 1)) if VARIANTS[name].ringed else ():
            part = replace(how, grid=(blocks, 1, 1), block=(32, warps, 1))
            for launched in both_ways(OP, gpu, dtype, [part]):
                assert launched(values).tobytes() == expected.tobytes(), launched.how
        gpu.sweep_unreleased()


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_alignment_does_not_change_bits(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    dense_layers.check_moved(gpu, OP, dtype, drawn(OP, dtype, **{**sizes, "kv": 0}))


@cuda_only
def test_a_chain_of_layers_that_start_early_is_in_order(gpu: GpuBackend) -> None:
    dense_layers.check_chain(gpu, OP, gemv, "bf16", 1024, norm=True)
