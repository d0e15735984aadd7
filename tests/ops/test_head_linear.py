# SPDX-License-Identifier: MIT OR Apache-2.0
"""An output head is a product; the parts of its maxima are those of what it stored; all plans have the same bits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM, Limits
from metrale.ops import head_linear
from metrale.ops.head_linear import (
    COLUMNS,
    MOST_K,
    MOST_ROWS,
    OP,
    PART_BYTES,
    VARIANTS,
    block_count,
    maxima_bytes,
    plan,
    plans,
    room_of,
    shared_bytes,
)
from metrale.ops.row_parts import found
from tests.backends import cuda_only
from tests.ops.dense_layers import check_refusals, drawn
from tests.ops.harness import Array, both_ways, download, run, upload
from tests.ops.oracles import ORACLES
from tests.ops.test_cluster_linear import LARGE
from tests.ops.test_conformance import close


def ids_of(maxima: Array) -> list[int]:
    """Return the column of each row's maximum, -1 where there is none."""
    keys = (maxima[..., 1].astype(np.uint64) << np.uint64(32) | maxima[..., 0]).max(axis=1)
    return [int(~key & np.uint64(0xFFFFFFFF)) if key else -1 for key in keys]


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
def test_the_launcher(gpu: GpuBackend, dtype: str) -> None:
    """Rows lie where it is told; it knows how many parts there are."""
    v = drawn(OP, dtype, rows=5, n=150, k=64, x_pad=8, out_pad=6, spare=10)
    blocks = block_count(150, gpu.limits())
    x, weight, bias, out = (upload(gpu, v[name]) for name in ("x", "weight", "bias", "out"))
    maxima = upload(gpu, np.zeros((5, blocks, 4), np.uint32))
    places = {"x_stride": 72, "out_stride": 156, "counted": 140}
    head_linear(gpu, x, weight, bias, out, maxima, rows=5, n=150, k=64, dtype=dtype, **places)
    expected = ORACLES["head_linear"]({**v, "blocks": blocks})["out"]
    stored = download(gpu, out, v["out"])
    close(stored, expected, OP.spec.tolerance.of(dtype), "out")
    parts = download(gpu, maxima, np.empty((5, blocks, 4), np.uint32))
    assert not parts[..., 2].any()
    assert ids_of(parts) == stored[:, :140].astype(np.float32).argmax(axis=1).tolist()

    x, out = upload(gpu, v["x"][:, :64]), upload(gpu, v["out"][:, :150])
    head_linear(gpu, x, weight, bias, out, maxima, rows=5, n=150, k=64, dtype=dtype)
    stored = download(gpu, out, v["out"][:, :150].copy())
    close(stored, expected[:, :150], OP.spec.tolerance.of(dtype), "out")
    parts = download(gpu, maxima, parts)
    assert parts[..., 2].any(axis=1).all()  # all columns count, and the last of them are infinite
    assert ids_of(parts) == stored.astype(np.float32).argmax(axis=1).tolist()


SMALL: dict[str, Any] = {"rows": 6, "n": 100, "k": 24, "maxima": True, "blocks": 3, "spare": 7}


