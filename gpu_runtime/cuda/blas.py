# SPDX-License-Identifier: MIT OR Apache-2.0
"""Matrix products by cuBLASLt, through NVIDIA's own bindings, which may be captured.

cuBLASLt thinks in columns. Row-major ``C[m, n] = A[m, k] W[n, k]^T`` is column-major ``C^T = W A^T``: W is its first
operand, transposed, A its second, and a bias of n elements is one per row of ``C^T``, which is what its epilogue adds.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cupy.cuda import driver
from nvmath.bindings import cublasLt

from gpu_runtime import dtypes
from gpu_runtime.cuda.driver import Context, failure
from gpu_runtime.cuda.modules import OwnModule
from gpu_runtime.errors import BackendUnavailable, DeviceError
from gpu_runtime.gemm import ACTIVATIONS, WORKSPACE_ALIGNMENT, Gemm

_DATA_TYPES: Final = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType_t
_COMPUTE_F32: Final = 68  # CUBLAS_COMPUTE_32F: float32 accumulation, and no TF32
_TRANSPOSE: Final = 1
_MOST_ALGORITHMS: Final = 16
_MOST_CHOSEN: Final = 1024  # requests whose algorithms are kept; past this many, all are forgotten
_EPILOGUES: Final = {
    ("none", False): cublasLt.Epilogue.DEFAULT,
    ("none", True): cublasLt.Epilogue.BIAS,
    ("relu", False): cublasLt.Epilogue.RELU,
    ("relu", True): cublasLt.Epilogue.RELU_BIAS,
    ("gelu_tanh", False): cublasLt.Epilogue.GELU,
    ("gelu_tanh", True): cublasLt.Epilogue.GELU_BIAS,
}
# Sums that are split are added up in float32, never in a 16-bit output.
_REDUCTIONS: Final = cublasLt.ReductionScheme.COMPUTE_TYPE | cublasLt.ReductionScheme.NONE


def _fused(problem: Gemm) -> bool:
    """Whether cuBLASLt's own epilogue does all that follows the product.

    Its bias has the type of C, and its GELU is an approximation that float32 would show.
    """
    if problem.out_dtype != problem.dtype:
        return False
    return problem.activation in ("none", "relu") or (problem.activation == "gelu_tanh" and problem.dtype != "f32")


@dataclass(frozen=True, slots=True)
class _Request:
    """What an algorithm is chosen for: the product, its epilogue, the alignment of W, A and C, and the workspace."""

    problem: Gemm
    target: str
    biased: bool
    alignment: tuple[int, int, int]
    workspace: int


class _Described:
    """The descriptors of a product with one bias, and the float32 factors."""

    __slots__ = ("a", "alpha", "beta", "c", "operation", "w")

    def __init__(self, request: _Request, bias: int) -> None:
        p = request.problem
        self.operation = cublasLt.matmul_desc_create(_COMPUTE_F32, _DATA_TYPES["f32"])
        _set(self.operation, cublasLt.MatmulDescAttribute.TRANSA, _TRANSPOSE)
        if _fused(p):
            _set(self.operation, cublasLt.MatmulDescAttribute.EPILOGUE, _EPILOGUES[p.activation, bool(bias)])
            if bias:
                _set(self.operation, cublasLt.MatmulDescAttribute.BIAS_POINTER, bias)
        self.w = _layout(p.dtype, p.k, p.n, p.ldw, p.batch, p.stride_w)
        self.a = _layout(p.dtype, p.k, p.m, p.lda, p.batch, p.stride_a)
        scratch = request.target == "scratch"
        step, stride = (p.m * p.n, p.n) if scratch else (p.stride_c, p.ldc)
        self.c = _layout("f32" if scratch else p.out_dtype, p.n, p.m, stride, p.batch, step)
        self.alpha = np.array([p.alpha], dtype=np.float32)
        self.beta = np.array([0.0 if scratch else float(p.accumulate)], dtype=np.float32)

    def __del__(self) -> None:
        with suppress(cublasLt.cuBLASLtError, AttributeError):  # the latter when the constructor failed half way
            cublasLt.matmul_desc_destroy(self.operation)
            for layout in (self.w, self.a, self.c):
                cublasLt.matrix_layout_destroy(layout)


def _set(operation: int, attribute: Any, value: int) -> None:
    cell = np.array([value], dtype=cublasLt.get_matmul_desc_attribute_dtype(attribute))
    cublasLt.matmul_desc_set_attribute(operation, attribute, cell.ctypes.data, cell.nbytes)


def _layout(dtype: str, rows: int, columns: int, stride: int, batch: int, step: int) -> int:
    layout = int(cublasLt.matrix_layout_create(_DATA_TYPES[dtype], rows, columns, stride))
    if batch > 1:
        names = cublasLt.MatrixLayoutAttribute
        for attribute, value in ((names.BATCH_COUNT, batch), (names.STRIDED_BATCH_OFFSET, step)):
            cell = np.array([value], dtype=cublasLt.get_matrix_layout_attribute_dtype(attribute))
            cublasLt.matrix_layout_set_attribute(layout, attribute, cell.ctypes.data, cell.nbytes)
    return layout


@dataclass(frozen=True, slots=True)
class Prepared:
    """One product, ready to be enqueued again and again."""

    arguments: tuple[int, ...]
    described: _Described
    algorithms: Any
    finish: tuple[tuple[int, ...], int, Any] | None


class Blas:
    """Products on one device.

    Parameters
    ----------
    context : Context
    arch : str
        What the finishing kernel is compiled for.
    cache : Path or None
    """

    def __init__(self, context: Context, arch: str, cache: Path | None) -> None:
        self._context = context
        self._module = OwnModule(context, "gemm_epilogue.cu", arch, cache)
        self._lock = threading.Lock()
        self._chosen: dict[_Request, Any] = {}
        with context.current():
            try:
                self._handle = int(cublasLt.create())
            except Exception as error:  # the bindings raise several kinds when the library is missing or broken
                raise BackendUnavailable(
                    f"cuBLASLt cannot be used: {error}: pip install nvidia-cublas-cu12 (the extra cuda12 brings it)"
                ) from error

    @staticmethod
    def _attempt(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except cublasLt.cuBLASLtError as error:
            raise failure(function.__name__, (), error) from None

    def prepare(
        self,
        problem: Gemm,
        addresses: tuple[int, int, int, int],
        workspace: int,
        workspace_bytes: int,
        algorithm: int | None,
    ) -> Prepared:
        """Choose an algorithm and describe a product whose operands have been checked.

        Parameters
        ----------
        problem : Gemm
        addresses : tuple of int
            A, W, C and the bias (0: none).
        workspace, workspace_bytes : int
            At least `Gemm.scratch_bytes`; cuBLASLt gets what is left.
        algorithm : int or None
            Place among those that cuBLASLt proposes, best first; None takes the best.

        Raises
        ------
        ValueError
            When there are not as many algorithms.
        DeviceError
            When there is none.
        """
        a, w, c, bias = addresses
        taken = -(-problem.scratch_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        spare = max(workspace_bytes - taken, 0)
        target, into = ("scratch", workspace) if taken else ("c", c)
        alignment = (
            _alignment(w, problem.stride_w, problem.dtype),
            _alignment(a, problem.stride_a, problem.dtype),
            _alignment(
                into, problem.m * problem.n if taken else problem.stride_c, "f32" if taken else problem.out_dtype
            ),
        )
        request = _Request(problem, target, bool(bias), alignment, spare)
        with self._context.current():
            described = _Described(request, bias)
            algorithms = self._algorithms(request, described)
        place = algorithm or 0
        if place >= len(algorithms):
            raise ValueError(f"gemm: algorithm: expected 0 to {len(algorithms) - 1} for this product, got {place}")
        arguments = (
            self._handle,
            described.operation,
            described.alpha.ctypes.data,
            w,
            described.w,
            a,
            described.a,
            described.beta.ctypes.data,
            into,
            described.c,
            into,
            described.c,
            algorithms.ctypes.data + place * algorithms.itemsize,
            workspace + taken if spare else 0,
            spare,
        )
        return Prepared(arguments, described, algorithms, self._finish(problem, addresses, into if taken else 0))

    def _algorithms(self, request: _Request, described: _Described) -> Any:
        """Return cuBLASLt's proposals, best first, as an array of ``cublasLtMatmulAlgo_t``."""
        with self._lock:
            found = self._chosen.get(request)
            if found is None:
                if len(self._chosen) >= _MOST_CHOSEN:
                    self._chosen.clear()
                found = self._chosen[request] = self._choose(request, described)
        return found

    def _choose(self, request: _Request, described: _Described) -> Any:
        preference = self._attempt(cublasLt.matmul_preference_create)
        names = cublasLt.MatmulPreferenceAttribute
        wishes = (
            (names.MAX_WORKSPACE_BYTES, request.workspace),
            (names.REDUCTION_SCHEME_MASK, int(_REDUCTIONS)),
            (names.MIN_ALIGNMENT_A_BYTES, request.alignment[0]),
            (names.MIN_ALIGNMENT_B_BYTES, request.alignment[1]),
            (names.MIN_ALIGNMENT_C_BYTES, request.alignment[2]),
            (names.MIN_ALIGNMENT_D_BYTES, request.alignment[2]),
        )
        try:
            for attribute, value in wishes:
                cell = np.array([value], dtype=cublasLt.get_matmul_preference_attribute_dtype(attribute))
                cublasLt.matmul_preference_set_attribute(preference, attribute, cell.ctypes.data, cell.nbytes)
            results = np.zeros(_MOST_ALGORITHMS, dtype=cublasLt.matmul_heuristic_result_dtype)
            count = np.zeros(1, dtype=np.int32)
            layouts = (described.w, described.a, described.c, described.c)
            where = (preference, _MOST_ALGORITHMS, results.ctypes.data, count.ctypes.data)
            try:
                cublasLt.matmul_algo_get_heuristic(self._handle, described.operation, *layouts, *where)
            except cublasLt.cuBLASLtError as error:
                raise DeviceError(f"gemm: cuBLASLt has no algorithm for {request.problem}: {error}") from None
        finally:
            cublasLt.matmul_preference_destroy(preference)
        usable = results[: count[0]]
        usable = usable[usable["state"] == 0]
        if not len(usable):
            raise DeviceError(f"gemm: cuBLASLt has no algorithm for {request.problem}")
        return np.ascontiguousarray(usable["algo"])

    def _finish(
        self, p: Gemm, addresses: tuple[int, int, int, int], scratch: int
    ) -> tuple[tuple[int, ...], int, Any] | None:
        """Return geometry, parameters and their memory of the kernel that ends the product, if one must."""
        _, _, c, bias = addresses
        if _fused(p) or not (scratch or bias or p.activation != "none"):
            return None
        product = (scratch, p.n, p.m * p.n) if scratch else (c, p.ldc, p.stride_c)
        cells = [
            ctypes.c_uint64(product[0]),
            ctypes.c_uint64(bias),
            ctypes.c_uint64(c),
            *map(ctypes.c_int32, (p.m, p.n, p.batch)),
            *map(ctypes.c_int64, (*product[1:], p.ldc, p.stride_c)),
            ctypes.c_int32(dtypes.FLOAT_TYPES.index(p.dtype) + 1 if bias else 0),
            ctypes.c_int32(tuple(ACTIVATIONS).index(p.activation)),
            ctypes.c_int32(bool(scratch) and p.accumulate),
        ]
        params = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        rows, columns = min(p.m * p.batch, 1 << 20), min(-(-p.n // 256), 65535)
        geometry = (self._module.function(f"gemm_epilogue_{p.out_dtype}"), rows, columns, 1, 256, 1, 1, 0)
        return geometry, ctypes.addressof(params), (cells, params)

    def enqueue(self, prepared: Prepared, stream: int) -> None:
        """Enqueue a prepared product."""
        if driver.ctxGetCurrent() != self._context.handle:
            with self._context.current():
                self.enqueue(prepared, stream)
            return
        self._attempt(cublasLt.matmul, *prepared.arguments, stream)
        if prepared.finish is not None:
            geometry, params, _ = prepared.finish
            self._context.call(driver.launchKernel, *geometry, stream, params, 0)

    def close(self) -> None:
        """Give cuBLASLt's handle back."""
        with self._context.current():
            self._attempt(cublasLt.destroy, self._handle)
        self._module.close()


def _alignment(address: int, step: int, dtype: str) -> int:
    """Return the alignment in bytes, up to 256, that every matrix of an operand has."""
    bits = address | step * dtypes.itemsize(dtype) | 256
    return bits & -bits
