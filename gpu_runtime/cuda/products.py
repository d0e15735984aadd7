# SPDX-License-Identifier: MIT OR Apache-2.0
"""Products whose arguments have been checked, kept for the next call with the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gpu_runtime import checks, dtypes
from gpu_runtime.cuda.blas import Prepared
from gpu_runtime.gemm import Gemm
from gpu_runtime.overlap import extent, share_memory

_MOST_KEPT: Final = 2048
"""A model repeats the same few; past this many, all are forgotten, which bounds the memory."""

Spans = tuple[tuple[str, int, int], ...]
"""Name, address and bytes of what a product reads and writes."""


@dataclass(slots=True)
class Product:
    """One checked product, and the count of frees at which its spans were last looked up."""

    problem: Gemm
    prepared: Prepared
    spans: Spans
    generation: int


class Products:
    """Checked products by their arguments."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[tuple[type, ...], Product]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._kept = {}

    def find(self, arguments: tuple[Any, ...], prepare: Callable[..., Product]) -> Product:
        """Return the product for ``(options, operands, workspace, workspace_bytes, algorithm)``, made when it is new.

        Values that are equal but not of one type (1, True and 1.0) are different: they are not equally valid.
        """
        options, operands, *rest = arguments
        key = (*options, *operands, *rest)
        types = tuple(map(type, key))
        try:
            kept = self._kept.get(key)
        except TypeError:  # something that cannot be hashed; it will be refused, or used once
            return prepare(*arguments)
        if kept is not None and kept[0] == types:
            return kept[1]
        product = prepare(*arguments)
        if all(value is None or isinstance(value, str | bool) or checks.repeats(value) for value in key):
            if len(self._kept) >= _MOST_KEPT:
                self.clear()
            self._kept[key] = types, product
        return product


def addresses_of(p: Gemm, operands: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the addresses of A, W, C and the bias as plain ints. Raises ValueError and TypeError."""
    kinds = ("a", p.dtype), ("w", p.dtype), ("c", p.out_dtype), ("bias", p.dtype)
    a, w, c, bias = (_operand(name, at, dtype) for (name, dtype), at in zip(kinds, operands, strict=True))
    return a, w, c, bias


def refuse_overlap(p: Gemm, addresses: tuple[int, int, int, int], workspace: int, workspace_bytes: int) -> None:
    """Raise ValueError when C or the workspace shares memory with anything else."""
    a, w, c, bias = addresses
    arrays = {
        "a": extent(a, (p.batch, p.m, p.k), p.dtype, (p.stride_a, p.lda, 1)),
        "w": extent(w, (p.batch, p.n, p.k), p.dtype, (p.stride_w, p.ldw, 1)),
        "c": extent(c, (p.batch, p.m, p.n), p.out_dtype, (p.stride_c, p.ldc, 1)),
        "bias": extent(bias, (p.n if bias else 0,), p.dtype, (1,)),
        "workspace": extent(workspace, (workspace_bytes,), "u8", (1,)),
    }
    for written in ("workspace", "c"):
        for name, array in arrays.items():
            if name != written and share_memory(arrays[written], array):
                raise ValueError(f"gemm: {written}: expected memory apart from {name}")


def _operand(name: str, ptr: int, dtype: str) -> int:
    address, size = checks.address(f"gemm: {name}", ptr), dtypes.itemsize(dtype)
    if address % size:
        raise ValueError(f"gemm: {name}: expected an address aligned to {size} bytes, got {address:#x}")
    return address


def spans_of(p: Gemm, addresses: tuple[int, int, int, int], workspace: int, workspace_bytes: int) -> Spans:
    """Return the spans, from first to last byte, that a product touches."""
    a, w, c, bias = addresses

    def span(name: str, at: int, dtype: str, rows: int, columns: int, stride: int, step: int) -> tuple[str, int, int]:
        return name, at, ((p.batch - 1) * step + (rows - 1) * stride + columns) * dtypes.itemsize(dtype)

    spans = [
        span("a", a, p.dtype, p.m, p.k, p.lda, p.stride_a),
        span("w", w, p.dtype, p.n, p.k, p.ldw, p.stride_w),
        span("c", c, p.out_dtype, p.m, p.n, p.ldc, p.stride_c),
    ]
    if bias:
        spans.append(("bias", bias, p.n * dtypes.itemsize(p.dtype)))
    if workspace_bytes:
        spans.append(("workspace", workspace, workspace_bytes))
    return tuple(spans)
