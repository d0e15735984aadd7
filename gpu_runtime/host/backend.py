# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostBackend: launches run an op's NumPy reference, products run NumPy's BLAS."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import NULL, KernelHandle, LaunchRecord
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.gemm import Gemm, gemm_reference
from gpu_runtime.host.memory import HostMemory
from gpu_runtime.host.memory_calls import MemoryCalls
from gpu_runtime.host.streams import InOrder, Order
from gpu_runtime.launch import Dim3, check_arguments, check_geometry
from gpu_runtime.limits import MINIMUM, Limits
from gpu_runtime.op import ELEMENT, REGISTRY, Arg, Op, OpRegistry
from gpu_runtime.streams import StreamLike

log = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]


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
        self._debug_sync = False

    def has_module(self, module: str) -> bool:
        return module in self._ops

    def kernel(self, module: str, name: str) -> KernelHandle:
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
        op, dtype = self._ops.find(handle.module, handle.name)
        blocks, threads = check_geometry(grid, block, shared_mem, self.limits())
        values = check_arguments(op.spec, dtype, args)
        self._bind(op, dtype, values)  # an address outside live memory is refused before anything is enqueued
        self._trace(LaunchRecord("kernel", handle.name, blocks, threads, stream=on.handle))
        self._enqueue(on, lambda: op.reference(**self._bind(op, dtype, values)))
        if self._debug_sync and on.capture is None:
            self.synchronize(stream)

    def _bind(self, op: Op, dtype: str, values: Sequence[Any]) -> dict[str, Any]:
        """Return the reference's arguments: arrays over device memory, read-only where the op only reads."""
        dims = op.spec.dims(values)
        bound: dict[str, Any] = {"memory": self._memory} if op.spec.indirect else {}
        for arg, value in zip(op.spec.args, values, strict=True):
            bound[arg.name] = self._array(op, arg, dtype, value, dims) if arg.is_pointer else value
        return bound

    def _array(self, op: Op, arg: Arg, dtype: str, address: int, dims: dict[str, int]) -> Array | None:
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

    @property
    def debug_sync_kernels(self) -> bool:
        return self._debug_sync

    @debug_sync_kernels.setter
    def debug_sync_kernels(self, on: bool) -> None:
        self._debug_sync = on

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
        problem = Gemm.of(m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, activation, accumulate)
        self._check_workspace(workspace, workspace_bytes)
        self._multiply(problem, a, w, c, bias, stream)

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
        strides = (batch, stride_a, stride_w, stride_c)
        problem = Gemm.of(m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, "none", accumulate, *strides)
        self._check_workspace(workspace, workspace_bytes)
        self._multiply(problem, a, w, c, NULL, stream)

    def _check_workspace(self, workspace: int, nbytes: int) -> None:
        if workspace:
            self._span("gemm: workspace", workspace, nbytes)

    def _multiply(self, problem: Gemm, a: int, w: int, c: int, bias: int, stream: StreamLike) -> None:
        on = self._stream(stream)
        self._operands(problem, a, w, c, bias, problem.batch - 1)
        self._trace(LaunchRecord("gemm", f"{problem.m}x{problem.n}x{problem.k}", stream=on.handle))

        def work() -> None:
            for index in range(problem.batch):
                gemm_reference(
                    *self._operands(problem, a, w, c, bias, index),
                    alpha=problem.alpha,
                    activation=problem.activation,
                    accumulate=problem.accumulate,
                )

        self._enqueue(on, work)

    def _operands(
        self, p: Gemm, a: int, w: int, c: int, bias: int, index: int
    ) -> tuple[Array, Array, Array, Array | None]:
        step, out_step = dtypes.itemsize(p.dtype), dtypes.itemsize(p.out_dtype)
        view = self._memory.view
        for name, address, size in (("a", a, step), ("w", w, step), ("c", c, out_step), ("bias", bias, step)):
            if address % size:
                raise ValueError(f"gemm: {name}: expected an address aligned to {size} bytes, got {address:#x}")
        return (
            view(a + index * p.stride_a * step, (p.m, p.k), p.dtype, p.lda),
            view(w + index * p.stride_w * step, (p.n, p.k), p.dtype, p.ldw),
            view(c + index * p.stride_c * out_step, (p.m, p.n), p.out_dtype, p.ldc),
            view(bias, (p.n,), p.dtype) if bias else None,
        )

    def bind_to_thread(self) -> None:
        self._check_open()

    def sm_count(self) -> int:
        return self.limits().sm_count

    def limits(self) -> Limits:
        """Return the least that a supported GPU offers, so that a plan which fits here fits everywhere."""
        return MINIMUM

    def kind(self) -> Literal["host", "cuda"]:
        return "host"

    def name(self) -> str:
        return f"host ({platform.machine()}, NumPy {np.__version__})"

    def close(self) -> None:
        if self._closed:
            return
        for stream in tuple(self._streams.values()):
            self.abort_capture_if_active(stream.handle)
            self._order.drain(stream)
        for entry in self.sweep_unreleased():
            log.warning("close: never freed: %s", entry)
        self._pinned.clear()
        self._graphs.clear()
        self._events.clear()
        self._closed = True
