# SPDX-License-Identifier: MIT OR Apache-2.0
"""Timing on a device: its own clock, its ceilings, and a reader that empties the L2.

Everything works on the host backend too, where the times mean nothing but the paths are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpu_runtime import DevicePtr, GpuBackend, LaunchPlan, Limits, Op, OpRegistry, OpSpec, dtypes
from gpu_runtime.config import Config
from gpu_runtime.op import EXACT, REGISTRY, Dims, Inputs, scalar, tensor

Array = np.ndarray[Any, np.dtype[Any]]

THREADS: Final = 512
FLUSH_BYTES: Final = 192 << 20
"""What is read to empty the L2: more than three times that of an H200 (60 MB)."""

SPEC: Final = OpSpec(
    name="read_all",
    args=(
        tensor("src", "in", "u64", "count"),
        tensor("out", "out", "u64", "blocks"),
        scalar("count", "i64"),
        scalar("blocks", "i32"),
    ),
    tolerance=EXACT,
    dtypes=("f32",),
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """As many blocks as ``out`` has places."""
    return LaunchPlan(SPEC.entry(dtype), (dims["blocks"], 1, 1), (THREADS, 1, 1))


def reference(*, src: Array, out: Array, count: int, blocks: int) -> None:
    """The exclusive or of what each block reads: packs of two words, round and round over all blocks."""
    packs = np.bitwise_xor.reduce(src.reshape(-1, 2), axis=1)
    owner = np.arange(len(packs)) // THREADS % blocks
    out[...] = 0
    np.bitwise_xor.at(out, owner, packs)


def make_inputs(rng: np.random.Generator, dtype: str, *, count: int, blocks: int) -> Inputs:
    return {
        "src": rng.integers(0, 1 << 63, count).astype(np.uint64),
        "out": np.zeros(blocks, dtype=np.uint64),
        "count": count,
        "blocks": blocks,
    }


READ_ALL: Final = Op(
    SPEC,
    reference,
    make_inputs,
    ({"count": 2, "blocks": 3}, {"count": 2 * THREADS, "blocks": 1}, {"count": 40_002, "blocks": 7}),
    plan=plan,
    source=Path(__file__).with_name("read_all.cu"),
)


def open_device(device: str) -> GpuBackend:
    """Open ``"host"``, ``"cuda"`` or ``"cuda:N"`` with the models' kernels and the benchmarks' own.

    Raises
    ------
    ValueError
        When it is none of these.
    BackendUnavailable
        When it cannot be opened.
    """
    ops = OpRegistry()
    for op in (*REGISTRY, READ_ALL):
        ops.register(op)
    kind, colon, number = device.partition(":")
    if kind == "cuda" and (not colon or number.isdecimal()):
        from gpu_runtime.cuda import nvrtc
        from gpu_runtime.cuda.backend import CudaBackend

        settings = Config.from_env()
        return CudaBackend(int(number or 0), ops=ops, cache=nvrtc.default_cache(settings), nvtx=settings.nvtx)
    if device != "host":
        raise ValueError(f"device: expected 'host', 'cuda' or 'cuda:N', got {device!r}")
    from gpu_runtime.host import HostBackend

    return HostBackend(ops=ops)


class Clock:
    """Times work by the device's own clock.

    Parameters
    ----------
    gpu : GpuBackend
    """

    def __init__(self, gpu: GpuBackend) -> None:
        self.gpu = gpu
        self.stream = gpu.create_stream()
        """Where graphs are captured and run; apart from the default stream, on which the model works."""
        self._start, self._stop = gpu.create_event(timing=True), gpu.create_event(timing=True)

    def close(self) -> None:
        """Destroy the events and the stream."""
        for event in (self._start, self._stop):
            self.gpu.destroy_event(event)
        self.gpu.destroy_stream(self.stream)

    def ms(
        self, work: Callable[[], object], repeats: int, *, stream: int = 0, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Return the milliseconds that ``work``, which enqueues on ``stream``, takes there, each time.

        ``before`` may enqueue something that keeps the device busy while the host enqueues ``work``: what is measured
        is then the device alone, without the host's pauses.
        """
        times = []
        for _ in range(repeats):
            if before is not None:
                before()
            self.gpu.record_event(self._start, stream)
            work()
            self.gpu.record_event(self._stop, stream)
            self.gpu.event_synchronize(self._stop)
            times.append(self.gpu.event_elapsed_ms(self._start, self._stop))
        return times

    @contextmanager
    def graph(self, enqueue: Callable[[int], object]) -> Iterator[int]:
        """Capture what ``enqueue(stream)`` puts on a stream, as a graph that lives inside the context."""
        self.gpu.begin_capture(self.stream)
        try:
            enqueue(self.stream)
        except BaseException:
            self.gpu.abort_capture_if_active(self.stream)
            raise
        graph = self.gpu.end_capture(self.stream)
        try:
            yield graph
        finally:
            self.gpu.synchronize(self.stream)
            self.gpu.destroy_graph(graph)

    def graph_ms(self, enqueue: Callable[[int], object], repeats: int) -> float:
        """Return the median milliseconds of a replay of what ``enqueue(stream)`` puts on a stream."""
        with self.graph(enqueue) as graph:
            self.gpu.launch_graph(graph, self.stream)  # the first launch also uploads it
            self.gpu.synchronize(self.stream)
            return statistics.median(
                self.ms(lambda: self.gpu.launch_graph(graph, self.stream), repeats, stream=self.stream)
            )


