# SPDX-License-Identifier: MIT OR Apache-2.0
"""How `decode_attention` is launched, what it finds through an ancestry and without one, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from gpu_runtime import AddressTable, GpuBackend, dtypes, kernel_source
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from metrale.ops import decode_attention, kv_scatter, row_gather
from metrale.ops.decode_attention import MOST_HEAD_DIM, OP, SPLITS, UNKNOWN, make_inputs, plan, spread
from tests.backends import host_only
from tests.ops.harness import both_ways, download, run, upload

TABLES = ("ancestry", "ancestry_index", "beam_positions")


@pytest.mark.parametrize(
    ("rows", "heads", "sm_count", "warps"),
    [
        (1, 16, 132, 4),
        (16, 16, 132, 4),
        (11, 24, 132, 4),  # four warps a pair are just as many as the multiprocessors want
        (5, 53, 132, 2),
        (33, 16, 132, 2),
        (23, 23, 132, 1),
        (64, 16, 132, 1),
        (64, 16, 300, 2),
        (64, 16, 512, 4),
        (1, 1, 1, 4),
        (3, 1, 1, 2),
        (5, 1, 1, 1),
    ],
)
def test_the_fewer_pairs_the_more_warps_share_one(rows: int, heads: int, sm_count: int, warps: int) -> None:
    """A block has four warps at most, and as many pairs as it has warps where each takes one; the last has the rest."""
    how = plan({"rows": rows, "heads": heads, "head_dim": 64}, "f16", replace(MINIMUM, sm_count=sm_count))
    pairs = 4 if warps == 1 else 1
    assert how.block == (32, warps, pairs)
    assert how.grid[0] * pairs >= rows * heads > (how.grid[0] - 1) * pairs
    assert how.grid[1:] == (1, 1)
    assert how.shared_bytes == (0 if warps == 1 else SPLITS * (64 + 2) * 4)
    assert how.programmatic


@pytest.mark.parametrize(
    ("rows", "head_dim", "warps"), [(64, 64, 1), (64, 65, 2), (64, 128, 2), (67, 128, 1), (32, 128, 4)]
)
def test_wide_heads_get_twice_the_warps(rows: int, head_dim: int, warps: int) -> None:
    how = plan({"rows": rows, "heads": 16, "head_dim": head_dim}, "f16", replace(MINIMUM, sm_count=132))
    assert how.block == (32, warps, 4 if warps == 1 else 1)


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("sm_count", [1, 30, 1000])
def test_plans_fit_the_least_device(dtype: str, sm_count: int) -> None:
    limits = replace(MINIMUM, sm_count=sm_count)
    for head_dim in (1, 64, MOST_HEAD_DIM):
        how = plan({"rows": 10, "heads": 10, "head_dim": head_dim}, dtype, limits)
        check_geometry(how.grid, how.block, how.shared_bytes, MINIMUM)
        assert how.entry == OP.spec.entry(dtype)
    with pytest.raises(ValueError, match="decode_attention: head_dim: expected at most 256, got 257"):
        plan({"rows": 1, "heads": 1, "head_dim": MOST_HEAD_DIM + 1}, dtype, limits)


def test_the_kernel_has_as_many_splits() -> None:
    assert OP.source is not None
    assert f"constexpr unsigned SPLITS = {SPLITS};" in kernel_source.inlined(OP.source, OP.include)


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 64},
        {"head_dim": 64, "beams": (3, 0, 4, 0, 2, 1, 5)},
        {"head_dim": 16, "pad": 3},
        {"head_dim": 128, "regular": False},
        {"head_dim": 37, "regular": False, "beams": (0, 2, 0, 3, 1, 6, 0)},
        {"head_dim": 200},
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_whoever_shares_it_and_whatever_is_fresh(
    gpu: GpuBackend, dtype: str, case: dict[str, Any]
) -> None:
    """One, two or four warps a pair; read before the wait or after it; the last block of one warp a pair has a rest."""
    lengths = (40, 1, 300, 64, 33, 2, 129)
    rng = np.random.default_rng(case["head_dim"])
    inputs = dict(make_inputs(rng, dtype, lengths=lengths, heads=3, spread=5.0, **case))
    sizes = OP.spec.dims([inputs[arg.name] for arg in OP.spec.args])
    every = [spread(sizes, dtype, MINIMUM, warps) for warps in (1, 2, 4)]
    assert [how.block for how in every] == [(32, 1, 4), (32, 2, 1), (32, 4, 1)]
    expected = run(OP, gpu, dtype, inputs)["out"]
    assert np.isfinite(expected.astype(np.float32)).all()
    ways = both_ways(OP, gpu, dtype, every)
    for launched in islice(ways, 1 if gpu.kind() == "host" else None):  # the host has one way
        for fresh in (UNKNOWN, 0, 1, 2, 50, 5000):
            found = launched({**inputs, "fresh": fresh})
            assert found.tobytes() == expected.tobytes(), (launched.how, fresh)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("rows", [1, 40])
def test_what_kernels_ahead_write_is_seen(gpu: GpuBackend, dtype: str, rows: int) -> None:
    """Steps as a decoder has them, without a wait between them: the last position of each is fresh.

    The first kernel of a step is launched in the usual way, so all positions before the last are written long ago.
    """
    heads, head_dim, steps = 8, 64, 70
    width = heads * head_dim
    rng = np.random.default_rng(rows)
    states = rng.normal(size=(rows, width)).astype(dtypes.NUMPY[dtype])
    first = upload(gpu, states)
    pool = np.zeros((rows, steps, 2 * width), states.dtype)
    keys = upload(gpu, pool)
    spans = upload(gpu, int(keys) + np.arange(rows, dtype=np.uint64) * np.uint64(pool[0].nbytes))
    index = upload(gpu, rng.permutation(rows).astype(np.int32))
    counts = [upload(gpu, np.full(rows, count, np.int32)) for count in range(steps + 1)]
    q = upload(gpu, states)
    sizes: Any = {"rows": rows, "width": width, "dtype": dtype}
    place: Any = {**sizes, "src_stride": width, "kv_stride": 2 * width}
    shape: Any = {"rows": rows, "heads": heads, "head_dim": head_dim, "q_stride": width, "scale": head_dim**-0.5}
    where: Any = {"k_offset": 0, "v_offset": width, "kv_stride": 2 * width, "dtype": dtype}

    def result(wait: bool) -> bytes:
        gpu.memset(keys, 0, pool.nbytes)
        out = upload(gpu, states)
        for step in range(steps):
            row_gather(gpu, out, index, q, src_rows=rows, src_stride=width, out_stride=width, **sizes)
            kv_scatter(gpu, q, spans, counts[step], offset=0, **place)
            kv_scatter(gpu, first if step % 2 else q, spans, counts[step], offset=width, **place)
            decode_attention(gpu, q, spans, counts[step + 1], out, **shape, **where, fresh=1)
            if wait:
                gpu.synchronize()
        gpu.synchronize()
        return download(gpu, out, states).tobytes() + download(gpu, keys, pool).tobytes()

    apart = result(wait=True)
    assert all(result(wait=False) == apart for _ in range(1 if gpu.kind() == "host" else 20))


def gathered(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same attention without ancestries: each row's positions copied into a span of its own."""
    stride, longest = inputs["kv_stride"], int(inputs["lengths"].max())
    pool, starts = inputs["spans"].pool, inputs["spans"].starts
    own = np.zeros((len(starts), longest, stride), dtype=pool.dtype)
    for row, (start, length) in enumerate(zip(starts, inputs["lengths"], strict=True)):
        for position in range(length):
            index = inputs["ancestry_index"][row]
            beam = inputs["ancestry"][index, position] * inputs["beam_positions"][row] if index >= 0 else 0
            at = int(start) + (int(beam) + position) * stride
            own[row, position] = pool[at : at + stride]
    table = AddressTable(own.ravel(), np.arange(len(starts)) * longest * stride)
    return {**inputs, **dict.fromkeys(TABLES), "spans": table, "ancestry_rows": 0, "ancestry_capacity": 0}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("head_dim", "regular"), [(64, True), (64, False), (5, True), (128, True), (200, True)])
