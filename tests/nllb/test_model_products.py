# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which op makes the products of a step's layers, by the number of rows, the type, and what the device has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.handles import LaunchRecord
from gpu_runtime.host import HostBackend
from metrale.nllb.model import NllbModel
from tests.nllb.backends import Clustered
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, head_product, prefilled

LAYERS: Final = 3 * 6
"""Products of the tiny model's decoder layers."""

LIMITS: Final = {"max_batch": 66, "max_new_tokens": 4, "step_graphs": False}


@pytest.fixture(params=[HostBackend, Clustered])
def gpu(request: pytest.FixtureRequest) -> Iterator[GpuBackend]:
    with request.param(check=True) as backend:
        yield backend


def own_products(trace: Sequence[LaunchRecord]) -> Counter[str]:
    """Return how many products our own ops make in a trace of launches, by op; "chained" ones have their own."""
    kernels = [one.name for one in trace if one.kind == "kernel"]
    ops = ("gemv", "thin_linear", "cluster_linear")
    chained = {name: " chained" if name.endswith("_chained") else "" for name in kernels}
    return Counter(op + chained[name] for op in ops for name in kernels if name.startswith(f"{op}_"))


def traced(model: NllbModel, rows: int) -> Sequence[LaunchRecord]:
    """Return the launches of a step of so many rows."""
    seqs = [prefilled(model, Case([5, 6, 7], 80, 81, [])) for _ in range(rows)]
    with model.gpu.launch_trace() as trace:
        model.decode_batch([9] * rows, seqs)
    for seq in seqs:
        model.free_sequence(seq)
    return trace


def products(model: NllbModel, rows: int) -> Counter[str]:
    """Return what makes the products of a step of so many rows, but for those that the head alone has."""
    trace = traced(model, rows)
    library = sum(one.kind == "gemm" and not one.name.endswith(head_product(model)) for one in trace)
    return Counter({"library": library}) + own_products(trace)  # no zeros


def heads(model: NllbModel, rows: int) -> Counter[str]:
    """Return what multiplies with the head in such a step, but for a `gemv`: that one is among its `products`."""
    trace = traced(model, rows)
    library = sum(one.kind == "gemm" and one.name.endswith(head_product(model)) for one in trace)
    return Counter({"library": library, "own": sum(one.name.startswith("head_linear_") for one in trace)}) + Counter()


def test_by_the_number_of_rows(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    model = make_tiny(dtype="bfloat16", **LIMITS)
    larger = "cluster_linear" if gpu.limits().max_cluster > 1 else "library"
    assert products(model, 1) == {"gemv": LAYERS + 1}  # and the head
    assert [products(model, rows) for rows in (2, 8)] == [{"thin_linear": LAYERS}] * 2
    assert [products(model, rows) for rows in (9, 64)] == [{larger: LAYERS}] * 2
    assert products(model, 65) == {"library": LAYERS}


def test_float32_goes_through_the_library(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    plain = make_tiny(dtype="float32", **LIMITS)
    assert [products(plain, rows) for rows in (1, 9)] == [{"library": LAYERS}] * 2


def test_kernels_of_one_order_alone_where_bits_must_not_depend_on_the_rows(
    make_tiny: MakeModel, gpu: GpuBackend
) -> None:
    model = make_tiny(dtype="bfloat16", batch_invariant=True, **LIMITS)
    larger = "cluster_linear chained" if gpu.limits().max_cluster > 1 else "thin_linear"
    assert [products(model, rows) for rows in (1, 8)] == [{"thin_linear": LAYERS}] * 2
    assert [products(model, rows) for rows in (9, 64)] == [{larger: LAYERS}] * 2
    assert products(model, 65) == {larger: 2 * LAYERS}


def test_the_head_by_the_number_of_rows(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    model = make_tiny(dtype="float16", **LIMITS)
    few = "own" if gpu.limits().max_cluster > 1 else "library"
    assert [heads(model, rows) for rows in (1, 2, 64, 65)] == [{}, {few: 1}, {few: 1}, {"library": 1}]
    assert heads(make_tiny(dtype="float32", **LIMITS), 2) == {"library": 1}


@pytest.mark.parametrize(("most", "own"), [(32, "own"), (31, "library")])
def test_a_head_that_is_too_wide_is_the_librarys(
    make_tiny: MakeModel, monkeypatch: pytest.MonkeyPatch, most: int, own: str
) -> None:
    """Where bits must not depend on the rows, by the one or the other whatever the rows are."""
    monkeypatch.setattr("metrale.nllb.limits.MOST_K", most)
    model = make_tiny(dtype="float16", batch_invariant=True, **LIMITS)
    assert [heads(model, rows) for rows in (1, 2, 64, 65)] == [{own: 1}] * 3 + [{own: 2}]


@pytest.fixture
def clustered() -> Iterator[GpuBackend]:
    with Clustered(check=True) as backend:
        yield backend


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clusters_compute_what_the_library_does(
    gpu: GpuBackend, clustered: GpuBackend, make_tiny: MakeModel, dtype: str
) -> None:
    """To the bit on the host, whose references are the same."""
    found = []
    for on in (gpu, clustered):
        model = make_tiny(on, dtype=dtype, **LIMITS)
        seqs = [prefilled(model, Case([5, 6, 7 + row], 80, 81, [])) for row in range(9)]
        base = model.decode_batch([9 + row for row in range(9)], seqs)
        rows = [base.offset(row * model.logits_row_bytes()) for row in range(9)]
        found.append(np.stack([model.copy_logits_to_host(row) for row in rows]))
    assert found[0].tobytes() == found[1].tobytes()
