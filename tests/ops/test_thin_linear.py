# SPDX-License-Identifier: MIT OR Apache-2.0
"""A thin layer is LayerNorm and a product; what it refuses; and on a GPU, that every launch plan keeps a row's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime import GpuBackend, dtypes
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from metrale.ops import kv_scatter, layer_norm, linear, thin_linear
from metrale.ops.linear import ACTIVATION_NAMES, scratch_bytes
from metrale.ops.thin_linear import MOST_ROWS, OP, VARIANTS, plan, plans, shared_bytes
from tests.backends import cuda_only
from tests.ops.harness import Launched, both_ways, download, upload
from tests.ops.oracles import ORACLES
from tests.ops.test_conformance import close

DECODER: Final = [(n * d, k * d) for d in (1024, 2048) for n, k in ((3, 1), (1, 1), (4, 1), (1, 4))]
"""n and k of the layers of NLLB's decoders."""


def drawn(dtype: str, rows: int, n: int, k: int, **options: Any) -> dict[str, Any]:
    return dict(OP.make_inputs(np.random.default_rng(n + k), dtype, rows=rows, n=n, k=k, **options))


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("activation", [*ACTIVATION_NAMES, "residual"])
def test_it_is_layer_norm_followed_by_linear(gpu: GpuBackend, dtype: str, activation: str) -> None:
    """To the bit on the host, which runs the same references; to the op's tolerance on a GPU."""
    rows, n, k = 5, 40, 72
    residual, activation = activation == "residual", "none" if activation == "residual" else activation
    v = drawn(dtype, rows, n, k, norm=True, residual=residual)
    x, gamma, beta, weight, bias = (upload(gpu, v[name]) for name in ("x", "gamma", "beta", "weight", "bias"))
    h, apart, out = upload(gpu, np.zeros_like(v["x"])), upload(gpu, v["out"]), upload(gpu, v["out"])
    space = scratch_bytes(rows, n, k, dtype, activation)
    sizes: Any = {"rows": rows, "n": n, "k": k, "dtype": dtype, "activation": activation, "residual": residual}
    layer_norm(gpu, x, gamma, beta, h, rows=rows, width=k, eps=v["eps"], dtype=dtype)
    workspace = gpu.alloc(max(space, 1))
    linear(gpu, h, weight, bias, apart, **sizes, workspace=workspace if space else 0, workspace_bytes=space)
    thin_linear(gpu, x, weight, bias, out, **sizes, gamma=gamma, beta=beta, eps=v["eps"])
    gpu.synchronize()
    found, expected = download(gpu, out, v["out"]), download(gpu, apart, v["out"])
    assert (found != v["out"]).any()
    if gpu.kind() == "host":
        assert found.tobytes() == expected.tobytes()
    else:  # both are rounded
        close(found, expected, 2 * OP.spec.tolerance.of(dtype), "out")


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("kv_from", [0, 8, 23])
def test_in_place_is_a_product_and_a_copy_to_the_bit(gpu: GpuBackend, dtype: str, kv_from: int) -> None:
    """And not a byte beside it is written, neither of the rows of ``out`` nor of the spans."""
    rows, n, k, depth, stride, offset = 11, 24, 320, 4, 40, 5
    v = drawn(dtype, rows, n, k, norm=True)
    x, gamma, beta, weight, bias = (upload(gpu, v[name]) for name in ("x", "gamma", "beta", "weight", "bias"))
    item = dtypes.itemsize(dtype)
    pool = np.arange(rows * depth * stride).reshape(rows, -1).astype(dtypes.NUMPY[dtype])
    whole, out, here, there = (upload(gpu, array) for array in (v["out"], v["out"], pool, pool))
    positions = upload(gpu, (np.arange(rows) * 3 % depth).astype(np.int32))
    shuffled = np.random.default_rng(0).permutation(rows) * pool[0].nbytes
    spans = [upload(gpu, (int(one) + shuffled).astype(np.uint64)) for one in (here, there)]
    sizes: Any = {"rows": rows, "n": n, "k": k, "dtype": dtype, "gamma": gamma, "beta": beta, "eps": 1e-5}
    place: Any = {"rows": rows, "width": n - kv_from, "src_stride": n, "offset": offset, "kv_stride": stride}
    thin_linear(gpu, x, weight, bias, whole, **sizes)
    kv_scatter(gpu, int(whole) + kv_from * item, spans[0], positions, **place, dtype=dtype)
    in_place: Any = {"spans": spans[1], "positions": positions, "kv_from": kv_from, "out_stride": n}
    thin_linear(gpu, x, weight, bias, out, **sizes, **in_place, kv_offset=offset, kv_stride=stride)
    gpu.synchronize()
    assert download(gpu, there, pool).tobytes() == download(gpu, here, pool).tobytes()
    found, expected = download(gpu, out, v["out"]), download(gpu, whole, v["out"])
    assert found[:, :kv_from].tobytes() == expected[:, :kv_from].tobytes()
    assert found[:, kv_from:].tobytes() == v["out"][:, kv_from:].tobytes()


def refused(gpu: GpuBackend, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"thin_linear: {message}"):
        thin_linear(gpu, 64, 64, 64, 64, **{"rows": 1, "n": 8, "k": 8, "dtype": "f16", **options})