def check_maxima(v: dict[str, Any], results: dict[str, Array]) -> None:
    stored = results["out"]
    for block in range(v["blocks"]):
        columns = np.flatnonzero(np.arange(v["counted"]) // COLUMNS % v["blocks"] == block)
        assert results["maxima"][:, block].tolist() == found(stored[:, columns], columns).tolist()


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
def test_maxima_are_of_what_was_stored(gpu: GpuBackend, dtype: str) -> None:
    """Ties go to the lowest column, NaN is no maximum, and what is not finite is told of."""
    v = drawn(OP, dtype, **SMALL)
    v["weight"][...] = np.round(v["weight"] * 2)  # few different logits
    v["bias"][:93], v["x"][...] = np.round(v["bias"][:93]), np.round(v["x"])
    v["x"][1] = np.nan
    v["x"][2, 0], v["weight"][40, 0] = np.inf, 1
    v["bias"][50], v["bias"][51] = np.nan, -np.inf
    v["bias"][:16] = -np.inf  # a tile with nothing
    results = run(OP, gpu, dtype, v)
    check_maxima(v, results)
    ids = ids_of(results["maxima"])
    assert ids[1] == -1
    logits = np.where(np.isnan(results["out"][:, :93]), -np.inf, results["out"][:, :93].astype(np.float32))
    assert np.delete(ids, 1).tolist() == np.delete(logits.argmax(axis=1), 1).tolist()
    assert results["maxima"][:, :, 2].any(axis=1).all()
    assert results["maxima"][0, :, 2].tolist() == [1, 0, 0]  # the tiles 0 and 3, which has columns 50 and 51


def test_an_empty_part() -> None:
    assert found(np.empty((2, 0), np.float32), np.empty(0, np.int64)).tolist() == [[0] * 4] * 2
    values = np.array([[-0.0, 0.0, -1.5], [np.nan, -np.inf, np.nan], [-np.inf, -2.0, -2.0]], np.float32)
    words = found(values, np.array([5, 9, 11]))
    assert words.tolist() == [
        [2**32 - 6, 1 << 31, 0, 0],
        [0, 0, 1, 0],
        [2**32 - 10, 2**32 - 1 - 0xC0000000, 1, 0],
    ]


def test_what_is_refused(gpu: GpuBackend) -> None:
    cases = [
        (f"rows: expected 1 to {MOST_ROWS}, got 65", {"rows": 65}),
        (f"rows: expected 1 to {MOST_ROWS}, got 0", {"rows": 0}),
        (f"k: expected 1 to {MOST_K}, got 1025", {"k": 1025}),
        ("n: expected 1 to 1073741824, got 0", {"n": 0}),
    ]
    check_refusals(gpu, OP, head_linear, cases, rows=1)


@pytest.mark.parametrize("limits", [MINIMUM, replace(MINIMUM, max_cluster=8), LARGE], ids=["minimum", "small", "large"])
@pytest.mark.parametrize(("n", "k"), [(256_256, 1024), (1, 1), (128, 32), (40_000, 520)])
def test_every_plan_fits_the_device(limits: Limits, n: int, k: int) -> None:
    """With bulk copies there is a slot, and as many as there is room for; without them, none."""
    for rows, room in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64)):
        dims = {"rows": rows, "n": n, "k": k, "blocks": block_count(n, limits)}
        every = plans(dims, "f16", limits)
        assert [*every] == ([*range(1, max(every) + 1)] if limits.max_cluster > 1 else [0])
        for slots, how in every.items():
            check_geometry(how.grid, how.block, how.shared_bytes, limits, how.cluster)
            assert (how.grid, how.block) == ((dims["blocks"], 1, 1), (256, 1, 1))
            assert how.shared_bytes == shared_bytes(room, k, slots)
            assert how.entry == OP.spec.entry("f16", VARIANTS[room])
            assert how.programmatic
        chosen = plan(dims, "f16", limits)
        assert chosen in every.values()
        beside = limits.max_shared_bytes - chosen.shared_bytes
        assert chosen == every[min(every)] or beside >= (16384 if room < 64 else 0)
        assert chosen == every[max(every)] or beside < 16384 + 16 * k * 2
        assert max(every) in (0, 16) or shared_bytes(room, k, max(every) + 1) > limits.max_shared_bytes


