# SPDX-License-Identifier: MIT OR Apache-2.0
"""The weights on the device, laid out as the forward uses them.

Matrices that multiply the same input are stored as one, row block after row block: q, k and v of self-attention, and
the cross-attention keys and values of all decoder layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import Arena, Layout
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from metrale.checkpoint import FLOAT_DTYPES, Checkpoint, convert
from metrale.nllb.config import NllbConfig
from metrale.nllb.embeddings import DECODER_EMBEDDING, EMBEDDING, HEAD, TIED, Tables
from metrale.nllb.limits import ModelShape
from metrale.nllb.positions import sinusoidal
from metrale.nllb.staging import Transfer
from metrale.nllb.upload import send
from metrale.nllb.weights import (
    DECODER_NORM,
    ENCODER_NORM,
    Affine,
    DecoderLayerNames,
    EncoderLayerNames,
    WeightMap,
    canonical_shapes,
    cross_kv,
    decoder_layer,
    encoder_layer,
)
from metrale.ops.dense import DTYPES as GEMV_DTYPES

_TABLES: Final = {EMBEDDING: "embedding", DECODER_EMBEDDING: "decoder.embedding", HEAD: "head"}
_POSITIONS: Final = "position_table"
_HEAD_BIAS: Final = "head.bias"
CROSS_KV: Final = "decoder.cross_kv"
_POSITION_ROWS: Final = 256

_NORM_OF: Final = {"qkv": "norm", "cross_q": "cross_norm", "fc1": "ffn_norm"}
"""The LayerNorm ahead of a product of the decoder."""

_BLOCK: Final = 1 << 20
"""Elements that are read, or multiplied, at once: host memory holds them as float32."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Addresses of what LoRA adapters add to one product, as `metrale.ops.lora_down` and `metrale.ops.lora_up` take it.

    Attributes
    ----------
    ranks, scales : DevicePtr
        int32 and float32 ``[slots, segments]``.
    a : DevicePtr
        ``[slots, segments, room, k]``.
    b : DevicePtr
        ``[slots, segments, room, width]``: each second matrix transposed.
    slots, segments, room : int
        Adapters; modules whose outputs lie side by side in the product; ranks that there is room for.
    width : int
        Outputs of one module.
    """

    ranks: DevicePtr
    scales: DevicePtr
    a: DevicePtr
    b: DevicePtr
    slots: int
    segments: int
    room: int
    width: int


@dataclass(frozen=True, slots=True)
class Dense:
    """Addresses of a matrix ``[n, k]`` and its bias ``[n]``, or of a LayerNorm's two vectors.

    Attributes
    ----------
    weight, bias : DevicePtr
    low_rank : LowRank or None
        What adapters add to the product, in a model that has room for adapters.
    norm_sums : DevicePtr or None
        float32 ``[2, n]``, where a LayerNorm is ahead of a product that `metrale.ops.gemv` makes: the sums of its two
        vectors times each row of the matrix.
    """

    weight: DevicePtr
    bias: DevicePtr
    low_rank: LowRank | None = None
    norm_sums: DevicePtr | None = None


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One encoder layer; ``qkv`` is ``[3 * d, d]``."""

    norm: Dense
    qkv: Dense
    out: Dense
    ffn_norm: Dense
    fc1: Dense
    fc2: Dense


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer; its cross-attention keys and values are in `DeviceWeights.cross_kv`."""

    norm: Dense
    qkv: Dense
    out: Dense
    cross_norm: Dense
    cross_q: Dense
    cross_out: Dense
    ffn_norm: Dense
    fc1: Dense
    fc2: Dense


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Addresses of everything that the forward multiplies with. ``arena`` owns the memory.

    Attributes
    ----------
    source_embedding, target_embedding : DevicePtr
        ``[vocab, d]`` each. Those that are one matrix have one address; in the published models it is the head's too.
    head : Dense
        ``[head_rows, d]`` (`ModelShape.head_rows`): zeros past the vocabulary. Its bias is 0, and minus infinity there.
    position_table : DevicePtr
        float32 ``[position_count, d]``; row 0 is the first token's position.
    cross_kv : Dense
        ``[decoder_layers * 2 * d, d]``: keys, then values, layer by layer.
    """

    arena: Arena
    source_embedding: DevicePtr
    target_embedding: DevicePtr
    head: Dense
    position_table: DevicePtr
    encoder: tuple[EncoderLayer, ...]
    encoder_norm: Dense
    decoder: tuple[DecoderLayer, ...]
    decoder_norm: Dense
    cross_kv: Dense


