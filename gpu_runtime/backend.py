# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one interface to a device.

Conventions of every method: sizes, offsets and pitches are bytes unless said otherwise; addresses are `DevicePtr` (any
int will do as an argument); a ``stream`` is what `gpu_runtime.streams.StreamLike` says, 0 being the backend's default;
a call with a ``stream`` enqueues and returns, and a call without one is done when it returns. Copies name their source
first. Errors are those of `gpu_runtime.errors`; a wrong argument is a ValueError or TypeError, raised before anything
is enqueued. Every method may be called from any thread.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self

from gpu_runtime import checks
from gpu_runtime.blocks import Blocks
from gpu_runtime.handles import KernelHandle, LaunchRecord, PinnedMemory
from gpu_runtime.launch import Dim3
from gpu_runtime.leaving import close_at_exit
from gpu_runtime.ledger import Allocation
from gpu_runtime.limits import Limits
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import Ranges
from gpu_runtime.streams import StreamLike

NULL = DevicePtr.NULL


class GpuBackend(abc.ABC):
    """A device: memory, copies, launches, products, streams, events and graphs.

    Attributes
    ----------
    ranges : Ranges or None
        Where those who use the backend open ranges for a profiler; None: nowhere. They look when they are made, so it
        is set before that.
    """

    ranges: Ranges | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_at_exit(self.close, error)

    # memory

    @abc.abstractmethod
    def alloc(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        """Allocate ``nbytes`` (at least 1), aligned to 256, with unspecified content.

        ``tag`` says what for, in reports. Raises OutOfMemory, after which the backend works on.
        """

    @abc.abstractmethod
    def alloc_managed(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        """Allocate memory that the host may also read and write by its address. Otherwise as `alloc`."""

    @abc.abstractmethod
    def free(self, ptr: int) -> None:
        """Free a block by its first address; NULL is a no-op. Work already enqueued may still use the block.

        Raises InvalidPointer for any other address, a block freed before included; BufferError while somebody else
        uses it (see `live_exports`).
        """

    @abc.abstractmethod
    def memset(self, ptr: int, value: int, nbytes: int) -> None:
        """Set every byte of a span to ``value`` (0 to 255)."""

    @abc.abstractmethod
    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        """Enqueue `memset`."""

    @abc.abstractmethod
    def total_memory(self) -> int:
        """Return the bytes that the device has."""

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Return the bytes that can still be allocated."""

    @abc.abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes in live blocks of this backend."""

    @abc.abstractmethod
    def live_alloc_count(self) -> int:
        """Return the number of live blocks of this backend."""

    @abc.abstractmethod
    def alloc_report(self) -> list[Allocation]:
        """Return every live block, oldest first, with its tag and the place that allocated it."""

    @abc.abstractmethod
    def find_block(self, address: int) -> Allocation | None:
        """Return the live block, or the page-locked memory, that contains ``address``; None when there is none.

        Memory that this backend did not allocate is none of its blocks. The object is the same one from the allocation
        to the free, so it tells a block from a later one at its place.
        """

    @abc.abstractmethod
    def sweep_unreleased(self) -> list[Allocation]:
        """Free every live block and return what they were. BufferError when one of them has a live export."""

    @abc.abstractmethod
    def scan_redzones(self) -> list[Allocation]:
        """Return the live blocks with a byte written just before their start or just after their end."""

    @abc.abstractmethod
    def poison_redzones(self) -> None:
        """Restore the pattern that `scan_redzones` looks for around every live block."""

    def live_exports(self, ptr: int = NULL) -> int:
        """Return how many exports the block that contains ``ptr`` has, or (NULL) all blocks: page-locked ones too.

        An export is a block's use by somebody else, by DLPack, an array interface or a ``memoryview``. A block that
        has one is not freed: `free`, `free_host_pinned`, `sweep_unreleased` and `close` raise BufferError instead, and
        change nothing.
        """
        self._let_go()
        return self._blocks.exports_at(checks.address("live_exports: ptr", ptr))

    @property
    @abc.abstractmethod
    def _blocks(self) -> Blocks:
        """The blocks and their exports, for the exchange with others."""

    @abc.abstractmethod
    def _let_go(self, *, wait: bool = False) -> None:
        """Let go of what buffers have left behind and no work uses any more; or, after waiting for that, of all."""

    # copies

    @abc.abstractmethod
    def copy_h2d(self, src: Any, dst: int) -> None:
        """Copy a contiguous host buffer (array or bytes) to the device."""

    @abc.abstractmethod
    def copy_d2h(self, src: int, dst: Any) -> None:
        """Fill a writable contiguous host buffer from the device, after all work on the default stream."""

    @abc.abstractmethod
    def copy_d2d(self, src: int, dst: int, nbytes: int) -> None:
        """Copy within the device. The spans must not overlap."""

    @abc.abstractmethod
    def copy_d2h_on_stream(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        """Fill a host buffer after the work on ``stream``; returns when it is filled."""

    @abc.abstractmethod
    def copy_h2d_on_stream(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        """Copy from a host buffer after the work on ``stream``; returns when it is done, and ``src`` may change.

        For threads that each fill page-locked memory and send it: what `copy_h2d_async` and `synchronize` do takes
        twice as many calls of the driver.
        """

    @abc.abstractmethod
    def copy_files_h2d(self, spans: Iterable[tuple[int, int, int, int]], stream: StreamLike = 0) -> None:
        """Copy spans of open files, each ``(descriptor, offset, nbytes, dst)``, after the work on ``stream``.

        Returns when it is done. Page-locked memory, 30 MiB at most, is used meanwhile. Raises EOFError when a span ends
        past the end of its file, OSError when that cannot be read. Some of the spans may have been copied then.
        """

    @abc.abstractmethod
    def copy_h2d_async(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        """Enqueue a copy from a host buffer, which is kept alive and read when the copy runs."""

    @abc.abstractmethod
    def copy_h2d_async_retained(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        """Enqueue a copy of the bytes that ``src`` holds now; the caller may change ``src`` at once."""

    @abc.abstractmethod
    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        """Enqueue a copy to a host buffer, which is kept alive; it holds the bytes once the stream has got there."""

    @abc.abstractmethod
    def copy_d2d_async(self, src: int, dst: int, nbytes: int, stream: StreamLike = 0) -> None:
        """Enqueue `copy_d2d`."""

    @abc.abstractmethod
    def copy_d2d_2d_async(
        self, src: int, src_pitch: int, dst: int, dst_pitch: int, width: int, height: int, stream: StreamLike = 0
    ) -> None:
        """Enqueue a copy of ``height`` rows of ``width`` bytes; rows start a pitch apart on either side.

        A pitch is at least the width. The spans from first to last row must not overlap.
        """

    @abc.abstractmethod
    def mark_written(self, ptr: int, nbytes: int) -> None:
        """Tell a checking backend that foreign code wrote these bytes."""

    @abc.abstractmethod
    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        """Allocate page-locked host memory."""

    @abc.abstractmethod
    def free_host_pinned(self, memory: PinnedMemory) -> None:
        """Free page-locked host memory. Work already enqueued may still use it.

        Raises InvalidPointer when it is not live, BufferError while it has a live export.
        """

    @abc.abstractmethod
    def host_ptr_to_device(self, memory: PinnedMemory) -> DevicePtr:
        """Return the address at which kernels and copies see page-locked host memory."""

    # launches

    @abc.abstractmethod
    def has_module(self, module: str) -> bool:
        """Return whether there is a kernel module of this name."""

    @abc.abstractmethod
    def kernel(self, module: str, name: str) -> KernelHandle:
        """Return the handle of an entry point. Raises UnknownKernel."""

    @abc.abstractmethod
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
        """Enqueue a kernel.

        Parameters
        ----------
        handle : KernelHandle
        grid, block : int or tuple of int
            Blocks and threads in x, y, z.
        shared_mem : int
            Dynamic shared memory of a block.
        stream : StreamLike
        args : sequence
            Addresses and numbers in the order of the op's spec; each is checked and packed to the spec's C type.
        cooperative : bool
            Whether all blocks must be resident at once, so that they may wait for each other.
        programmatic : bool
            Whether the kernel may start before the one ahead of it ends (it waits by ``griddepcontrol``).
        cluster : int
            Neighbouring blocks, along x, that run together and see each other's shared memory; a power of two.
        """

    @property
    @abc.abstractmethod
    def debug_sync_kernels(self) -> bool:
        """Whether every launch waits for its kernel, so that an error names it. Off at first; settable."""

    @debug_sync_kernels.setter
    @abc.abstractmethod
    def debug_sync_kernels(self, on: bool) -> None: ...

    @abc.abstractmethod
    def launch_trace(self) -> AbstractContextManager[list[LaunchRecord]]:
        """Return a context whose value lists what is enqueued or waited for inside it, by any thread.

        What replayed graphs do is not in it.
        """

    @abc.abstractmethod
    def is_watched(self) -> bool:
        """Return whether somebody wants to know of every launch, so that a graph should not hide any.

        That is so while a `launch_trace` is open or `debug_sync_kernels` is set, and always on a backend with faults.
        """

    # products

    @abc.abstractmethod
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
        """Enqueue one product, as `gpu_runtime.gemm.Gemm` defines it.

        Parameters
        ----------
        a, w, c, bias : int
            Addresses of ``[m, k]``, ``[n, k]``, ``[m, n]`` and ``[n]`` (NULL: no bias), row-major. ``c`` may share no
            element with the others.
        dtype, out_dtype : str
            Element types of a, w and bias, and of c (None: the same).
        lda, ldw, ldc : int or None
            Distance between rows in elements (None: contiguous).
        workspace, workspace_bytes : int
            Device memory that the product may use until the stream has passed it; NULL lets the backend choose
            algorithms that need none.
        algorithm : int or None
            A fixed choice among the backend's algorithms, so that equal calls give equal bits; None lets it choose.
            With `Limits.fixed_rows` rows, a row's bits then depend on its own elements and the matrix alone.
        """

    @abc.abstractmethod
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
        """Enqueue ``batch`` products as `gemm` does; operand ``i`` starts ``i * stride`` elements after the first.

        Products may share A or W (stride 0). The rows of their C may interleave, as the heads of an attention do.
        """

    # streams and events

    @abc.abstractmethod
    def default_stream(self) -> int:
        """Return the handle of the default stream: non-blocking, this backend's own, never the legacy stream."""

    @abc.abstractmethod
    def create_stream(self) -> int:
        """Create a non-blocking stream and return its handle."""

    @abc.abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream that `create_stream` made. Its work is finished first. Raises DeviceError for any other."""

    @abc.abstractmethod
    def synchronize(self, stream: StreamLike = 0) -> None:
        """Wait for everything on ``stream``. Raises DeviceError in a capture, or with what went wrong on it."""

    @abc.abstractmethod
    def create_event(self, *, timing: bool = False) -> int:
        """Create an event and return its handle."""

    @abc.abstractmethod
    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        """Let ``event`` stand for everything enqueued on ``stream`` so far."""

    @abc.abstractmethod
    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        """Let later work on ``stream`` come after what ``event`` stands for. A capture spreads along this edge.

        Raises DeviceError when a capturing stream would wait for work outside its capture, even if that is done.
        """

    @abc.abstractmethod
    def event_query(self, event: int) -> bool:
        """Return whether what ``event`` stands for is done (True when it was never recorded)."""

    @abc.abstractmethod
    def event_synchronize(self, event: int) -> None:
        """Wait for what ``event`` stands for."""

    @abc.abstractmethod
    def event_elapsed_ms(self, start: int, end: int) -> float:
        """Return the milliseconds between two timing events that have been reached."""

    @abc.abstractmethod
    def destroy_event(self, event: int) -> None:
        """Destroy an event; a stream that waits for it is not disturbed."""

    # graphs

    @abc.abstractmethod
    def begin_capture(self, stream: StreamLike = 0) -> None:
        """Start keeping the work put on ``stream`` instead of running it. Refused on the legacy stream."""

    @abc.abstractmethod
    def end_capture(self, stream: StreamLike = 0) -> int:
        """End the capture that ``stream`` began and return a graph's handle.

        Raises DeviceError, and drops the capture, when a stream that joined it was not joined back by an event.
        """

    @abc.abstractmethod
    def launch_graph(self, graph: int, stream: StreamLike = 0) -> None:
        """Enqueue a graph: the captured work with the captured addresses and arguments.

        In a capture the graph becomes part of the new one.
        """

    @abc.abstractmethod
    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph. Launches already enqueued still run."""

    @abc.abstractmethod
    def stream_is_capturing(self, stream: StreamLike = 0) -> bool:
        """Return whether work on ``stream`` goes to a capture."""

    @abc.abstractmethod
    def abort_capture_if_active(self, stream: StreamLike = 0) -> bool:
        """Drop the capture that ``stream`` belongs to, if any; return whether there was one."""

    # device

    @abc.abstractmethod
    def bind_to_thread(self) -> None:
        """Make this device current on the calling thread, for foreign code that expects it."""

    @abc.abstractmethod
    def sm_count(self) -> int:
        """Return the number of multiprocessors."""

    @abc.abstractmethod
    def limits(self) -> Limits:
        """Return what launches may ask for."""

    @abc.abstractmethod
    def kind(self) -> Literal["host", "cuda"]:
        """Return which backend this is."""

    @abc.abstractmethod
    def name(self) -> str:
        """Return the device's name."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish all work, log blocks that were never freed with their call sites, free them and every handle.

        Calling it again does nothing; every other call raises DeviceError from then on. While a block has a live export
        it is BufferError, and the backend stays open.
        """