def test_what_is_refused(gpu: GpuBackend) -> None:
    refused(gpu, r"activation: expected one of \('none', .*, got 'tanh'", activation="tanh")
    refused(gpu, "activation: expected 'none' together with residual, got 'relu'", activation="relu", residual=True)
    refused(gpu, "beta: expected an address, as gamma has one, got NULL", gamma=64)
    refused(gpu, "gamma: expected an address, as beta has one, got NULL", beta=64)
    refused(gpu, "positions: expected an address, as spans has one, got NULL", spans=64)
    refused(gpu, "kv_from: expected .*8.* got 4", kv_from=4)
    refused(gpu, "spans: expected neither residual nor an activation", spans=64, positions=64, residual=True)
    refused(gpu, f"rows: expected at most {MOST_ROWS}, got 65", rows=65)
    refused(gpu, r"k: expected at most 16777216, got 16777224", k=(1 << 24) + 8)


@pytest.mark.parametrize(("n", "k"), [*DECODER, (1, 1), (8, 33), (5000, 500), (16, 100_000), (40, 1 << 24)])
def test_every_plan_fits_the_least_device_and_rows_do_not_matter(n: int, k: int) -> None:
    dims = {"rows": 1, "n": n, "k": k}
    every = plans(dims, "f16", MINIMUM)
    assert {warps for _, warps in every} == {8, 16}
    for (name, warps), how in every.items():
        check_geometry(how.grid, how.block, how.shared_bytes, MINIMUM)
        assert how.grid[0] * VARIANTS[name].groups * 8 >= n
        assert how.block == (32 * warps, 1, 1)
        assert VARIANTS[name].streamed or 32 * VARIANTS[name].chunks * warps >= k, "the weights fit into registers"
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
    assert shared_bytes(VARIANTS[""], 8, 8200) == 8 * (2 * 72 * 4 + 8 * 8) + early
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


def ways(gpu: GpuBackend, dtype: str, values: dict[str, Any]) -> Iterator[Launched]:
    dims = {name: values[name] for name in ("rows", "n", "k")}
    return both_ways(OP, gpu, dtype, plans(dims, dtype, gpu.limits()).values())


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
    """In every number of rows, and at every place among them."""
    whole = drawn(dtype, MOST_ROWS, **sizes)
    exact = ORACLES["thin_linear"](whole)["out"]
    for launched in ways(gpu, dtype, whole):
        all_rows = launched(whole)
        close(all_rows, exact, OP.spec.tolerance.of(dtype), str(launched.how))
        for rows in range(1, MOST_ROWS):
            order = np.roll(np.arange(MOST_ROWS), 7 * rows)[:rows]
            part = {**whole, "x": whole["x"][order], "out": whole["out"][order], "rows": rows}
            assert launched(part).tobytes() == all_rows[order].tobytes(), (launched.how, rows)
        gpu.sweep_unreleased()


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_a_row_that_is_not_sound_does_not_touch_others(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    values = drawn(dtype, 21, **sizes)
    bad = np.array([0, 3, 9, 11, 16, 20])
    good = np.setdiff1d(np.arange(21), bad)
    spoilt = values["x"].copy()
    spoilt[bad, bad * 37 % sizes["k"]] = np.nan
    for launched in ways(gpu, dtype, values):
        sound, found = launched(values), launched({**values, "x": spoilt})
        assert found[good].tobytes() == sound[good].tobytes(), launched.how
        assert np.isnan(found[bad][:, : sizes["n"]].astype(np.float32)).all(), launched.how


@cuda_only
@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("k", [320, 2048])
def test_alignment_does_not_change_bits(gpu: GpuBackend, dtype: str, k: int) -> None:
    """Rows that lie an odd number of elements apart are read element by element."""
    values = drawn(dtype, 19, 24, k, norm=True, x_pad=8)
    odd = {**values, "x": np.pad(values["x"], ((0, 0), (0, 1))), "x_stride": k + 9}
    for launched in ways(gpu, dtype, values):
        assert launched(odd).tobytes() == launched(values).tobytes(), launched.how


@cuda_only
def test_a_chain_of_layers_that_start_early_is_in_order(gpu: GpuBackend) -> None:
    """Each reads what the one ahead wrote, many times over, without a wait between them."""
    rows, d, steps, dtype = 8, 1024, 40, "bf16"
    v = drawn(dtype, rows, d, d, norm=True)
    x, gamma, beta, weight, bias = (upload(gpu, v[name]) for name in ("x", "gamma", "beta", "weight", "bias"))
    size = rows * d * dtypes.itemsize(dtype)
    sizes: Any = {"rows": rows, "n": d, "k": d, "dtype": dtype, "gamma": gamma, "beta": beta, "eps": 1e-5}

    def result(wait: bool) -> bytes:
        ends = [gpu.alloc(size), gpu.alloc(size)]
        gpu.copy_d2d(x, ends[0], size)
        for step in range(steps):
            thin_linear(gpu, ends[step % 2], weight, bias, ends[1 - step % 2], **sizes)
            if wait:
                gpu.synchronize()
        gpu.synchronize()
        return download(gpu, ends[steps % 2], v["x"]).tobytes()

    apart = result(wait=True)
    assert all(result(wait=False) == apart for _ in range(20))
