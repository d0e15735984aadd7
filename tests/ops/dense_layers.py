# SPDX-License-Identifier: MIT OR Apache-2.0
"""What tests of the dense layers have in common: each beside its parts, what all refuse, and every plan on a GPU.

``sizes`` are n and k, rows where the op has them, and options of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest

from gpu_runtime import GpuBackend, LaunchPlan, Op, dtypes
from metrale.ops import dense, kv_scatter, layer_norm, linear
from metrale.ops.linear import scratch_bytes
from tests.ops.harness import Array, Values, download, run, upload
from tests.ops.oracles import ORACLES
from tests.ops.test_conformance import close

Launcher = Callable[..., None]
Plans = Callable[..., Mapping[Any, LaunchPlan]]

DECODER: Final = [(n * d, k * d) for d in (1024, 2048) for n, k in ((3, 1), (1, 1), (4, 1), (1, 4))]
"""n and k of the layers of NLLB's decoders."""

REFUSED: Final[list[tuple[str, dict[str, Any]]]] = [
    (r"activation: expected one of \('none', .*, got 'tanh'", {"activation": "tanh"}),
    ("activation: expected 'none' together with residual, got 'relu'", {"activation": "relu", "residual": True}),
    ("positions: expected an address, as spans has one, got NULL", {"spans": 64}),
    ("spans: expected an address, as positions has one, got NULL", {"positions": 64}),
    ("kv_from: expected .*8.* got 4", {"kv_from": 4}),
    ("kv_from: expected .*8.* got 9", {"kv_from": 9, "spans": 64, "positions": 64}),
    ("kv_from: expected .*8.* got -1", {"kv_from": -1, "spans": 64, "positions": 64}),
    (
        "spans: expected neither residual nor an activation with them, got residual",
        {"residual": True, "spans": 64, "positions": 64},
    ),
    (
        "spans: expected neither residual nor an activation with them, got 'relu'",
        {"activation": "relu", "spans": 64, "positions": 64},
    ),
    ("k: expected 1 to 16777216, got 16777224", {"k": (1 << 24) + 8}),
    ("k: expected 1 to 16777216, got 0", {"k": 0}),
]
"""What every one of them says of options, with n and k of 8."""


def refused_norms(second: str) -> list[tuple[str, dict[str, Any]]]:
    """Return what those that have a LayerNorm say besides, whose second array has this name."""
    return [
        (f"{second}: expected an address, as gamma has one, got NULL", {"gamma": 64}),
        (f"gamma: expected an address, as {second} has one, got NULL", {second: 64}),
    ]


def drawn(op: Op, dtype: str, **sizes: Any) -> dict[str, Any]:
    return dict(op.make_inputs(np.random.default_rng(sizes["n"] + sizes["k"]), dtype, **sizes))


def beta_of(dtype: str, **sizes: Any) -> Array:
    """Return the LayerNorm's beta of `drawn`, also where the op has but sums of it."""
    values = dense.make_inputs(np.random.default_rng(sizes["n"] + sizes["k"]), dtype, **{"rows": 1, **sizes})
    assert isinstance(values["beta"], np.ndarray)
    return values["beta"]


def check_refusals(gpu: GpuBackend, op: Op, launcher: Launcher, cases: Iterable[tuple[str, Any]], **sizes: int) -> None:
    for message, options in cases:
        with pytest.raises(ValueError, match=f"{op.spec.name}: {message}"):
            launcher(gpu, 64, 64, 64, 64, **{**sizes, "n": 8, "k": 8, "dtype": "f16", **options})


@dataclass(frozen=True)
class Layer:
    """Inputs of a layer on a device, and what its launcher takes besides ``x``, ``weight``, ``bias`` and ``out``."""

    gpu: GpuBackend
    launcher: Launcher
    v: Mapping[str, Any]
    given: Mapping[str, Any]
    x: int
    weight: int
    bias: int

    def __call__(self, out: int, *, x: int | None = None, **options: Any) -> None:
        source = self.x if x is None else x
        self.launcher(self.gpu, source, self.weight, self.bias, out, **{**self.given, **options})

    @property
    def rows(self) -> int:
        return int(self.given.get("rows", 1))


def layer_of(gpu: GpuBackend, op: Op, launcher: Launcher, dtype: str, **sizes: Any) -> Layer:
    """Return a layer with inputs of its own, and with a LayerNorm if they have ``norm``."""
    v = drawn(op, dtype, **sizes)
    given = {name: v[name] for name in ("rows", "n", "k") if name in v} | {"dtype": dtype}
    if sizes.get("norm"):
        given |= {name: upload(gpu, v[name]) for name in ("gamma", "beta", "sums") if name in v} | {"eps": v["eps"]}
    return Layer(gpu, launcher, v, given, *(upload(gpu, v[name]) for name in ("x", "weight", "bias")))


