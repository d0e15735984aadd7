# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every registered op, for every dtype and edge shape, against float64 formulae on each backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import metrale.ops  # noqa: F401  (registers the ops)
from gpu_runtime import AddressTable, GpuBackend, Op
from gpu_runtime.op import REGISTRY
from tests.ops.harness import cases_of, run, seed_of
from tests.ops.oracles import ORACLES

OPS = list(REGISTRY)


def close(result: Any, exact: Any, tolerance: float, what: str) -> None:
    """Assert that a result is finite where the exact one is, and within ``tolerance`` of its largest element."""
    result, exact = np.asarray(result, dtype=np.float64), np.asarray(exact, dtype=np.float64)
    assert np.array_equal(np.isfinite(result), np.isfinite(exact)), f"{what}: not finite"
    finite = np.isfinite(exact)
    error = np.abs(result[finite] - exact[finite]).max(initial=0)
    limit = tolerance * np.abs(exact[finite]).max(initial=0)
    assert error <= limit, f"{what}: error {error:.3g}, tolerance {limit:.3g}"


@pytest.mark.parametrize(("op", "dtype", "case"), cases_of(OPS))
def test_result(gpu: GpuBackend, op: Op, dtype: str, case: Mapping[str, Any]) -> None:
    inputs = op.make_inputs(np.random.default_rng(seed_of(op, dtype, case)), dtype, **case)
    results = run(op, gpu, dtype, inputs)
    expected = ORACLES[op.spec.name](inputs)
    written = {arg.name for arg in op.spec.args if arg.role in ("out", "inout") and inputs[arg.name] is not None}
    written |= {name for name, value in inputs.items() if isinstance(value, AddressTable) and value.role == "inout"}
    assert set(expected) == written - {arg.name for arg in op.spec.args if arg.is_scratch}
    for name, exact in expected.items():
        close(results[name], exact, op.spec.tolerance.of(dtype), name)
    for name in set(results) - written:
        before = inputs[name]
        array = before.pool if isinstance(before, AddressTable) else before
        assert isinstance(array, np.ndarray)
        assert results[name].tobytes() == array.tobytes(), f"{name}: an input was written"


@pytest.mark.parametrize(
    ("op", "alias"),
    [pytest.param(op, pair, id=f"{op.spec.name}-{pair[1]}-is-{pair[0]}") for op in OPS for pair in op.spec.aliases],
)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_in_place(gpu: GpuBackend, op: Op, alias: tuple[str, str], dtype: str) -> None:
    case = op.cases[1]
    inputs = op.make_inputs(np.random.default_rng(seed_of(op, dtype, case)), dtype, **case)
    results = run(op, gpu, dtype, inputs, alias)
    apart = run(op, gpu, dtype, inputs)
    assert results[alias[1]].tobytes() == apart[alias[1]].tobytes()


@pytest.mark.parametrize("op", [op for op in OPS if op.spec.tolerance.f32 > 0], ids=lambda op: op.spec.name)
def test_no_tolerance_passes_an_all_zero_result(op: Op) -> None:
    """The widest one of an op does not."""
    dtype = max(op.spec.dtypes, key=op.spec.tolerance.of)
    for case in op.cases:
        inputs = op.make_inputs(np.random.default_rng(seed_of(op, dtype, case)), dtype, **case)
        for name, exact in ORACLES[op.spec.name](inputs).items():
            with pytest.raises(AssertionError):
                close(np.zeros_like(exact), exact, op.spec.tolerance.of(dtype), name)


def test_a_result_with_nan_fails() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        close([1.0, np.nan], [1.0, 2.0], 0.5, "out")
