# SPDX-License-Identifier: MIT OR Apache-2.0
"""The workspace of a product: how much some cannot do without, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, dtypes
from gpu_runtime.gemm import ACTIVATIONS, Gemm
from tests.backends import damaged
from tests.ops.harness import download, upload
from tests.ops.oracles import ACTIVATIONS as EXACT

M, N, K = 3, 8, 16


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("out_dtype", ["f32", "f16", "bf16"])
def test_scratch_is_one_float32_result_where_no_library_epilogue_serves(activation: str, out_dtype: str) -> None:
    problem = Gemm.of(5, 7, 9, "bf16", out_dtype, None, None, None, 1.0, activation)
    needed = out_dtype == "f16" or (activation in ("gelu", "silu") and out_dtype == "bf16")
    assert problem.scratch_bytes == (5 * 7 * 4 if needed else 0)


def multiply(gpu: GpuBackend, c: int, dtype: str, activation: str, **options: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(11)
    a, w = (rng.standard_normal(shape).astype(dtypes.NUMPY[dtype]) for shape in ((M, K), (N, K)))
    gpu.gemm(upload(gpu, a), upload(gpu, w), c, M, N, K, dtype=dtype, activation=activation, **options)
    return a.astype(np.float64), w.astype(np.float64)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("extra", [0, 4096])
def test_with_the_scratch_it_asks_for_it_is_right(gpu: GpuBackend, dtype: str, activation: str, extra: int) -> None:
    """The tolerance is one rounding of the output's type, and 1e-5 for float32 sums of 16 products."""
    nbytes = M * N * 4 + extra
    c = upload(gpu, np.full((M, N), 77, dtype=dtypes.NUMPY[dtype]))
    space = gpu.alloc(nbytes)
    a, w = multiply(gpu, c, dtype, activation, workspace=space, workspace_bytes=nbytes)
    result = download(gpu, c, np.empty((M, N), dtypes.NUMPY[dtype])).astype(np.float64)
    exact = np.vectorize(EXACT[activation])(a @ w.T)
    unit = {"f16": 2**-11, "bf16": 2**-8}[dtype]
    assert np.isfinite(result).all()
    assert np.abs(result - exact).max() <= (unit + 1e-5) * np.abs(exact).max()
    assert not damaged(gpu)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("missing", [1, M * N * 4])
def test_too_little_is_refused_before_anything_is_enqueued(gpu: GpuBackend, activation: str, missing: int) -> None:
    c, nbytes = gpu.alloc(M * N * 2), M * N * 4 - missing
    space = gpu.alloc(nbytes) if nbytes else 0
    with gpu.launch_trace() as trace, pytest.raises(ValueError, match=f"gemm: workspace_bytes: .* 96 .*, got {nbytes}"):
        multiply(gpu, c, "bf16", activation, workspace=space, workspace_bytes=nbytes)
    assert [record.kind for record in trace if record.kind == "gemm"] == []


def test_a_workspace_is_aligned(gpu: GpuBackend) -> None:
    c, space = gpu.alloc(M * N * 2), gpu.alloc(1024)
    with pytest.raises(ValueError, match="gemm: workspace: expected an address aligned to 256 bytes"):
        multiply(gpu, c, "bf16", "none", workspace=space.offset(128), workspace_bytes=512)
    multiply(gpu, c, "bf16", "none", workspace=space.offset(256), workspace_bytes=512)