def check_beside_linear(gpu: GpuBackend, op: Op, launcher: Launcher, dtype: str, activation: str, **sizes: Any) -> None:
    """Compare a layer, with an activation or a "residual", with `layer_norm`, if it has one, and `linear`.

    To the bit on the host, where it runs the same references; else to the op's tolerance, or what a rounding of each x
    may come to where the op has no rounded LayerNorm.
    """
    residual, activation = activation == "residual", "none" if activation == "residual" else activation
    layer = layer_of(gpu, op, launcher, dtype, **sizes, residual=residual)
    before, n, k = layer.v["out"], layer.v["n"], layer.v["k"]
    source, apart, out = layer.x, upload(gpu, before), upload(gpu, before)
    if sizes.get("norm"):
        source, beta = upload(gpu, np.zeros_like(layer.v["x"])), upload(gpu, beta_of(dtype, **sizes))
        norm = {name: layer.given[name] for name in ("eps", "dtype")} | {"rows": layer.rows, "width": k}
        layer_norm(gpu, layer.x, layer.given["gamma"], beta, source, **norm)
    space = scratch_bytes(layer.rows, n, k, dtype, activation)
    scratch: Any = {"workspace": gpu.alloc(space) if space else 0, "workspace_bytes": space}
    options: Any = {"activation": activation, "residual": residual}
    linear(gpu, source, layer.weight, layer.bias, apart, rows=layer.rows, n=n, k=k, dtype=dtype, **options, **scratch)
    layer(out, **options)
    gpu.synchronize()
    found, expected = download(gpu, out, before), download(gpu, apart, before)
    assert (found != before).any()
    sums = sizes.get("norm", False) and "sums" in layer.v
    if gpu.kind() == "host" and not sums:
        assert found.tobytes() == expected.tobytes()
    else:  # both are rounded
        close(found, expected, (4 if sums else 2) * op.spec.tolerance.of(dtype), "out")


def check_in_place(gpu: GpuBackend, op: Op, launcher: Launcher, dtype: str, kv_from: int, **sizes: Any) -> None:
    """Compare a layer whose last columns go into the KV cache with the same one and `kv_scatter` after it, to the bit.

    And not a byte beside it is written, neither of the rows of ``out`` nor of the spans.
    """
    depth, stride, offset = 4, 40, 5
    layer = layer_of(gpu, op, launcher, dtype, **sizes)
    rows, n, before = layer.rows, layer.v["n"], layer.v["out"]
    pool = np.arange(rows * depth * stride).reshape(rows, -1).astype(dtypes.NUMPY[dtype])
    whole, out, here, there = (upload(gpu, array) for array in (before, before, pool, pool))
    positions = upload(gpu, ((np.arange(rows) * 3 + 2) % depth).astype(np.int32))
    shuffled = np.random.default_rng(0).permutation(rows) * pool[0].nbytes
    spans = [upload(gpu, (int(one) + shuffled).astype(np.uint64)) for one in (here, there)]
    layer(whole)
    if kv_from < n:
        place: Any = {"rows": rows, "width": n - kv_from, "src_stride": n, "offset": offset, "kv_stride": stride}
        source = int(whole) + kv_from * dtypes.itemsize(dtype)
        kv_scatter(gpu, source, spans[0], positions, **place, dtype=dtype)
    strides: Any = {"kv_stride": stride} | ({"out_stride": n} if "rows" in sizes else {})
    layer(out, spans=spans[1], positions=positions, kv_from=kv_from, kv_offset=offset, **strides)
    gpu.synchronize()
    assert download(gpu, there, pool).tobytes() == download(gpu, here, pool).tobytes()
    found, expected = (download(gpu, ptr, before).reshape(rows, n) for ptr in (out, whole))
    assert found[:, :kv_from].tobytes() == expected[:, :kv_from].tobytes()
    assert found[:, kv_from:].tobytes() == before.reshape(rows, n)[:, kv_from:].tobytes()


# on a GPU: every plan


@dataclass(frozen=True)
class Way:
    """A plan of an op by its key, whatever the rows, started early or in the usual way; what it writes to ``out``."""

    op: Op
    gpu: GpuBackend
    dtype: str
    key: Hashable
    early: bool

    def __call__(self, values: Values) -> Array:
        return run(self.op, self.gpu, self.dtype, values)["out"]

    def __str__(self) -> str:
        return f"{self.key}, {'early' if self.early else 'as usual'}"


