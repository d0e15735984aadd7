# SPDX-License-Identifier: MIT OR Apache-2.0
"""A trial of the CUDA backend: a kernel is compiled and run, and a matrix product, and both results are compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.config import Config
from gpu_runtime.opening import open_backend
from metrale import ops

_ROWS, _WIDTH = 5, 256
_LAYER_NORM_ERROR = 2e-6  # float32, relative to the largest element; the op's own tolerance
_PRODUCT_ERROR = 2**-11 + 1e-5  # one rounding to float16, and float32 sums of 256 products


def probe() -> dict[str, Any]:
    """Return the device's ``name`` and the largest relative error of the kernel and of the product.

    It tries the GPU that ``METRALE_DEVICE`` names, or else the first one that can be used.

    Raises
    ------
    BackendUnavailable
        When there is none.
    RuntimeError
        When a result is wrong.
    """
    wanted = Config.from_env().device
    with open_backend(wanted if wanted.startswith("cuda") else "cuda") as gpu:
        return {"name": gpu.name(), "layer_norm_error": try_kernel(gpu), "product_error": try_product(gpu)}


def try_kernel(gpu: GpuBackend) -> float:
    """Normalise random rows on a stream of its own and return the largest error, relative to the largest element."""
    x = np.random.default_rng(1).standard_normal((_ROWS, _WIDTH)).astype(np.float32)
    ones, zeros, out = np.ones(_WIDTH, np.float32), np.zeros(_WIDTH, np.float32), np.empty_like(x)
    stream = gpu.create_stream()
    place = gpu.alloc(2 * x.nbytes + 2 * ones.nbytes, tag="trial of a kernel")
    result, weight = place.offset(x.nbytes), place.offset(2 * x.nbytes)
    bias = weight.offset(ones.nbytes)
    for array, at in ((x, place), (ones, weight), (zeros, bias)):
        gpu.copy_h2d_async(array, at, stream)
    ops.layer_norm(gpu, place, weight, bias, result, rows=_ROWS, width=_WIDTH, eps=1e-5, dtype="f32", stream=stream)
    gpu.copy_d2h_on_stream(result, out, stream)
    gpu.free(place)
    gpu.destroy_stream(stream)
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
    exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return _error("layer_norm", out, exact, _LAYER_NORM_ERROR)


def try_product(gpu: GpuBackend) -> float:
    """Multiply random float16 matrices and return the largest error, relative to the largest element."""
    half = dtypes.NUMPY["f16"]
    rng = np.random.default_rng(2)
    a, w = (rng.standard_normal((rows, _WIDTH)).astype(half) for rows in (_ROWS, 64))
    out = np.empty((_ROWS, 64), dtype=half)
    place = gpu.alloc(a.nbytes + w.nbytes + out.nbytes, tag="trial of a product")
    second, third = place.offset(a.nbytes), place.offset(a.nbytes + w.nbytes)
    gpu.copy_h2d(a, place)
    gpu.copy_h2d(w, second)
    gpu.gemm(place, second, third, _ROWS, 64, _WIDTH, dtype="f16")
    gpu.copy_d2h(third, out)
    gpu.free(place)
    return _error("product", out, a.astype(np.float64) @ w.astype(np.float64).T, _PRODUCT_ERROR)


def _error(what: str, result: Any, exact: Any, most: float) -> float:
    error = float(np.abs(result.astype(np.float64) - exact).max() / np.abs(exact).max())
    if not error <= most:  # a NaN is an error too
        raise RuntimeError(f"{what}: expected a relative error of at most {most:.3g}, got {error:.3g}")
    return error