def test_a_row_has_the_same_bits_however_its_keys_are_reached(
    gpu: GpuBackend, dtype: str, head_dim: int, regular: bool
) -> None:
    case: dict[str, Any] = {"lengths": (40, 17, 70, 5), "heads": 2, "beams": (4, 0, 2, 3), "spread": 5.0}
    rng = np.random.default_rng(head_dim)
    inputs = dict(make_inputs(rng, dtype, **case, head_dim=head_dim, regular=regular))
    found, expected = run(OP, gpu, dtype, inputs)["out"], run(OP, gpu, dtype, gathered(inputs))["out"]
    assert np.isfinite(found.astype(np.float32)).all()
    assert found.tobytes() == expected.tobytes()


def test_beams_share_a_span(gpu: GpuBackend) -> None:
    """Three beams that branched at position 2: each has the first two from beam 0, and its own after."""
    pool = np.arange(3 * 6 * 2, dtype=np.float32).reshape(3, 6, 2)
    pool[:, :, 0] = 0.0  # all keys alike: the result is the mean of the values
    past = -5  # no beam, and past every length
    inputs = {
        **make_inputs(np.random.default_rng(0), "f32", lengths=(4, 4, 4), heads=1, head_dim=1, layers=1, layer=0),
        "spans": AddressTable(pool.ravel(), np.zeros(3, np.int64)),
        "ancestry": np.array([[0, 0, beam, beam, past] for beam in range(3)], np.int32),
        "ancestry_index": np.arange(3, dtype=np.int32),
        "beam_positions": np.full(3, 6, np.int32),
        "ancestry_rows": 3,
        "ancestry_capacity": 5,
    }
    values = pool[:, :, 1]
    expected = [np.mean([values[0, 0], values[0, 1], values[beam, 2], values[beam, 3]]) for beam in range(3)]
    assert run(OP, gpu, "f32", inputs)["out"].ravel().tolist() == expected


