# SPDX-License-Identifier: MIT OR Apache-2.0
"""A kernel small enough to see through: ``out = x * factor (+ bias)``, over strided rows. toy.cu is its CUDA form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, LaunchPlan, Op, OpRegistry, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike

Array = np.ndarray[Any, np.dtype[Any]]

SPEC = OpSpec(
    name="toy",
    args=(
        tensor("x", "in", "T", "rows", "width", row_stride="x_stride"),
        tensor("bias", "in", "T", "width", optional=True),
        tensor("out", "out", "T", "rows", "width", row_stride="out_stride"),
        scalar("rows", "i32"),
        scalar("width", "i32"),
        scalar("x_stride", "i64"),
        scalar("out_stride", "i64"),
        scalar("factor", "f32"),
    ),
    tolerance=EXACT,
    aliases=(("x", "out"),),
)

FAIL = 666.0
"""The factor for which the kernel fails while it runs. On a GPU that is the end of the process's context."""

SLOW = 0.75
"""The factor for which the kernel takes 30 ms on a GPU, so that what should wait for it can be seen to wait."""


def plan(dims: Mapping[str, int], dtype: str, limits: Limits) -> LaunchPlan:
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (limits.warp_size, 1, 1))


def reference(*, x: Array, bias: Array | None, out: Array, factor: float, **_: int) -> None:
    if factor == FAIL:
        raise DeviceError("toy: failed as asked")
    product = x.astype(np.float32) * np.float32(factor)
    out[...] = product if bias is None else product + bias.astype(np.float32)


def make_inputs(rng: np.random.Generator, dtype: str, **case: Any) -> Mapping[str, Any]:
    raise NotImplementedError("the toy is launched by hand")


REGISTRY = OpRegistry()
OP = REGISTRY.register(
    Op(
        SPEC,
        reference,
        make_inputs,
        (),
        plan=plan,
        source=Path(__file__).with_suffix(".cu"),
        include=(metrale_kernels.ROOT,),
    )
)


def values(x: Any, out: Any, **changes: Any) -> list[Any]:
    """Return the kernel's arguments for one row of four elements, with the given ones changed."""
    given: dict[str, Any] = {
        "x": x,
        "bias": 0,
        "out": out,
        "rows": 1,
        "width": 4,
        "x_stride": 4,
        "out_stride": 4,
        "factor": 2.0,
    }
    assert set(changes) <= set(given)
    return list((given | changes).values())


def launch(gpu: GpuBackend, arguments: Sequence[Any], stream: StreamLike = 0) -> None:
    """Launch the float32 kernel with one block of 32 threads."""
    gpu.launch(gpu.kernel("toy", "toy_f32"), 1, 32, 0, stream, arguments)