def _encoder_blocks(names: EncoderLayerNames) -> dict[str, tuple[Affine, ...]]:
    return {
        "norm": (names.self_attn_norm,),
        "qkv": names.self_attn.qkv,
        "out": (names.self_attn.out,),
        "ffn_norm": (names.ffn_norm,),
        "fc1": (names.fc1,),
        "fc2": (names.fc2,),
    }


def _decoder_blocks(names: DecoderLayerNames) -> dict[str, tuple[Affine, ...]]:
    return {
        "norm": (names.self_attn_norm,),
        "qkv": names.self_attn.qkv,
        "out": (names.self_attn.out,),
        "cross_norm": (names.cross_attn_norm,),
        "cross_q": (names.cross_attn.q,),
        "cross_out": (names.cross_attn.out,),
        "ffn_norm": (names.ffn_norm,),
        "fc1": (names.fc1,),
        "fc2": (names.fc2,),
    }


def regions(config: NllbConfig, tables: Tables = TIED) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each region of the weights with the canonical tensors that are its row blocks, in order."""
    for name in tables.names:
        yield _TABLES[name], (name,)
    blocks: dict[str, tuple[Affine, ...]] = {
        "encoder.norm": (ENCODER_NORM,),
        "decoder.norm": (DECODER_NORM,),
        CROSS_KV: tuple(cross_kv(config)),
    }
    for index in range(config.encoder_layers):
        for part, affines in _encoder_blocks(encoder_layer(index)).items():
            blocks[f"encoder.{index}.{part}"] = affines
    for index in range(config.decoder_layers):
        for part, affines in _decoder_blocks(decoder_layer(index)).items():
            blocks[f"decoder.{index}.{part}"] = affines
    for region, affines in blocks.items():
        yield f"{region}.weight", tuple(affine.weight for affine in affines)
        yield f"{region}.bias", tuple(affine.bias for affine in affines)


def weight_layout(shape: ModelShape) -> Layout:
    """Return the places of all regions."""
    sizes = {
        name: math.prod(extents) * shape.itemsize
        for name, extents in canonical_shapes(shape.config, shape.vocab, shape.tables).items()
    }
    sizes[shape.tables.head] += _spare_head_elements(shape) * shape.itemsize
    layout = Layout()
    for region, names in regions(shape.config, shape.tables):
        layout.add(region, sum(sizes[name] for name in names))
    for region, n in _norm_sums(shape):
        layout.add(f"{region}.norm_sums", 2 * n * dtypes.itemsize("f32"))
    layout.add(_HEAD_BIAS, shape.head_rows * shape.itemsize)
    layout.add(_POSITIONS, shape.position_count * shape.config.d_model * dtypes.itemsize("f32"))
    return layout


def _norm_sums(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Yield the decoder's products that have `Dense.norm_sums`, with how many outputs each has."""
    config = shape.config
    outputs = {"qkv": 3 * config.d_model, "cross_q": config.d_model, "fc1": config.decoder_ffn_dim}
    if shape.dtype in GEMV_DTYPES and not shape.batch_invariant:
        for index, (part, n) in product(range(config.decoder_layers), outputs.items()):
            yield f"decoder.{index}.{part}", n


