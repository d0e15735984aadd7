# SPDX-License-Identifier: MIT OR Apache-2.0
"""The matrix product that every backend offers, and its NumPy reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_runtime import checks, dtypes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Gemm:
    """One row-major product ``C[m, n] = activation(alpha * A[m, k] @ W[n, k]^T + bias[n])``, or ``C += ...``.

    With ``accumulate`` the product and bias are added to what C holds; an activation cannot be combined with it,
    because cuBLASLt would apply it after the addition.

    Attributes
    ----------
    m, n, k : int
        Sizes. All at least 1.
    dtype, out_dtype : str
        Element type of A, W and bias, and of C.
    lda, ldw, ldc : int
        Distance between rows in elements.
    alpha : float
    activation : str
        A key of `ACTIVATIONS`.
    accumulate : bool
    batch : int
        Number of products; A, W and C of product ``i`` start ``i * stride`` elements further.
    stride_a, stride_w, stride_c : int
        At least 0; several products may share A or W, and the rows of their C may interleave but not overlap.

    Raises
    ------
    TypeError
        When a size is not an integer or alpha not a number.
    ValueError
        When a value is out of range, or options do not go together.
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    lda: int
    ldw: int
    ldc: int
    alpha: float = 1.0
    activation: str = "none"
    accumulate: bool = False
    batch: int = 1
    stride_a: int = 0
    stride_w: int = 0
    stride_c: int = 0

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        dtype: str,
        out_dtype: str | None,
        lda: int | None,
        ldw: int | None,
        ldc: int | None,
        *options: Any,
    ) -> Gemm:
        """Return the product with what a call left out filled in: same output type, contiguous rows."""
        rows = (k if lda is None else lda, k if ldw is None else ldw, n if ldc is None else ldc)
        return cls(m, n, k, dtype, out_dtype or dtype, *rows, *options)

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            self._integer(name, 1)
        for name, least in (("lda", self.k), ("ldw", self.k), ("ldc", self.n)):
            self._integer(name, least)
        for name in ("stride_a", "stride_w", "stride_c"):
            self._integer(name, 0)
        object.__setattr__(self, "alpha", checks.float32("gemm: alpha", self.alpha))
        for name in ("dtype", "out_dtype"):
            if getattr(self, name) not in dtypes.FLOAT_TYPES:
                raise ValueError(f"gemm: {name}: expected one of {dtypes.FLOAT_TYPES}, got {getattr(self, name)!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"gemm: activation: expected one of {tuple(ACTIVATIONS)}, got {self.activation!r}")
        if self.accumulate and self.activation != "none":
            raise ValueError("gemm: activation: expected 'none' together with accumulate")
        if not math.isfinite(self.alpha):
            raise ValueError(f"gemm: alpha: expected a finite number, got {self.alpha}")
        apart = self.stride_c >= (self.m - 1) * self.ldc + self.n
        interleaved = self.stride_c >= self.n and (self.batch - 1) * self.stride_c + self.n <= self.ldc
        if self.batch > 1 and not apart and not interleaved:
            raise ValueError(f"gemm: stride_c: expected products that do not overlap, got {self.stride_c}")

    def _integer(self, name: str, low: int) -> None:
        value = checks.integer(f"gemm: {name}", getattr(self, name), low)
        if value >= 1 << 63:
            raise ValueError(f"gemm: {name}: expected a number of 63 bits, got {value}")
        object.__setattr__(self, name, value)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of workspace that the product cannot do without.

        No library epilogue computes the exact GELU or SiLU, and no library product rounds to a 16-bit type other than
        its operands': such a product goes to memory in float32 and is rounded after its epilogue. A float32 C serves by
        itself; for a 16-bit one the workspace holds ``[batch, m, n]`` float32.
        """
        indirect = self.activation in ("gelu", "silu") or self.out_dtype != self.dtype
        return self.batch * self.m * self.n * dtypes.itemsize("f32") if indirect and self.out_dtype != "f32" else 0


WORKSPACE_ALIGNMENT: Final = 256
"""Alignment of a product's workspace in bytes: what cuBLAS asks for, and every allocation has."""


def check_workspace(problem: Gemm, workspace: int, nbytes: int) -> None:
    """Refuse a workspace that a product cannot use. Every backend calls it before it enqueues the product.

    Parameters
    ----------
    problem : Gemm
    workspace : int
        Its address; NULL with ``nbytes`` 0.
    nbytes : int

    Raises
    ------
    ValueError
        When it is smaller than `Gemm.scratch_bytes`, or not aligned to `WORKSPACE_ALIGNMENT`.
    """
    if nbytes < problem.scratch_bytes:
        raise ValueError(
            f"gemm: workspace_bytes: expected at least {problem.scratch_bytes} for {problem.activation} "
            f"to {problem.out_dtype} of [{problem.m}, {problem.n}], got {nbytes}"
        )
    if nbytes and workspace % WORKSPACE_ALIGNMENT:
        raise ValueError(
            f"gemm: workspace: expected an address aligned to {WORKSPACE_ALIGNMENT} bytes, got {workspace:#x}"
        )


def relu(x: Array) -> None:
    """``max(x, 0)``, in place. NaN stays NaN."""
    np.maximum(x, np.zeros(x.shape[-1:], dtype=x.dtype), out=x)  # a row, because NumPy is slow with a scalar here


def gelu(x: Array) -> None:
    """``x * Phi(x)`` with the normal distribution's exact integral (Hendrycks and Gimpel 2016), in place."""
    x *= 0.5 * (1.0 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Array) -> None:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, section 2), in place."""
    x *= 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> None:
    """``x / (1 + exp(-x))``, in place. The exponential is taken of ``-|x|``, which cannot overflow."""
    decay = np.exp(-np.abs(x))
    x *= np.where(x >= 0, 1.0, decay) / (1.0 + decay)


ACTIVATIONS: Final[dict[str, Callable[[Array], None] | None]] = {
    "none": None,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}
"""The activations that a product can end in, applied to float32 values before they are rounded."""


def erf(x: Array) -> Array:
    """The error function of each element of a float array, within 1e-15, returned in the type of ``x``.

    Below 2 a series of positive terms (Abramowitz and Stegun 7.1.6), in which nothing cancels; from 2 on, the
    continued fraction of erfc (7.1.14). Both are evaluated from their tails, in float64; NumPy has no erf of its own.
    """
    z = np.abs(np.asarray(x, dtype=np.float64))
    small = np.minimum(z, 2.0)
    square = small * small
    series = np.ones_like(small)
    for n in range(44, 0, -1):
        series *= square
        series /= n + 0.5
        series += 1.0
    series *= small * np.exp(-square) * (2.0 / math.sqrt(math.pi))
    large = np.clip(z, 2.0, 6.0)  # beyond 6 the result is 1 in float64
    fraction = large
    for n in range(60, 0, -1):
        fraction = large + (n / 2) / fraction
    tail = 1.0 - np.exp(-large * large) / (math.sqrt(math.pi) * fraction)
    result = np.copysign(np.where(z < 2.0, series, tail), x)
    return np.asarray(np.where(np.isnan(z), np.nan, result), dtype=np.asarray(x).dtype)


CHAIN: Final = 128
"""Products that are summed in one go; the sums of the blocks are added up (Higham 2002, section 4.2).

