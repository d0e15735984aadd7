# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostBackend: launches run an op's NumPy reference, products run NumPy's BLAS."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.backend import NULL
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.gemm import Gemm, gemm_reference
from gpu_runtime.handles import KernelHandle, LaunchRecord
from gpu_runtime.host.memory import HostMemory
from gpu_runtime.host.memory_calls import MemoryCalls
from gpu_runtime.host.prepared import Prepared, PreparedCalls
from gpu_runtime.host.streams import InOrder, Order
from gpu_runtime.launch import Dim3, check_arguments, check_geometry
from gpu_runtime.limits import MINIMUM, Limits
from gpu_runtime.op import ELEMENT, REGISTRY, Arg, Dims, Op, OpRegistry
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A checked launch."""

    op: Op
    dtype: str
    values: Sequence[Any]
    dims: Dims
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Product:
    """A checked product and the addresses of A, W, C and the bias."""

    problem: Gemm
    addresses: tuple[int, int, int, int]


class HostBackend(MemoryCalls):
    """A device in ordinary memory.

    Its pointers are real addresses, so a C host can read them. Launches and copies are checked for bounds, alignment,
    argument types and geometry, as strictly as the smallest supported GPU would need.

    Parameters
    ----------
    ops : OpRegistry or None
        The kernels that can be launched; None takes the process-wide registry.
    memory_limit : int or None
        Most bytes that may be live at once; None takes the machine's memory. OutOfMemory is raised past it.
    order : Order or None
        When enqueued work runs; None runs it at once, in the order of the calls.
    """

    def __init__(
        self, *, ops: OpRegistry | None = None, memory_limit: int | None = None, order: Order | None = None
    ) -> None:
        super().__init__(order or InOrder(), HostMemory(memory_limit))
        self._ops = REGISTRY if ops is None else ops
        self._prepared = PreparedCalls(self._memory)
        self._debug_sync = False

    def has_module(self, module: str) -> bool:
        self._check_open()
        return module in self._ops

    def kernel(self, module: str, name: str) -> KernelHandle:
        self._check_open()
        self._ops.find(module, name)
        return KernelHandle(module, name)

    def launch(
        self,
        handle: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared_mem: int,
        stream: StreamLike,
        args: Sequence[Any],
        *,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        on = self._stream(stream)
        if not isinstance(handle, KernelHandle):
            raise TypeError(f"handle: expected what kernel() returned, got {handle!r}")
        op, dtype = self._ops.find(handle.module, handle.name)
        key = (op, dtype, *_axes(grid), None, *_axes(block), None, shared_mem, *args)
        ready = self._prepared.find(key, lambda: self._prepare(op, dtype, grid, block, shared_mem, args))
        call: _Launch = ready.call
        if self._traces:
            self._trace(LaunchRecord("kernel", handle.name, call.blocks, call.threads, stream=on.handle))
        self._enqueue(on, lambda: self._run_reference(ready))
        if self._debug_sync and on.capture is None:
            self.synchronize(stream)

    def _prepare(
        self, op: Op, dtype: str, grid: Dim3, block: Dim3, shared_mem: int, args: Sequence[Any]
    ) -> tuple[_Launch, dict[str, Any]]:
        """Check a launch; addresses outside live memory, and overlaps, are refused before anything is enqueued."""
        blocks, threads = check_geometry(grid, block, shared_mem, self.limits())
        values = check_arguments(op.spec, dtype, args)
        dims = op.spec.dims(values)
        bound = self._bind(op, dtype, values, dims)
        self._refuse_overlap(op, values, bound)
        return _Launch(op, dtype, values, dims, blocks, threads), bound

    def _run_reference(self, ready: Prepared) -> None:
        call: _Launch = ready.call
        current = self._prepared.is_current(ready)
        bound = ready.bound if current else self._bind(call.op, call.dtype, call.values, call.dims)
        with np.errstate(all="ignore"):  # a kernel that overflows stores inf and says nothing
            call.op.reference(**bound)

    def _bind(self, op: Op, dtype: str, values: Sequence[Any], dims: Dims) -> dict[str, Any]:
        """Return the reference's arguments: arrays over device memory, read-only where the op only reads."""
        bound: dict[str, Any] = {"memory": self._memory} if op.spec.indirect else {}
        for arg, value in zip(op.spec.args, values, strict=True):
            bound[arg.name] = self._array(op, arg, dtype, value, dims) if arg.is_pointer else value
        return bound

    def _array(self, op: Op, arg: Arg, dtype: str, address: int, dims: Dims) -> Array | None:
        if address == 0:
            return None
        element = dtype if arg.dtype == ELEMENT else arg.dtype
        stride = dims[arg.row_stride] if arg.row_stride else None
        try:
            view = self._memory.view(address, arg.sizes(dims), element, stride)
        except InvalidPointer as error:
            raise InvalidPointer(f"{op.spec.name}: {arg.name}: {error}") from None
        if arg.role == "in":
            view.flags.writeable = False
        return view

    @staticmethod
    def _refuse_overlap(op: Op, values: Sequence[Any], bound: dict[str, Any]) -> None:
        """Refuse an output over the memory of another parameter, unless the spec names the two as aliases."""
        pointers = [(arg, at) for arg, at in zip(op.spec.args, values, strict=True) if arg.is_pointer and at]
        for arg, address in pointers:
            if arg.role == "in":
                continue
            for other, at in pointers:
                if other is arg or not share_memory(bound[arg.name], bound[other.name]):
                    continue
                pairs = (arg.name, other.name), (other.name, arg.name)
                if address != at or not any(pair in op.spec.aliases for pair in pairs):
                    raise ValueError(
                        f"{op.spec.name}: {arg.name}: expected memory apart from {other.name}, "
                        f"got {address:#x} and {at:#x}"
                    )

    @property
    def debug_sync_kernels(self) -> bool:
        self._check_open()
        return self._debug_sync

    @debug_sync_kernels.setter
    def debug_sync_kernels(self, on: bool) -> None:
        self._check_open()
        self._debug_sync = bool(on)

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
        self._check_choice(workspace, workspace_bytes, algorithm)
        self._multiply(options, a, w, c, bias, stream)

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
        self._check_choice(workspace, workspace_bytes, algorithm)
        self._multiply(options, a, w, c, NULL, stream)

    def _check_choice(self, workspace: int, nbytes: int, algorithm: int | None) -> None:
        """Check what steers a GPU's choice of algorithm; there is one here."""
        self._span("gemm: workspace", workspace, nbytes)
        if algorithm is not None:
            checks.integer("gemm: algorithm", algorithm, low=0)

    def _multiply(self, options: tuple[Any, ...], a: int, w: int, c: int, bias: int, stream: StreamLike) -> None:
        """Enqueue the product that `Gemm.of` makes of ``options``."""
        on = self._stream(stream)
        key = (Gemm, *options, a, w, c, bias)
        ready = self._prepared.find(key, lambda: self._prepare_product(Gemm.of(*options), a, w, c, bias))
        if self._traces:
            p = ready.call.problem
            self._trace(LaunchRecord("gemm", f"{p.m}x{p.n}x{p.k}", stream=on.handle))
        self._enqueue(on, lambda: self._run_product(ready))

    def _prepare_product(
        self, p: Gemm, a: int, w: int, c: int, bias: int
    ) -> tuple[_Product, tuple[Array, Array, Array, Array | None]]:
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
        return _Product(p, addresses), operands

    def _run_product(self, ready: Prepared) -> None:
        p: Gemm = ready.call.problem
        current = self._prepared.is_current(ready)
        a, w, c, bias = ready.bound if current else self._operands(p, *ready.call.addresses)
        with np.errstate(all="ignore"):
            for one, two, out in zip(a, w, c, strict=True):
                gemm_reference(one, two, out, bias, alpha=p.alpha, activation=p.activation, accumulate=p.accumulate)

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

    def bind_to_thread(self) -> None:
        self._check_open()

    def sm_count(self) -> int:
        return self.limits().sm_count

    def kind(self) -> Literal["host", "cuda"]:
        self._check_open()
        return "host"

    def limits(self) -> Limits:
        """Return the least that a supported GPU offers, so that a plan which fits here fits everywhere."""
        self._check_open()
        return MINIMUM

    def name(self) -> str:
        self._check_open()
        return f"host ({platform.machine()}, NumPy {np.__version__})"

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = tuple(self._streams.values())
        for stream in streams:
            self._drop_capture(stream)
            self._order.drain(stream)
        for entry in (*self._memory.sweep(), *self._memory.pinned):
            log.warning("close: never freed: %s", entry)
        for memory in tuple(self._pinned.values()):
            self._memory.free_pinned(DevicePtr(memory.address))
        self._pinned.clear()
        self._graphs.clear()
        self._streams.clear()
        self._events.clear()


def _axes(extent: Any) -> tuple[Any, ...]:
    """Return a grid or block as a tuple, unchecked."""
    return tuple(extent) if isinstance(extent, tuple | list) else (extent,)


def share_memory(first: Array, second: Array) -> bool:
    """Return whether two views have a byte in common; True as well when that is too hard to tell."""
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]  # any count will do
    except np.exceptions.TooHardError:
        return True
