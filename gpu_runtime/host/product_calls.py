# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend's matrix products, which run NumPy's BLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.backend import NULL
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.faults import Fault
from gpu_runtime.gemm import Gemm, check_workspace, gemm_reference
from gpu_runtime.handles import LaunchRecord
from gpu_runtime.host.checked_memory import CheckedMemory
from gpu_runtime.host.footprint import Footprint, product_footprint
from gpu_runtime.host.memory import HostMemory
from gpu_runtime.host.memory_calls import MemoryCalls
from gpu_runtime.host.prepared import Prepared, PreparedCalls
from gpu_runtime.host.streams import Order
from gpu_runtime.overlap import share_memory
from gpu_runtime.streams import StreamLike

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Product:
    """A checked product and the addresses of A, W, C and the bias."""

    problem: Gemm
    addresses: tuple[int, int, int, int]
    by_row: bool
    footprint: Footprint | None


class ProductCalls(MemoryCalls):
    """Products, and the calls that are kept prepared for the next time."""

    def __init__(self, order: Order, memory: HostMemory, faults: Sequence[Fault]) -> None:
        super().__init__(order, memory, faults)
        self._checked = memory if isinstance(memory, CheckedMemory) else None
        self._prepared = PreparedCalls(memory)

    def gemm(
        self,
        a: int,
        w: int,
        c: int,
        m: int,
        n: int,
        k: int,
        *,
        dtype: str,
        out_dtype: str | None = None,
        alpha: float = 1.0,
        bias: int = NULL,
        activation: str = "none",
        accumulate: bool = False,
        lda: int | None = None,
        ldw: int | None = None,
        ldc: int | None = None,
        workspace: int = NULL,
        workspace_bytes: int = 0,
        algorithm: int | None = None,
        stream: StreamLike = 0,
    ) -> None:
        self._check_open()
        options = (m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, activation, accumulate)
        self._multiply(options, a, w, c, bias, workspace, workspace_bytes, algorithm, stream)

    def gemm_strided_batched(
        self,
        a: int,
        w: int,
        c: int,
        m: int,
        n: int,
        k: int,
        batch: int,
        *,
        stride_a: int,
        stride_w: int,
        stride_c: int,
        dtype: str,
        out_dtype: str | None = None,
        alpha: float = 1.0,
        accumulate: bool = False,
        lda: int | None = None,
        ldw: int | None = None,
        ldc: int | None = None,
        workspace: int = NULL,
        workspace_bytes: int = 0,
        algorithm: int | None = None,
        stream: StreamLike = 0,
    ) -> None:
        self._check_open()
        strides = (batch, stride_a, stride_w, stride_c)
        options = (m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, "none", accumulate, *strides)
        self._multiply(options, a, w, c, NULL, workspace, workspace_bytes, algorithm, stream)

    def _multiply(
        self,
        options: tuple[Any, ...],
        a: int,
        w: int,
        c: int,
        bias: int,
        workspace: int,
        workspace_bytes: int,
        algorithm: int | None,
        stream: StreamLike,
    ) -> None:
        """Enqueue the product that `Gemm.of` makes of ``options``; with an algorithm, whichever it is, row by row."""
        on = self._stream(stream)
        by_row = algorithm is not None
        if by_row:
            checks.integer("gemm: algorithm", algorithm, low=0)
        pointers = (a, w, c, bias, workspace, workspace_bytes)
        key = (Gemm, by_row, *options, *pointers)
        ready = self._prepared.find(key, lambda: self._prepare_product(Gemm.of(*options), by_row, *pointers))
        if self._faults:
            self._ask_faults("gemm", "")
        if self._traces.active:
            p = ready.call.problem
            self._traces.add(LaunchRecord("gemm", f"{p.m}x{p.n}x{p.k}", stream=on.handle))
        self._enqueue(on, lambda: self._run_product(ready))

    def _prepare_product(
        self, p: Gemm, by_row: bool, a: int, w: int, c: int, bias: int, workspace: int, workspace_bytes: int
    ) -> tuple[_Product, tuple[Array, Array, Array, Array | None]]:
        space = self._span("gemm: workspace", workspace, workspace_bytes)
        check_workspace(p, space.address, space.nbytes)
        addresses = (
            self._operand_address("a", a, p.dtype),
            self._operand_address("w", w, p.dtype),
            self._operand_address("c", c, p.out_dtype),
            self._operand_address("bias", bias, p.dtype),
        )
        operands = self._operands(p, *addresses)
        for name, operand in zip(("a", "w", "bias"), (operands[0], operands[1], operands[3]), strict=True):
            if operand is not None and share_memory(operands[2], operand):
                raise ValueError(f"gemm: c: expected memory apart from {name}, got {addresses[2]:#x}")
        scratch = self._memory.bytes(space.address, space.nbytes) if space.nbytes else operands[0][:0]
        for name, operand in zip(("a", "w", "c", "bias"), operands, strict=True):
            if operand is not None and share_memory(scratch, operand):
                raise ValueError(f"gemm: workspace: expected memory apart from {name}, got {space.address:#x}")
        footprint = None
        if self._checked is not None:
            footprint = product_footprint(self._checked, p, addresses, operands, space)
        return _Product(p, addresses, by_row, footprint), operands

    def _run_product(self, ready: Prepared) -> None:
        call: _Product = ready.call
        if call.footprint is not None:
            call.footprint.run(lambda: _multiply_all(call, *ready.bound))
            return
        current = self._prepared.is_current(ready)
        _multiply_all(call, *(ready.bound if current else self._operands(call.problem, *call.addresses)))

    @staticmethod
    def _operand_address(name: str, ptr: int, dtype: str) -> int:
        address, size = checks.address(f"gemm: {name}", ptr), dtypes.itemsize(dtype)
        if address % size:
            raise ValueError(f"gemm: {name}: expected an address aligned to {size} bytes, got {address:#x}")
        return address

    def _operands(self, p: Gemm, a: int, w: int, c: int, bias: int) -> tuple[Array, Array, Array, Array | None]:
        """Return A, W and C as ``[batch, rows, columns]``, and the bias."""

        def view(name: str, ptr: int, shape: tuple[int, ...], dtype: str, *strides: int) -> Array:
            try:
                return self._memory.strided(ptr, shape, dtype, (*strides, 1))
            except InvalidPointer as error:
                raise InvalidPointer(f"gemm: {name}: {error}") from None

        return (
            view("a", a, (p.batch, p.m, p.k), p.dtype, p.stride_a, p.lda),
            view("w", w, (p.batch, p.n, p.k), p.dtype, p.stride_w, p.ldw),
            view("c", c, (p.batch, p.m, p.n), p.out_dtype, p.stride_c, p.ldc),
            view("bias", bias, (p.n,), p.dtype) if bias else None,
        )


def _multiply_all(call: _Product, a: Array, w: Array, c: Array, bias: Array | None) -> None:
    """Compute every product of a batch."""
    p = call.problem
    options: dict[str, Any] = {"alpha": p.alpha, "activation": p.activation, "accumulate": p.accumulate}
    with np.errstate(all="ignore"):
        for one, two, out in zip(a, w, c, strict=True):
            gemm_reference(one, two, out, bias, **options, by_row=call.by_row)
