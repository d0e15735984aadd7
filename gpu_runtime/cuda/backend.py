# SPDX-License-Identifier: MIT OR Apache-2.0
"""CudaBackend: kernels compiled by NVRTC and launched through CuPy's driver interface, products by cuBLASLt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cupy.cuda import driver

from gpu_runtime import checks
from gpu_runtime.backend import NULL
from gpu_runtime.cuda import nvrtc
from gpu_runtime.cuda.blas import Blas
from gpu_runtime.cuda.device import check_device, limits_of, name_of, native_arch
from gpu_runtime.cuda.driver import CUDA_ERRORS, failure
from gpu_runtime.cuda.kernels import Attributes, CudaKernel, Kernels, check_resident, pack
from gpu_runtime.cuda.memory_calls import MemoryCalls
from gpu_runtime.cuda.nvtx import NvtxRanges
from gpu_runtime.cuda.products import Product, Products, addresses_of, refuse_overlap, spans_of
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import Fault
from gpu_runtime.gemm import Gemm, check_workspace
from gpu_runtime.handles import KernelHandle, LaunchRecord
from gpu_runtime.launch import Dim3
from gpu_runtime.limits import PORTABLE_CLUSTER, Limits
from gpu_runtime.op import REGISTRY, OpRegistry
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike

log = logging.getLogger(__name__)


class CudaBackend(MemoryCalls):
    """One NVIDIA GPU of compute capability 8.0 or later.

    Every call works on any thread, makes the device's primary context current while it lasts and leaves CuPy's current
    device, stream and allocator as it found them. Copies, memsets and products are checked against the ledger: a span
    that starts in a block of this backend must end in it, and any other address is the caller's own memory. Addresses
    inside launches are only checked for NULL, alignment and overlap.

    Parameters
    ----------
    device : int
        Number of the device, as CUDA counts them.
    ops : OpRegistry or None
        The kernels that can be launched; None takes the process-wide registry.
    arch : str or None
        What kernels are compiled for: None takes machine code for the device; ``"compute_80"`` and the like take PTX
        that the driver compiles.
    pool : bool
        Whether memory comes from CuPy's current allocator. Memory checkers need False: each block is then a
        ``cudaMalloc`` of its own.
    redzones : bool
        Whether a pattern around each block lets `scan_redzones` find overruns.
    memory_limit : int or None
        Most bytes that may be live at once; None takes the device's memory.
    faults : sequence of Fault
        Failures to inject.
    cache : Path or None
        Folder for compiled kernels; None keeps none.
    nvtx : bool
        Whether ``ranges`` are NVTX ranges, which Nsight Systems shows.

    Raises
    ------
    BackendUnavailable
        When there is no such device, or it is too old.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        ops: OpRegistry | None = None,
        arch: str | None = None,
        pool: bool = True,
        redzones: bool = True,
        memory_limit: int | None = None,
        faults: Sequence[Fault] = (),
        cache: Path | None = None,
        nvtx: bool = False,
    ) -> None:
        number = checks.integer("device", device, low=0)
        check_device(number)
        limits = limits_of(number)
        target = arch or native_arch(limits.compute_capability)
        super().__init__(
            number, arch=target, cache=cache, pool=pool, redzones=redzones, memory_limit=memory_limit, faults=faults
        )
        self._limits = limits
        self._name = name_of(number)
        self._kernels = Kernels(self._context, REGISTRY if ops is None else ops, target, cache)
        self._blas = Blas(self._context, target, cache)
        self._waits = nvrtc.waits_for_previous(target)  # without it, no kernel may start early, or know of clusters
        if self._waits:
            self._limits = replace(self._limits, max_cluster=PORTABLE_CLUSTER)
        self._products = Products()
        self.ranges = NvtxRanges() if nvtx else None
        self._debug_sync = False
        self._own = self._streams.own
        self._unwatched = object()
        self._pass: object | None = None
        self._traces.on_change = self._look_for_watchers
        self._look_for_watchers()

    # launches

    def has_module(self, module: str) -> bool:
        self._check_open()
        return module in self._kernels

    def kernel(self, module: str, name: str) -> KernelHandle:
        self._check_open()
        return self._kernels.find(module, name)

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
        cluster: int = 1,
    ) -> None:
        # The usual launch, short because a decode step makes dozens: a stream of ours, and arguments that were checked
        # when they first came. `_pass` is not what it was then while somebody watches, and for good after `close`.
        try:
            on = self._own[stream]  # type: ignore[index]  # a stream that is an object is not in it
            packed = handle.launches[args]  # type: ignore[attr-defined]
        except (KeyError, TypeError, AttributeError):
            packed = None
        if (
            packed is not None
            and packed.issued is self._pass
            and packed.types == (*map(type, args),)
            and ((grid is packed.grid and block is packed.block) or packed.fits(grid, block))
            and shared_mem == packed.geometry[6]
            and type(stream) is type(shared_mem) is type(cluster) is int
            and packed.attributes == (programmatic and self._waits, cooperative, cluster)
        ):
            try:
                packed.enqueue(on, packed.params, 0)
                return
            except CUDA_ERRORS as error:
                if driver.ctxGetCurrent() == self._context.handle:
                    raise failure(f"launch {handle.name}", (grid, block, shared_mem), error) from None
                # Refused because our context is not current on this thread, which the long way sees to.
        self._launch_checked(handle, grid, block, shared_mem, stream, args, cooperative, programmatic, cluster)

    def _launch_checked(
        self,
        handle: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared: int,
        stream: StreamLike,
        args: Sequence[Any],
        cooperative: bool,
        programmatic: bool,
        cluster: int,
    ) -> None:
        """Launch with everything that the usual path has no time for."""
        on = self._stream(stream)
        kernel = handle if isinstance(handle, CudaKernel) and handle.owner is self._kernels else self._known(handle)
        attributes = Attributes(bool(programmatic) and self._waits, bool(cooperative), cluster)
        packed = pack(self._context, self._limits, kernel, grid, block, shared, args, self._unwatched, attributes)
        if cooperative:
            check_resident(self._context, self._limits, kernel, packed)
        kernel.keep(packed, shared, args)
        self._ask_faults("launch", kernel.name)
        if self._traces.active:
            blocks, threads = packed.geometry[:3], packed.geometry[3:6]
            self._traces.add(LaunchRecord("kernel", kernel.name, blocks, threads, stream=on, shared_bytes=shared))
        try:
            self._context.call(packed.enqueue, on, packed.params, 0)
        except DeviceError as error:
            raise DeviceError(f"launch {kernel.name}: {error}") from None
        self._streams.note(on, stream)
        if self._debug_sync and not self._streams.is_capturing(on):
            try:
                self.synchronize(stream)
            except DeviceError as error:
                raise DeviceError(f"kernel {kernel.name} failed: {error}") from None

    def _known(self, handle: KernelHandle) -> CudaKernel:
        """Return this backend's entry point for a handle that another backend made."""
        if not isinstance(handle, KernelHandle):
            raise TypeError(f"handle: expected what kernel() returned, got {handle!r}")
        return self._kernels.find(handle.module, handle.name)

    @property
    def debug_sync_kernels(self) -> bool:
        self._check_open()
        return self._debug_sync

    @debug_sync_kernels.setter
    def debug_sync_kernels(self, on: bool) -> None:
        self._check_open()
        self._debug_sync = bool(on)
        self._look_for_watchers()

    def is_watched(self) -> bool:
        self._check_open()
        return bool(self._debug_sync or self._faults or self._traces.active)

    def _look_for_watchers(self) -> None:
        """Let launches take the short way when nobody wants to hear of them."""
        with self._lock:
            short = not self._lifetime.refusal and not self.is_watched()
            self._pass = self._unwatched if short else None

    # products

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
        options = (m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, activation, accumulate)
        self._multiply(options, (a, w, c, bias), workspace, workspace_bytes, algorithm, stream)

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
        options = (m, n, k, dtype, out_dtype, lda, ldw, ldc, alpha, "none", accumulate, *strides)
        self._multiply(options, (a, w, c, NULL), workspace, workspace_bytes, algorithm, stream)

    def _multiply(
        self,
        options: tuple[Any, ...],
        operands: tuple[int, int, int, int],
        workspace: int,
        workspace_bytes: int,
        algorithm: int | None,
        stream: StreamLike,
    ) -> None:
        """Enqueue the product that `Gemm.of` makes of ``options``."""
        on = self._stream(stream)
        arguments = (options, operands, workspace, workspace_bytes, algorithm)
        product = self._products.find(arguments, self._prepare_product)
        generation = self._memory.generation
        if product.generation != generation:  # a block was freed since: is it one of the product's?
            self._check_spans(product.spans)
            product.generation = generation
        if self._faults:
            self._ask_faults("gemm", "")
        if self._traces.active:
            p = product.problem
            self._traces.add(LaunchRecord("gemm", f"{p.m}x{p.n}x{p.k}", stream=on))
        self._blas.enqueue(product.prepared, on)
        self._streams.note(on, stream)

    def _prepare_product(
        self,
        options: tuple[Any, ...],
        operands: tuple[int, int, int, int],
        workspace: int,
        workspace_bytes: int,
        algorithm: int | None,
    ) -> Product:
        p = Gemm.of(*options)
        generation = self._memory.generation
        addresses = addresses_of(p, operands)
        space = checks.address("gemm: workspace", workspace)
        nbytes = checks.integer("gemm: workspace_bytes", workspace_bytes, low=0)
        spans = spans_of(p, addresses, space, nbytes)
        self._check_spans(spans)
        check_workspace(p, space, nbytes)
        refuse_overlap(p, addresses, space, nbytes)
        place = None if algorithm is None else checks.integer("gemm: algorithm", algorithm, low=0)
        return Product(p, self._blas.prepare(p, addresses, space, nbytes, place), spans, generation)

    def _check_spans(self, spans: tuple[tuple[str, int, int], ...]) -> None:
        for name, address, nbytes in spans:
            self._memory.check_span(f"gemm: {name}", address, nbytes)

    # device

    def bind_to_thread(self) -> None:
        self._check_open()
        self._context.use()

    def sm_count(self) -> int:
        self._check_open()
        return self._limits.sm_count

    def limits(self) -> Limits:
        self._check_open()
        return self._limits

    def kind(self) -> Literal["host", "cuda"]:
        self._check_open()
        return "cuda"

    def name(self) -> str:
        self._check_open()
        return self._name

    def close(self) -> None:
        if self._lifetime.refusal:  # before the lock, which a forked child may find held for ever
            return
        with self._lock:
            if self._lifetime.refusal:
                return
            self._settle_exports()
            self._memory.end()
            try:
                self._streams.finish()
            finally:
                self._lifetime.close()
                self._memory.closed = True
            self._memory.let_go(self._streams.marks)
            for entry in (*self._memory.sweep(self._streams.marks), *self._memory.pinned):
                log.warning("close: never freed: %s", entry)
            for memory in tuple(self._pinned.values()):
                self._memory.free_pinned(DevicePtr(memory.address), self._streams.marks)
            self._pinned.clear()
            self._ready.clear()
            self._products.clear()
            self._memory.reclaim(wait=True)
            self._blas.close()
            self._kernels.close()
            self._small_copies.close()
            self._close_streams()