class Reader:
    """Reads a buffer of its own, at full speed, for as long as is wanted. A context manager.

    Parameters
    ----------
    gpu : GpuBackend
    nbytes : int
        Size of the buffer, a multiple of 16.
    """

    def __init__(self, gpu: GpuBackend, nbytes: int) -> None:
        self.gpu = gpu
        self.nbytes = nbytes
        self._blocks = 16 * gpu.sm_count()
        with ExitStack() as undo:
            self._src = random_buffer(gpu, nbytes, "f32")
            undo.callback(gpu.free, self._src)
            self._out = gpu.alloc(8 * self._blocks, tag="benchmark")
            undo.callback(gpu.free, self._out)
            self._undo = undo.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def read(self, nbytes: int, stream: int = 0) -> None:
        """Enqueue the reading of the first ``nbytes`` (a multiple of 16)."""
        READ_ALL.launch(self.gpu, "f32", (self._src, self._out, nbytes // 8, self._blocks), stream)

    def flush(self, stream: int) -> None:
        """Enqueue a read that leaves nothing else in the L2."""
        self.read(min(FLUSH_BYTES, self.nbytes), stream)


def random_buffer(gpu: GpuBackend, nbytes: int, dtype: str, deviation: float = 1.0) -> DevicePtr:
    """Allocate memory that holds random values: a drawn block, doubled until it fills the buffer."""
    kind = dtypes.NUMPY[dtype]
    block = np.random.default_rng(0).standard_normal(min(1 << 20, nbytes // kind.itemsize), dtype=np.float32)
    ptr = gpu.alloc(nbytes, tag="benchmark")
    filled = len(block) * kind.itemsize
    gpu.copy_h2d((block * np.float32(deviation)).astype(kind), ptr)
    while filled < nbytes:
        size = min(filled, nbytes - filled)
        gpu.copy_d2d(ptr, ptr.offset(filled), size)
        filled += size
    return ptr


def read_bandwidth(clock: Clock, reader: Reader, repeats: int) -> float:
    """Return the GB/s at which the whole buffer is read."""
    reader.read(reader.nbytes)
    return reader.nbytes / statistics.median(clock.ms(lambda: reader.read(reader.nbytes), repeats)) / 1e6


def product_rate(clock: Clock, size: int, dtype: str, repeats: int) -> float:
    """Return the TFLOP/s of a square product of random values."""
    gpu, itemsize, space = clock.gpu, dtypes.itemsize(dtype), max(clock.gpu.limits().gemm_workspace_bytes, 256)
    with ExitStack() as undo:

        def held(ptr: DevicePtr) -> DevicePtr:
            undo.callback(gpu.free, ptr)
            return ptr

        a, w = (held(random_buffer(gpu, size * size * itemsize, dtype)) for _ in range(2))
        c, workspace = held(gpu.alloc(size * size * itemsize)), held(gpu.alloc(space))

        def multiply() -> None:
            gpu.gemm(a, w, c, size, size, size, dtype=dtype, workspace=workspace, workspace_bytes=space)

        multiply()
        return 2 * size**3 / statistics.median(clock.ms(multiply, repeats)) / 1e9


def ceilings(clock: Clock, reader: Reader, dtype: str, repeats: int) -> dict[str, float]:
    """Return what this device reaches on plain work of either kind."""
    size = 8192 if clock.gpu.kind() == "cuda" else 64
    return {
        "read_gb_per_s": round(read_bandwidth(clock, reader, repeats), 1),
        "read_bytes": reader.nbytes,
        f"product_{dtype}_tflop_per_s": round(product_rate(clock, size, dtype, repeats), 1),
        "product_size": size,
    }
