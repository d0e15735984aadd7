# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device memory of a model, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.launch import check_geometry
from gpu_runtime.op import Op
from metrale.errors import CheckpointError, InvalidInput
from metrale.nllb.admission import FRAME_LEN, PREFIX_LEN
from metrale.nllb.device_weights import CROSS_KV, weight_layout
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.lora import adapter_layout, targets
from metrale.nllb.workspace import CROSS_KV_ROWS, workspace_layout
from metrale.ops.argmax import OP as ARGMAX
from metrale.ops.attention_weights import OP as ATTENTION_WEIGHTS
from metrale.ops.beam_candidates import MAX_CANDIDATES
from metrale.ops.beam_candidates import OP as BEAM_CANDIDATES
from metrale.ops.beam_layout import pool_width
from metrale.ops.beam_select import OP as BEAM_SELECT
from metrale.ops.decode_attention import OP as DECODE_ATTENTION
from metrale.ops.embed import OP as EMBED
from metrale.ops.kv_scatter import OP as KV_SCATTER
from metrale.ops.layer_norm import OP as LAYER_NORM
from metrale.ops.linear import ACTIVATION_NAMES
from metrale.ops.lora_down import OP as LORA_DOWN
from metrale.ops.lora_up import OP as LORA_UP
from metrale.ops.packed_attention import OP as PACKED_ATTENTION
from metrale.ops.sample import OP as SAMPLE


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Device memory in bytes, by purpose: one allocation each, made at load and never grown."""

    weights: int
    kv: int
    logits: int
    workspace: int
    adapters: int = 0

    @property
    def total(self) -> int:
        """The sum of them all."""
        return self.weights + self.kv + self.logits + self.workspace + self.adapters

    def __str__(self) -> str:
        names = ("weights", "kv", "logits", "workspace", *(["adapters"] if self.adapters else []), "total")
        parts = ((name, getattr(self, name)) for name in names)
        return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts)


def check_memory(gpu: GpuBackend, plan: MemoryPlan) -> None:
    """Raise OutOfMemory when the plan cannot fit in what the device has free, before any work is done for it."""
    free = gpu.free_memory()
    if plan.total > free:
        raise OutOfMemory(
            f"the model needs {plan.total:,} bytes ({plan}), and {free:,} are free on {gpu.name()}; "
            "a smaller max_batch, max_source_len or max_new_tokens needs less"
            + (", and so do max_adapters and max_lora_rank" if plan.adapters else ""),
            requested=plan.total,
            live=gpu.live_bytes(),
            limit=gpu.total_memory(),
        )


def check_pool(shape: ModelShape) -> None:
    """Refuse a KV pool that not even the shortest sequence fits into.

    Raises
    ------
    InvalidInput
        When ``kv_bytes`` is less than the frame of an empty source and the decoder's prefix need.
    """
    least = (FRAME_LEN + PREFIX_LEN) * shape.position_bytes
    if shape.kv_bytes < least:
        what = f"at least {least:,} bytes ({FRAME_LEN + PREFIX_LEN} positions of {shape.position_bytes:,} bytes)"
        raise InvalidInput("kv_bytes", what, f"{shape.kv_bytes:,}")


def check_launches(gpu: GpuBackend, shape: ModelShape, path: Path) -> None:
    """Refuse a shape whose kernels this device cannot launch, which would otherwise only show in a forward.

    Raises
    ------
    CheckpointError
        When a layer is too wide, or the limits ask for too large a grid.
    """
    device = gpu.limits()
    for side, op, dims in largest_launches(shape):
        assert op.plan is not None
        try:
            dtype = shape.dtype if shape.dtype in op.spec.dtypes else op.spec.dtypes[0]  # some know only one
            launch = op.plan(dims, dtype, device)
            check_geometry(launch.grid, launch.block, launch.shared_bytes, device)
        except ValueError as error:
            asked = ", ".join(f"{name} {value}" for name, value in dims.items())
            raise CheckpointError(path, f"the {side}'s {op.spec.name} ({asked}) is too large here: {error}") from None


def largest_launches(shape: ModelShape) -> Iterator[tuple[str, Op, dict[str, int]]]:
    """Yield every kernel that a model launches, with the side it is for and its integer arguments at the limits."""
    config, limits = shape.config, shape.limits
    d, wide = config.d_model, shape.kv_width
    embedded = {
        "width": d,
        "vocab": shape.vocab,
        "position_count": shape.position_count,
        "cell_count": shape.feed_cells,
        "blank": config.pad_token_id,
    }
    whole, last_layer = {"src_stride": wide, "offset": 0}, {"src_stride": 3 * d, "offset": wide - 2 * d}
    for side, rows in (("encoder", limits.encoder_tokens), ("decoder", shape.prefix_rows)):
        yield side, EMBED, {"rows": rows, **embedded}
        yield side, LAYER_NORM, {"rows": rows, "width": d}
    some = min(limits.encoder_tokens, CROSS_KV_ROWS)
    yield "encoder", KV_SCATTER, {"rows": some, "width": wide, **whole, "kv_stride": wide}
    yield "decoder", KV_SCATTER, {"rows": shape.prefix_rows, "width": 2 * d, **last_layer, "kv_stride": wide}
    yield (
        "encoder",
        PACKED_ATTENTION,
        {
            "tokens": limits.encoder_tokens,
            "offset_count": limits.max_batch + 1,
            "longest": limits.max_source_len,
            "heads": config.encoder_attention_heads,
            "head_dim": config.encoder_head_dim,
            "stride": 3 * d,
        },
    )
    yield (
        "decoder",
        DECODE_ATTENTION,
        {
            "rows": shape.prefix_rows,
            "heads": config.decoder_attention_heads,
            "head_dim": config.decoder_head_dim,
            "q_stride": 3 * d,
            "k_offset": wide - 2 * d,
            "v_offset": wide - d,
            "kv_stride": wide,
            "ancestry_rows": limits.max_batch,
            "ancestry_capacity": limits.target_positions,
            "fresh": shape.prefix_rows,
        },
    )
    yield (
        "decoder",
        ATTENTION_WEIGHTS,
        {
            "rows": shape.prefix_rows,
            "heads": config.decoder_attention_heads,
            "head_dim": config.decoder_head_dim,
            "longest": limits.max_source_len,
            "q_stride": d,
            "k_offset": wide - 2 * d,
            "kv_stride": wide,
        },
    )
    if limits.max_adapters:
        yield from _adapter_launches(shape)
    sizes = {
        "rows": shape.logits_rows,
        "vocab": shape.vocab,
        "stride": shape.logits_stride,
        "slot_count": limits.max_batch,
        "words": shape.ban_words,
        "word_room": WORD_ROOM,
        "capacity": limits.target_positions,
        "cell_base": shape.logits_rows,
        "cell_count": shape.feed_cells,
        "groups": limits.max_batch,
        "candidate_rows": limits.max_batch,
        "member_count": limits.max_batch,
        "most": MAX_CANDIDATES,
        "pool_width": pool_width(limits.target_positions),
        "adjust": 1,
        "greedy": 0,
    }
    for op, changed in (
        (ARGMAX, {}),
        (SAMPLE, {}),
        (SAMPLE, {"adjust": 0, "greedy": 1}),
        (BEAM_CANDIDATES, {"rows": limits.max_batch}),
        (BEAM_SELECT, {"rows": limits.max_batch}),
    ):
        names = op.spec.dims([0] * len(op.spec.args))
        yield "output", op, {name: {**sizes, **changed}[name] for name in names}


def _adapter_launches(shape: ModelShape) -> Iterator[tuple[str, Op, dict[str, int]]]:
    """Yield what `largest_launches` does, for the products that adapters add to."""
    limits, activation = shape.limits, ACTIVATION_NAMES.index(shape.config.activation_function)
    room, slots = limits.max_lora_rank, limits.max_adapters
    for target in targets(shape.config):
        side, _, part = target.region.rpartition(".")
        rows = limits.encoder_tokens if side.startswith("encoder") else shape.prefix_rows
        if target.region == CROSS_KV:
            rows = min(limits.encoder_tokens, CROSS_KV_ROWS)
        sizes = {"segments": len(target.modules), "room": room, "adapter_count": slots}
        yield side, LORA_DOWN, {"rows": rows, "k": target.k, **sizes, "x_stride": target.k}
        sizes = {"segments": len(target.modules), "width": target.width, "room": room, "adapter_count": slots}
        yield side, LORA_UP, {"rows": rows, **sizes, "activation": activation if part == "fc1" else 0}


def plan_memory(shape: ModelShape) -> MemoryPlan:
    """Return what a model of this shape allocates."""
    return MemoryPlan(
        weights=weight_layout(shape).nbytes,
        kv=shape.kv_bytes,
        logits=shape.logits_rows * shape.logits_stride * shape.itemsize,
        workspace=workspace_layout(shape).nbytes,
        adapters=adapter_layout(shape).nbytes,
    )