A BLAS adds a whole row's products one after another, in an order that depends on the number of rows. Blocks make the
rounding errors of both orders smaller, and with them what a row's result owes to the rows beside it. Smaller blocks go
further and take more time. docs/correctness.md has what is left.
"""


def _multiply(a: Array, w: Array, out: Array | None) -> Array:
    return np.asarray(np.matmul(a, w.T, out=out))


def _multiply_rows(a: Array, w: Array, out: Array | None) -> Array:
    """One product of the matrix and a vector for each row, all of one shape: a BLAS orders sums by the shape.

    Products of a whole matrix would not do: on some processors OpenBLAS's also differ by a row's place.
    """
    columns = None if out is None else out[:, :, None]
    return np.asarray(np.matmul(w, np.ascontiguousarray(a)[:, :, None], out=columns))[:, :, 0]


def gemm_reference(
    a: Array,
    w: Array,
    c: Array,
    bias: Array | None = None,
    *,
    alpha: float = 1.0,
    activation: str = "none",
    accumulate: bool = False,
    by_row: bool = False,
) -> None:
    """Compute one product into ``c``: float32 accumulation, every epilogue step in float32, one rounding at the end.

    Parameters
    ----------
    a, w, c : arrays
        ``[m, k]``, ``[n, k]`` and ``[m, n]``; rows may be strided. ``c`` is overwritten, or added to with
        ``accumulate``.
    bias : array or None
        ``[n]``.
    by_row : bool
        Whether each row is multiplied by itself, which takes longer: its bits then depend on neither the number of rows
        nor its place among them.
    """
    a32, w32 = (np.asarray(x, dtype=np.float32) for x in (a, w))
    direct = c.dtype == np.float32 and not accumulate
    multiply = _multiply_rows if by_row else _multiply
    product = multiply(a32[:, :CHAIN], w32[:, :CHAIN], c if direct else None)
    for start in range(CHAIN, a32.shape[1], CHAIN):
        product += multiply(a32[:, start : start + CHAIN], w32[:, start : start + CHAIN], None)
    if alpha != 1.0:
        product *= np.float32(alpha)
    finish(product, c, bias, activation=activation, accumulate=accumulate)


def finish(product: Array, c: Array, bias: Array | None, *, activation: str, accumulate: bool) -> None:
    """Store a float32 product, which is overwritten and may be ``c``, in ``c`` after its epilogue."""
    if bias is not None:
        product += bias
    function = ACTIVATIONS[activation]
    if function is not None:
        function(product)
    if accumulate:
        np.add(product, c, out=c, casting="unsafe")  # added in float32, rounded as it is stored
    elif product is not c:
        c[...] = product
