# SPDX-License-Identifier: MIT OR Apache-2.0
"""HostBackend: launches run an op's NumPy reference."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpu_runtime.errors import InvalidPointer
from gpu_runtime.faults import Fault
from gpu_runtime.handles import KernelHandle, LaunchRecord
from gpu_runtime.host.checked_memory import CheckedMemory
from gpu_runtime.host.footprint import Footprint, launch_footprint
from gpu_runtime.host.memory import HostMemory
from gpu_runtime.host.orders import OrderName, open_order
from gpu_runtime.host.prepared import Prepared
from gpu_runtime.host.product_calls import ProductCalls
from gpu_runtime.host.table_memory import TableMemory
from gpu_runtime.launch import Dim3, check_arguments, check_geometry
from gpu_runtime.limits import MINIMUM, Limits
from gpu_runtime.op import ELEMENT, REGISTRY, Arg, Dims, Op, OpRegistry
from gpu_runtime.overlap import refuse_overlap
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
    footprint: Footprint | None


class HostBackend(ProductCalls):
    """A device in ordinary memory.

    Its pointers are real addresses, so a C host can read them. Launches and copies are checked for bounds, alignment,
    argument types and geometry, as strictly as the smallest supported GPU would need.

    Parameters
    ----------
    ops : OpRegistry or None
        The kernels that can be launched; None takes the process-wide registry.
    memory_limit : int or None
        Most bytes that may be live at once; None takes the machine's memory. OutOfMemory is raised past it.
    order : str
        When enqueued work runs: ``"in_order"``, at once and in the order of the calls; ``"deferred"``, when somebody
        waits for it, and then no more than that needs; or ``"adversarial"``, in any order that streams and events
        allow, as the seed chooses. docs/checked_host.md says what the last two find. An error in a piece of work is
        raised by the call that enqueues it where it runs at once, and otherwise, once, by the first call that waits
        for something that comes after it.
    seed : int
        What ``"adversarial"`` chooses by, at least 0.
    check : bool
        Whether memory is watched as well: what is read before it is written, used after it is freed, or written where
        nobody may. docs/checked_host.md says what is found, and what it costs.
    faults : sequence of Fault
        Failures that are asked for; see `gpu_runtime.faults`.
    """

    def __init__(
        self,
        *,
        ops: OpRegistry | None = None,
        memory_limit: int | None = None,
        order: OrderName = "in_order",
        seed: int = 0,
        check: bool = False,
        faults: Sequence[Fault] = (),
    ) -> None:
        memory = (CheckedMemory if check else HostMemory)(memory_limit, faults)
        super().__init__(open_order(order, seed), memory, faults)
        self._ops = REGISTRY if ops is None else ops
        self._debug_sync = False

    def has_module(self, module: str) -> bool:
        self._check_open()
        return self._ops.has_kernels(module)

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
        cluster: int = 1,
    ) -> None:
        on = self._stream(stream)
        if not isinstance(handle, KernelHandle):
            raise TypeError(f"handle: expected what kernel() returned, got {handle!r}")
        op, dtype = self._ops.find(handle.module, handle.name)
        key = (op, dtype, *_axes(grid), None, *_axes(block), None, shared_mem, cluster, *args)
        ready = self._prepared.find(key, lambda: self._prepare(op, dtype, grid, block, shared_mem, cluster, args))
        call: _Launch = ready.call
        if self._faults:
            self._ask_faults("launch", handle.name)
        if self._traces.active:
            geometry = call.blocks, call.threads
            self._traces.add(LaunchRecord("kernel", handle.name, *geometry, stream=on.handle, shared_bytes=shared_mem))
        self._enqueue(on, lambda: self._run_reference(ready))
        if self._debug_sync and on.capture is None:
            self.synchronize(stream)

    def _prepare(
        self, op: Op, dtype: str, grid: Dim3, block: Dim3, shared_mem: int, cluster: int, args: Sequence[Any]
    ) -> tuple[_Launch, dict[str, Any]]:
        """Check a launch; addresses outside live memory, and overlaps, are refused before anything is enqueued."""
        blocks, threads = check_geometry(grid, block, shared_mem, self.limits(), cluster)
        values = check_arguments(op.spec, dtype, args)
        dims = op.spec.dims(values)
        bound = self._bind(op, dtype, values, dims)
        refuse_overlap(op.spec, values, bound)
        footprint = None
        if self._checked is not None:
            footprint = launch_footprint(self._checked, op.spec, values, dims, bound)
            if op.spec.indirect:
                bound["memory"] = TableMemory(self._checked, op.spec.name, bound, footprint.note_rows)
        return _Launch(op, dtype, values, dims, blocks, threads, footprint), bound

    def _run_reference(self, ready: Prepared) -> None:
        call: _Launch = ready.call
        if call.footprint is not None:  # it keeps the blocks, and knows when they were freed
            with np.errstate(all="ignore"):
                call.footprint.run(lambda: call.op.reference(**ready.bound))
            return
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

    @property
    def debug_sync_kernels(self) -> bool:
        self._check_open()
        return self._debug_sync

    @debug_sync_kernels.setter
    def debug_sync_kernels(self, on: bool) -> None:
        self._check_open()
        self._debug_sync = bool(on)

    def is_watched(self) -> bool:
        self._check_open()
        return bool(self._debug_sync or self._faults or self._traces.active)

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
            self._let_go()
            self._memory.end()
            self._closed = True
            streams = tuple(self._streams.values())
        for stream in streams:
            self._drop_capture(stream)
        self._order.close(streams)
        self._memory.closed = True
        for orphan in self._memory.take_orphans():
            self._memory.let_go(orphan)
        for entry in (*self._memory.sweep(), *self._memory.pinned):
            log.warning("close: never freed: %s", entry)
        for memory in tuple(self._pinned.values()):
            self._memory.free_pinned(DevicePtr(memory.address))
        self._pinned.clear()
        self._graphs.clear()
        self._streams.clear()
        self._events.clear()
        self._memory.finish()
        try:
            self._memory.report("close")
        finally:
            self._order.raise_failures()


def _axes(extent: Any) -> tuple[Any, ...]:
    """Return a grid or block as a tuple, unchecked."""
    return tuple(extent) if isinstance(extent, tuple | list) else (extent,)