def _sum_norms(gpu: GpuBackend, shape: ModelShape, arena: Arena) -> None:
    """Compute every `Dense.norm_sums` from the weights, which are there, and wait for it."""
    k = shape.config.d_model
    for region, n in _norm_sums(shape):
        layer, part = region.rsplit(".", 1)
        gamma, beta = (arena[f"{layer}.{_NORM_OF[part]}.{vector}"] for vector in ("weight", "bias"))
        weight, sums = arena[f"{region}.weight"], arena[f"{region}.norm_sums"]
        apart = (int(beta) - int(gamma)) // shape.itemsize
        for first in range(0, n, _BLOCK // k):
            rows, at = min(_BLOCK // k, n - first), weight.offset(first * k * shape.itemsize)
            out = sums.offset(first * dtypes.itemsize("f32"))
            gpu.gemm(gamma, at, out, 2, rows, k, dtype=shape.dtype, out_dtype="f32", lda=apart, ldc=n)
    gpu.synchronize()


def _spare_head_elements(shape: ModelShape) -> int:
    """Elements of the head's rows past the vocabulary."""
    return (shape.head_rows - shape.vocab) * shape.config.d_model


def load_weights(gpu: GpuBackend, shape: ModelShape, checkpoint: Checkpoint, found: WeightMap) -> DeviceWeights:
    """Allocate and fill the weights, which are complete on return, for work on any stream.

    What the page cache holds as the device needs it is copied from there. All else is read into page-locked memory by
    several threads, and converted on the way where that is needed; the device copies from there meanwhile. Host memory
    holds the slots of `Staging`, and what is being converted.

    Raises
    ------
    OutOfMemory
        When the weights do not fit; nothing stays allocated.
    CheckpointError
        When a value does not fit the target type; nothing stays allocated.
    """
    layout = weight_layout(shape)
    arena = Arena(gpu, layout, tag="weights")
    try:
        send(gpu, list(_transfers(shape, checkpoint, found, arena)))
        _sum_norms(gpu, shape, arena)
    except BaseException:
        arena.free()
        raise
    return _addresses(arena, shape)


def _transfers(shape: ModelShape, checkpoint: Checkpoint, found: WeightMap, arena: Arena) -> Iterator[Transfer]:
    for region, names in regions(shape.config, shape.tables):
        at = arena[region]
        for name in names:
            transfer = _of_tensor(shape, checkpoint, found.sources[name], at)
            at = at.offset(transfer.count * shape.itemsize)
            yield transfer
            if name == shape.tables.head:
                yield _of_spare_head(shape, at)
    yield _of_head_bias(shape, arena[_HEAD_BIAS])
    yield _of_positions(shape, arena[_POSITIONS])


def _of_tensor(shape: ModelShape, checkpoint: Checkpoint, name: str, at: DevicePtr) -> Transfer:
    info, path = checkpoint.tensors[name], str(checkpoint.path)

    def read(start: int, room: NDArray[Any]) -> None:
        checkpoint.reader(name)(start, room)

    def read_and_convert(start: int, room: NDArray[Any]) -> None:
        stored: NDArray[Any] = np.empty(min(_BLOCK, len(room)), FLOAT_DTYPES[info.dtype])
        for first in range(0, len(room), _BLOCK):
            part = stored[: len(room) - first]
            read(start + first, part)
            convert(part, shape.dtype, out=room[first : first + _BLOCK], name=name, path=path)

    count = info.rows * info.row_elements
    if info.dtype == shape.dtype:
        return Transfer(count, shape.dtype, at, read, checkpoint.stored_at(name))
    return Transfer(count, shape.dtype, at, read_and_convert)


def _of_spare_head(shape: ModelShape, at: DevicePtr) -> Transfer:
    return Transfer(_spare_head_elements(shape), shape.dtype, at, lambda _, room: room.fill(0))


def _of_head_bias(shape: ModelShape, at: DevicePtr) -> Transfer:
    def compute(start: int, room: NDArray[Any]) -> None:
        room[:] = np.where(np.arange(start, start + len(room)) < shape.vocab, 0, -np.inf)

    return Transfer(shape.head_rows, shape.dtype, at, compute)


def _of_positions(shape: ModelShape, at: DevicePtr) -> Transfer:
    """The table is computed some rows at a time: in float64 it would be several times its size."""
    width, first_position = shape.config.d_model, shape.config.pad_token_id + 1

    def compute(start: int, room: NDArray[Any]) -> None:
        for first in range(0, len(room), _POSITION_ROWS * width):
            part = room[first : first + _POSITION_ROWS * width]
            row, skipped = divmod(start + first, width)
            rows = -(-(skipped + len(part)) // width)
            part[:] = sinusoidal(first_position + row, rows, width).reshape(-1)[skipped : skipped + len(part)]

    return Transfer(shape.position_count * width, "f32", at, compute)


def _addresses(arena: Arena, shape: ModelShape) -> DeviceWeights:
    config = shape.config
    source, target, head = (arena[_TABLES[name]] for name in shape.tables)

    summed = {region for region, _ in _norm_sums(shape)}

    def dense(region: str) -> Dense:
        sums = arena[f"{region}.norm_sums"] if region in summed else None
        return Dense(arena[f"{region}.weight"], arena[f"{region}.bias"], norm_sums=sums)

    encoder_parts, decoder_parts = _encoder_blocks(encoder_layer(0)), _decoder_blocks(decoder_layer(0))
    return DeviceWeights(
        arena=arena,
        source_embedding=source,
        target_embedding=target,
        head=Dense(head, arena[_HEAD_BIAS]),
        position_table=arena[_POSITIONS],
        encoder=tuple(
            EncoderLayer(**{part: dense(f"encoder.{index}.{part}") for part in encoder_parts})
            for index in range(config.encoder_layers)
        ),
        encoder_norm=dense("encoder.norm"),
        decoder=tuple(
            DecoderLayer(**{part: dense(f"decoder.{index}.{part}") for part in decoder_parts})
            for index in range(config.decoder_layers)
        ),
        decoder_norm=dense("decoder.norm"),
        cross_kv=dense(CROSS_KV),
    )
