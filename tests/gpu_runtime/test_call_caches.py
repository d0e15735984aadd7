# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls that a backend keeps for the next one with the same arguments: a kept one never stands for another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from tests.backends import host_only
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


class Ref:
    """A number that an object stands for, as a buffer stands for its address; it may change."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)


@pytest.mark.parametrize("kind", [Ref, lambda value: np.array(value, dtype=np.uint64)], ids=["object", "array"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("x", [20, 40, 60, 80]), ("bias", [12, 24, 36, 48]), ("width", [3, 6, 0, 0]), ("out", [3, 6, 9, 12])],
)
def test_a_launch_reads_its_arguments_anew(gpu: GpuBackend, kind: Any, name: str, expected: list[float]) -> None:
    first, second, outs = upload(gpu, X), upload(gpu, 10 * X), [upload(gpu, np.zeros_like(X)) for _ in range(2)]
    before, after = {"x": (first, second), "bias": (first, second), "width": (4, 2), "out": tuple(outs)}[name]
    held = kind(int(before))
    given: dict[str, Any] = {"x": first, "out": outs[0], "bias": 0 if name == "x" else first} | {name: held}
    for _ in range(2):
        launch(gpu, values(**given))
    gpu.memset(outs[0], 0, 16)
    if isinstance(held, Ref):
        held.value = int(after)
    else:
        held[...] = int(after)
    launch(gpu, values(**given))
    assert download(gpu, outs[1] if name == "out" else outs[0], X).tolist() == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("a", 301), ("w", 301), ("c", 31), ("bias", 40), ("k", 6), ("alpha", 61), ("m", 301)]
)
def test_a_product_reads_its_arguments_anew(gpu: GpuBackend, name: str, expected: float) -> None:
    first, second = upload(gpu, np.stack([X, 10 * X])), upload(gpu, 10 * X)
    outs = [upload(gpu, np.zeros(2, np.float32)) for _ in range(2)]
    pairs = {"a": (first, second), "w": (first, second), "c": tuple(outs), "bias": (first, second)}
    before, after = (pairs | {"k": (4, 2), "alpha": (1, 2), "m": (1, 2)})[name]
    held = Ref(int(before))
    given: dict[str, Any] = {"a": first, "w": first, "c": outs[0], "m": 1, "n": 1, "k": 4, "bias": first, "lda": 4}
    for _ in range(2):
        gpu.gemm(**(given | {name: held}), dtype="f32")
    gpu.memset(outs[0], 0, 8)
    held.value = int(after)
    gpu.gemm(**(given | {name: held}), dtype="f32")
    result = download(gpu, outs[1] if name == "c" else outs[0], np.empty(2, np.float32))
    assert result[1 if name == "m" else 0] == expected


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_both_signs_are_two_factors(gpu: GpuBackend, kind: Any, first: float) -> None:
    x, out = upload(gpu, X), upload(gpu, X)
    for factor in (first, first, -first, first):
        launch(gpu, values(x, out, factor=kind(factor)))
        result = download(gpu, out, X)
        assert not result.any()
        assert np.signbit(result).tolist() == [bool(np.signbit(factor))] * 4


def test_zeros_of_both_signs_are_two_alphas(gpu: GpuBackend) -> None:
    """What a library makes of a factor of -0.0 is its own affair, but not what it was called with before."""
    x, out = upload(gpu, X), upload(gpu, np.ones(1, np.float32))
    signs: dict[bool, set[bool]] = {False: set(), True: set()}
    for alpha in (-0.0, 0.0, -0.0, 0.0):
        gpu.gemm(x, x, out, 1, 1, 4, dtype="f32", alpha=alpha)
        (result,) = download(gpu, out, np.empty(1, np.float32))
        assert result == 0
        signs[bool(np.signbit(alpha))].add(bool(np.signbit(result)))
    assert [len(found) for found in signs.values()] == [1, 1]
    assert signs[False] == {False}
    if gpu.kind() == "host":
        assert signs[True] == {True}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grid", True),
        ("grid", 1.0),
        ("grid", (True,)),
        ("grid", (1.0,)),
        ("block", True),
        ("block", (1.0,)),
        ("shared", False),
        ("shared", 0.0),
        ("stream", False),
        ("stream", 0.0),
        ("cluster", True),
        ("cluster", 1.0),
        ("rows", True),
        ("rows", 1.0),
        ("bias", False),
        ("bias", 0.0),
        ("factor", True),
    ],
    ids=str,
)
def test_a_launch_that_is_equal_need_not_be_as_good(gpu: GpuBackend, name: str, wrong: Any) -> None:
    """1, True and 1.0 are equal and hash equally; the others are refused before and after 1 came."""
    handle = gpu.kernel("toy", "toy_f32")
    x, out = upload(gpu, X), upload(gpu, np.zeros_like(X))
    one: Any = (1,) if isinstance(wrong, tuple) else 1
    sound: dict[str, Any] = {"grid": one, "block": one, "shared": 0, "stream": 0, "cluster": 1}
    sound |= {"rows": 1, "bias": 0, "factor": 1.0}

    def run(grid: Any, block: Any, shared: Any, stream: Any, cluster: Any, **scalars: Any) -> None:
        gpu.launch(handle, grid, block, shared, stream, values(x, out, **scalars), cluster=cluster)

    for _ in range(2):
        with pytest.raises(TypeError):
            run(**(sound | {name: wrong}))
        assert not download(gpu, out, X).any()
        for _ in range(2):
            run(**sound)
        assert download(gpu, out, X).tolist() == X.tolist()
        gpu.memset(out, 0, 16)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("m", True),
        ("n", 1.0),
        ("lda", 4.0),
        ("alpha", True),
        ("bias", False),
        ("bias", 0.0),
        ("workspace", False),
        ("workspace_bytes", False),
        ("algorithm", False),
        ("algorithm", 0.0),
        ("stream", False),
    ],
    ids=str,
)
def test_a_product_that_is_equal_need_not_be_as_good(gpu: GpuBackend, name: str, wrong: Any) -> None:
    x, out = upload(gpu, X), upload(gpu, np.zeros(1, np.float32))
    sound: dict[str, Any] = {"a": x, "w": x, "c": out, "m": 1, "n": 1, "k": 4, "lda": 4, "alpha": 1.0, "bias": 0}
    sound |= {"workspace": 0, "workspace_bytes": 0, "algorithm": 0, "stream": 0, "dtype": "f32"}
    for _ in range(2):
        with pytest.raises(TypeError):
            gpu.gemm(**(sound | {name: wrong}))
        assert not download(gpu, out, np.empty(1, np.float32)).any()
        for _ in range(2):
            gpu.gemm(**sound)
        assert download(gpu, out, np.empty(1, np.float32)).tolist() == [30]
        gpu.memset(out, 0, 4)


@host_only
def test_what_is_kept_is_bounded(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new launches and products; tests/gpu has the same for a GPU's three caches."""
    monkeypatch.setattr("gpu_runtime.host.prepared._MOST_KEPT", 8)
    x, out = upload(gpu, X), upload(gpu, X)
    kept: Any = gpu
    sizes = []
    for index in range(1, 30):
        launch(gpu, values(x, out, factor=float(index)))
        gpu.gemm(x, x, out, 1, 1, 4, dtype="f32", alpha=float(index))
        sizes.append(len(kept._prepared._kept))
    assert max(sizes) == 8
    assert download(gpu, out, X)[0] == 29 * 30
