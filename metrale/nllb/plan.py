# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device memory of a model, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from metrale.nllb.device_weights import weight_layout
from metrale.nllb.limits import ModelShape
from metrale.nllb.workspace import workspace_layout


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Device memory in bytes, by purpose: one allocation each, made at load and never grown."""

    weights: int
    kv: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of the four."""
        return self.weights + self.kv + self.logits + self.workspace

    def __str__(self) -> str:
        parts = ((name, getattr(self, name)) for name in ("weights", "kv", "logits", "workspace", "total"))
        return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts)


def check_memory(gpu: GpuBackend, plan: MemoryPlan) -> None:
    """Raise OutOfMemory when the plan cannot fit in what the device has free, before any work is done for it."""
    free = gpu.free_memory()
    if plan.total > free:
        raise OutOfMemory(
            f"the model needs {plan.total:,} bytes ({plan}), and {free:,} are free on {gpu.name()}",
            requested=plan.total,
            live=gpu.live_bytes(),
            limit=gpu.total_memory(),
        )


def plan_memory(shape: ModelShape) -> MemoryPlan:
    """Return what a model of this shape allocates."""
    return MemoryPlan(
        weights=weight_layout(shape).nbytes,
        kv=shape.kv_bytes,
        logits=shape.logits_rows * shape.logits_stride * shape.itemsize,
        workspace=workspace_layout(shape).nbytes,
    )
