# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device memory of a model, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.launch import check_geometry
from metrale.errors import CheckpointError
from metrale.nllb.device_weights import weight_layout
from metrale.nllb.limits import ModelShape
from metrale.nllb.workspace import workspace_layout
from metrale.ops.decode_attention import plan as decode_attention_plan
from metrale.ops.packed_attention import plan as packed_attention_plan


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
            f"the model needs {plan.total:,} bytes ({plan}), and {free:,} are free on {gpu.name()}; "
            "a smaller max_batch, max_source_len or max_new_tokens needs less",
            requested=plan.total,
            live=gpu.live_bytes(),
            limit=gpu.total_memory(),
        )


def check_launches(gpu: GpuBackend, shape: ModelShape, path: Path) -> None:
    """Refuse a shape whose attention this device cannot launch, which would otherwise only show in a forward.

    Raises
    ------
    CheckpointError
        When the heads are too wide, or the limits ask for too large a grid.
    """
    config, limits, device = shape.config, shape.limits, gpu.limits()
    encoder = {
        "heads": config.encoder_attention_heads,
        "head_dim": config.encoder_head_dim,
        "longest": limits.max_source_len,
        "offset_count": limits.max_batch + 1,
    }
    decoder = {"heads": config.decoder_attention_heads, "head_dim": config.decoder_head_dim, "rows": shape.decoder_rows}
    for side, plan, dims in (
        ("encoder", packed_attention_plan, encoder),
        ("decoder", decode_attention_plan, decoder),
    ):
        launch = plan(dims, shape.dtype, device)
        try:
            check_geometry(launch.grid, launch.block, launch.shared_bytes, device)
        except ValueError as error:
            asked = ", ".join(f"{name} {value}" for name, value in dims.items())
            raise CheckpointError(path, f"the {side}'s attention ({asked}) is too large here: {error}") from None


def plan_memory(shape: ModelShape) -> MemoryPlan:
    """Return what a model of this shape allocates."""
    return MemoryPlan(
        weights=weight_layout(shape).nbytes,
        kv=shape.kv_bytes,
        logits=shape.logits_rows * shape.logits_stride * shape.itemsize,
        workspace=workspace_layout(shape).nbytes,
    )