def ways(op: Op, plans: Plans, gpu: GpuBackend, dtype: str, values: Values) -> Iterator[Way]:
    """Yield every way to launch an op that has rows."""
    for key in plans(values, dtype, gpu.limits()):
        for early in (True, False):

            def plan(*sizes: Any, key: Hashable = key, early: bool = early) -> LaunchPlan:
                return replace(plans(*sizes)[key], programmatic=early)

            yield Way(replace(op, plan=plan), gpu, dtype, key, early)
        gpu.sweep_unreleased()


def check_rows(gpu: GpuBackend, op: Op, plans: Plans, most: int, dtype: str, sizes: dict[str, Any]) -> None:
    """Check that every plan is right, and a row's bits those of any launch by it: of any rows, at any place."""
    whole = drawn(op, dtype, rows=most, **sizes)
    exact, bits = ORACLES[op.spec.name](whole)["out"], dict[Hashable, bytes]()
    for way in ways(op, plans, gpu, dtype, whole):
        all_rows = way(whole)
        close(all_rows, exact, op.spec.tolerance.of(dtype), str(way))
        assert bits.setdefault(way.key, all_rows.tobytes()) == all_rows.tobytes(), str(way)
        for rows in range(1, most if way.early else 1):
            order = np.roll(np.arange(most), 7 * rows)[:rows]
            part = {**whole, "x": whole["x"][order], "out": whole["out"][order], "rows": rows}
            assert way(part).tobytes() == all_rows[order].tobytes(), (str(way), rows)


def check_bad_rows(gpu: GpuBackend, op: Op, plans: Plans, dtype: str, sizes: dict[str, Any]) -> None:
    """Check that rows with a NaN are NaN, and that the others do not notice."""
    values = drawn(op, dtype, rows=21, **sizes)
    bad = np.array([0, 3, 9, 11, 16, 20])
    good = np.setdiff1d(np.arange(21), bad)
    spoilt = values["x"].copy()
    spoilt[bad, bad * 37 % sizes["k"]] = np.nan
    for way in ways(op, plans, gpu, dtype, values):
        sound, found = way(values), way({**values, "x": spoilt})
        assert found[good].tobytes() == sound[good].tobytes(), str(way)
        assert np.isnan(found[bad][:, : sizes["n"]].astype(np.float32)).all(), str(way)


def check_odd_rows(gpu: GpuBackend, op: Op, plans: Plans, dtype: str, **sizes: Any) -> None:
    """Check that rows of x that lie an odd number of elements apart, and so are not aligned, give the same bits."""
    values = drawn(op, dtype, rows=19, x_pad=8, **sizes)
    odd = {**values, "x": np.pad(values["x"], ((0, 0), (0, 1))), "x_stride": sizes["k"] + 9}
    for way in ways(op, plans, gpu, dtype, values):
        assert way(odd).tobytes() == way(values).tobytes(), str(way)


def check_moved(gpu: GpuBackend, op: Op, dtype: str, v: Mapping[str, Any]) -> None:
    """Check that the bits are the same with each array in turn an element past a multiple of 16 bytes."""
    arrays = {name: v[name] for arg in op.spec.args if (name := arg.name) in v and isinstance(v[name], np.ndarray)}

    def result(moved: str) -> bytes:
        at = {}
        for name, array in arrays.items():
            shift = int(name == moved)
            at[name] = int(upload(gpu, np.concatenate([array.ravel()[:shift], array.ravel()]))) + shift * array.itemsize
        op.launch(gpu, dtype, [at.get(arg.name, 0) if arg.is_pointer else v[arg.name] for arg in op.spec.args])
        gpu.synchronize()
        return download(gpu, at["out"], v["out"]).tobytes()

    assert len({result(name) for name in ("", *arrays)}) == 1
    gpu.sweep_unreleased()


def check_chain(gpu: GpuBackend, op: Op, launcher: Launcher, dtype: str, d: int, **sizes: Any) -> None:
    """Check that layers of which each reads what the one ahead wrote, many times over without a wait, are in order."""
    layer, steps = layer_of(gpu, op, launcher, dtype, n=d, k=d, **sizes), 40
    x = layer.v["x"]

    def result(wait: bool) -> bytes:
        ends = [gpu.alloc(x.nbytes), gpu.alloc(x.nbytes)]
        gpu.copy_d2d(layer.x, ends[0], x.nbytes)
        for step in range(steps):
            layer(ends[1 - step % 2], x=ends[step % 2])
            if wait:
                gpu.synchronize()
        gpu.synchronize()
        return download(gpu, ends[steps % 2], x).tobytes()

    apart = result(wait=True)
    assert all(result(wait=False) == apart for _ in range(20))