def test_the_launcher_does_without_ancestries(gpu: GpuBackend) -> None:
    values: Any = make_inputs(np.random.default_rng(0), "f32", lengths=(1,), heads=1, head_dim=4, layers=1, layer=0)
    q, lengths, out = (upload(gpu, values[name]) for name in ("q", "lengths", "out"))
    pool = upload(gpu, values["spans"].pool)
    spans = upload(gpu, np.array([int(pool)], np.uint64))
    sizes = {name: values[name] for name in ("rows", "heads", "head_dim", "q_stride", "k_offset", "v_offset", "scale")}
    decode_attention(gpu, q, spans, lengths, out, **sizes, kv_stride=values["kv_stride"], dtype="f32")
    assert download(gpu, out, values["out"]).ravel().tolist() == values["spans"].pool[4:].tolist()


@pytest.mark.parametrize("given", [TABLES[:1], TABLES[1:2], TABLES[2:], TABLES[:2], TABLES[1:], TABLES[::2]])
def test_some_of_the_tables_alone_are_refused(gpu: GpuBackend, given: tuple[str, ...]) -> None:
    missing = next(name for name in TABLES if name not in given)
    sizes = {"rows": 1, "heads": 1, "head_dim": 1, "q_stride": 1, "k_offset": 0, "v_offset": 0, "kv_stride": 1}
    tables: Any = dict.fromkeys(given, 64)
    with pytest.raises(ValueError, match=f"decode_attention: {missing}: expected an address, as {given[0]} has one"):
        decode_attention(gpu, 64, 64, 64, 64, **sizes, scale=1.0, dtype="f32", **tables)


def refused(**changes: Any) -> dict[str, Any]:
    """Return the op's parameters for two beams of three positions, with ``changes``."""
    inputs = make_inputs(np.random.default_rng(0), "f32", lengths=(3, 2), heads=1, head_dim=2, beams=(2, 2))
    tables = {
        "ancestry": [[0, 1, 0, 1], [1, 0, 9, 9]],
        "ancestry_index": [0, 1],
        "beam_positions": [3, 3],
        **changes,
    }
    arrays = {name: np.array(table, np.int32) for name, table in tables.items()}
    rows, capacity = arrays["ancestry"].shape
    return {**inputs, **arrays, "ancestry_rows": rows, "ancestry_capacity": capacity}


@host_only
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ancestry_index": [0, 2]}, r"ancestry_index: expected rows in \[0, 2\), or less than 0 for none, got 2"),
        ({"ancestry": [[0, 1], [1, 0]]}, r"lengths: expected at most the 2 positions of an ancestry.* got 3 in row 0"),
        ({"beam_positions": [3, 1]}, r"lengths: expected .* the 1 of a beam's storage, got 2 in row 1"),
        ({"ancestry": [[0, 1, 0], [-1, 0, 0]]}, r"ancestry: expected beams of at least 0, got -1"),
        ({"ancestry": [[0, 1, 1 << 20], [0, 0, 0]]}, r"address table: "),
        ({"lengths": [3, 0]}, r"lengths: expected at least 1 key a row, got 0"),
    ],
)
def test_what_is_outside_a_table_is_refused(gpu: GpuBackend, changes: dict[str, Any], message: str) -> None:
    run(OP, gpu, "f32", refused())
    with pytest.raises(InvalidPointer, match=f"decode_attention: {message}"):
        run(OP, gpu, "f32", refused(**changes))
