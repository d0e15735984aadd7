# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the checking host backend share: call sites with names of their own, and an op to be filled in.

Reports name places as ``file:line in function``: `made`, `dropped` and `read` are functions so that a test can say
which of them a report must name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_runtime import DevicePtr, GpuBackend, dtypes
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, LaunchPlan, Op, OpRegistry, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike

Array = np.ndarray[Any, np.dtype[Any]]
Reference = Callable[..., None]

SPEC = OpSpec(
    name="probe",
    args=(
        tensor("x", "in", "T", "rows", "width", row_stride="x_stride"),
        tensor("sum", "inout", "T", "rows", "width", row_stride="out_stride", optional=True, reads_when="add"),
        tensor("scratch", "inout", "u8", "scratch_bytes", optional=True, reads_when=False),
        tensor("table", "in", "u64", "rows", optional=True),
        tensor("counts", "in", "i32", "rows", optional=True),
        tensor("out", "out", "T", "rows", "width", row_stride="out_stride", optional=True),
        tensor("marks", "out", "u8", "rows", optional=True),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("x_stride", "i64"),
        scalar("out_stride", "i64"),
        scalar("scratch_bytes", "i64"),
        scalar("add", "i32"),
    ),
    tolerance=EXACT,
    aliases=(("x", "out"),),
    indirect=True,
)

ROWS, WIDTH = 2, 4
BYTES = ROWS * WIDTH * 4


def plan(dims: Mapping[str, int], dtype: str, limits: Limits) -> LaunchPlan:
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size, 1, 1))


def no_inputs(rng: np.random.Generator, dtype: str, **case: Any) -> Mapping[str, Any]:
    raise NotImplementedError("the probe is launched by hand")


def compute(*, memory: Any, x: Array, table: Array, counts: Array, out: Array, sum: Array, add: int, **_: Any) -> None:
    """``out = 2 x``; ``sum = x``, or ``sum += x``; rows are gathered through ``table`` to no end."""
    if table is not None:
        memory.gather_rows(table, counts, offset=0, stride=WIDTH, width=WIDTH, dtype="f32")
    if sum is not None:
        sum[...] = sum + x if add else x
    if out is not None:
        out[...] = x.astype(np.float32) * np.float32(2)


def opened(reference: Reference = compute, **options: Any) -> HostBackend:
    """Return a checking backend whose kernel ``probe`` computes ``reference``."""
    ops = OpRegistry()
    ops.register(Op(SPEC, reference, no_inputs, (), plan=plan))
    return HostBackend(ops=ops, check=True, **options)


def launch(gpu: GpuBackend, stream: StreamLike = 0, dtype: str = "f32", **given: Any) -> None:
    """Launch the probe over two rows of four elements, with NULL for every pointer that is not given."""
    defaults = {"rows": ROWS, "width": WIDTH, "x_stride": WIDTH, "out_stride": WIDTH, "scratch_bytes": 0, "add": 0}
    assert set(given) <= {arg.name for arg in SPEC.args}
    values: Sequence[Any] = [(defaults | given).get(arg.name, 0) for arg in SPEC.args]
    gpu.launch(gpu.kernel("probe", f"probe_{dtype}"), ROWS, 32, 0, stream, values)


def made(gpu: GpuBackend, nbytes: int = BYTES, tag: str = "") -> DevicePtr:
    return gpu.alloc(nbytes, tag=tag)


def filled(gpu: GpuBackend, nbytes: int = BYTES, tag: str = "") -> DevicePtr:
    """Return a block in which every byte is 1."""
    ptr = made(gpu, nbytes, tag)
    gpu.memset(ptr, 1, nbytes)
    return ptr


def dropped(gpu: GpuBackend, ptr: int) -> None:
    gpu.free(ptr)


def dropped_again(gpu: GpuBackend, ptr: int) -> None:
    gpu.free(ptr)


def table_of(gpu: GpuBackend, addresses: Sequence[int]) -> DevicePtr:
    """Return a device array of addresses."""
    ptr = made(gpu, 8 * len(addresses))
    gpu.copy_h2d(np.array([int(one) for one in addresses], np.uint64), ptr)
    return ptr


def counts_of(gpu: GpuBackend, counts: Sequence[int]) -> DevicePtr:
    """Return a device array of int32."""
    ptr = made(gpu, 4 * len(counts))
    gpu.copy_h2d(np.array(counts, np.int32), ptr)
    return ptr


def read(gpu: GpuBackend, ptr: int, nbytes: int = BYTES) -> bytes:
    target = bytearray(nbytes)
    gpu.copy_d2h(ptr, target)
    return bytes(target)


def floats(gpu: GpuBackend, ptr: int, count: int = ROWS * WIDTH, dtype: str = "f32") -> list[float]:
    target = np.empty(count, dtypes.NUMPY[dtype])
    gpu.copy_d2h(ptr, target)
    return [float(value) for value in target]