def test_shared_memory_and_blocks() -> None:
    """Barriers; sums of eight warps with two tiles, of which each octet of columns has a pad; tiles of 16 rows."""
    assert shared_bytes(16, 8, 0) == 128 + 2 * 8 * 2 * (16 * 8 + 16) * 4
    assert shared_bytes(64, 1024, 5) == 128 + 2 * 8 * 2 * (64 * 8 + 16) * 4 + 5 * 16 * 1024 * 2
    head = {"n": 256_256, "k": 1024, "blocks": 132}
    assert [max(plans({**head, "rows": rows}, "f16", LARGE)) for rows in (8, 32, 64)] == [6, 6, 5]
    chosen = [plan({**head, "rows": rows}, "f16", LARGE).shared_bytes for rows in (8, 32, 64)]
    assert chosen == [shared_bytes(16, 1024, 6), shared_bytes(32, 1024, 5), shared_bytes(64, 1024, 5)]
    assert [block_count(n, LARGE) for n in (1, 16, 17, 132 * 16, 256_256)] == [1, 1, 2, 132, 132]
    assert block_count(256_256, replace(LARGE, sm_count=1000)) == 256
    assert [room_of(rows) for rows in (1, 16, 17, 32, 33, 64)] == [16, 16, 32, 32, 64, 64]
    assert maxima_bytes(3, 256_256) == 3 * 256 * PART_BYTES
    assert maxima_bytes(3, 40) == 3 * 3 * PART_BYTES


def test_the_kernel_counts_alike() -> None:
    assert OP.source is not None
    numbers = dict(re.findall(r"constexpr int (\w+) = (\d+);", OP.source.read_text(encoding="utf-8")))
    found_numbers = {name: int(value) for name, value in numbers.items()}
    wanted = {"WARPS": 8, "ROWS_AT_ONCE": 16, "BARRIER_BYTES": 128, "OCTETS": COLUMNS // 8}
    assert {name: found_numbers[name] for name in wanted} == wanted
    assert found_numbers["WARPS"] * found_numbers["SLICE"] == MOST_K


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("f16", {"n": 1003, "k": 1024, "spare": 9, "blocks": 5}),
    ("bf16", {"n": 640, "k": 1024, "x_pad": 8, "blocks": 2}),
    ("bf16", {"n": 333, "k": 520, "bias": False, "blocks": 22}),  # blocks without a tile
    ("f16", {"n": 77, "k": 77, "x_pad": 3, "out_pad": 1, "blocks": 3}),  # element by element
    ("f16", {"n": 4096, "k": 8, "blocks": 1}),
]


@cuda_only
@pytest.mark.parametrize(("dtype", "sizes"), SIZES)
def test_every_plan_is_right_and_keeps_a_rows_bits(gpu: GpuBackend, dtype: str, sizes: dict[str, Any]) -> None:
    v = drawn(OP, dtype, rows=MOST_ROWS, maxima=True, **sizes)
    expected = ORACLES["head_linear"](v)["out"]
    whole: Array | None = None
    for rows in (64, 1, 5, 16, 17, 32, 33):
        some = {**v, "rows": rows, **{name: v[name][:rows] for name in ("x", "out", "maxima")}}
        dims = {name: some[name] for name in ("rows", "n", "k", "blocks")}
        for launched in both_ways(OP, gpu, dtype, plans(dims, dtype, gpu.limits()).values()):
            results = launched.all(some)
            if whole is None:
                whole = results["out"]
                close(whole, expected, OP.spec.tolerance.of(dtype), "out")
            assert results["out"].tobytes() == whole[:rows].tobytes(), (rows, launched.how)
            check_maxima(some, results)


@cuda_only
@pytest.mark.parametrize("dtype", OP.spec.dtypes)
def test_alignment_changes_no_bit(gpu: GpuBackend, dtype: str) -> None:
    v = drawn(OP, dtype, rows=20, n=200, k=264)
    whole = run(OP, gpu, dtype, v)["out"]
    x, out = np.zeros((20, 265), v["x"].dtype), np.zeros((20, 203), v["x"].dtype)
    x[:, :264] = v["x"]
    apart = run(OP, gpu, dtype, {**v, "x": x, "out": out, "x_stride": 265, "out_stride": 203})["out"]
    assert apart[:, :200].tobytes() == whole.tobytes()
