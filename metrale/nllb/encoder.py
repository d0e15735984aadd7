# SPDX-License-Identifier: MIT OR Apache-2.0
"""The encoder: packed sources in, keys and values for the decoder's cross-attention out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.nllb.device_weights import DeviceWeights
from metrale.nllb.kv import Span
from metrale.nllb.layers import KvPlaces, Rows
from metrale.nllb.limits import ModelShape
from metrale.nllb.workspace import CROSS_KV_ROWS, Workspace


class Encoder:
    """Enqueues packed encoder passes. It owns no memory; passes that may overlap must not share a workspace."""

    def __init__(self, gpu: GpuBackend, shape: ModelShape, weights: DeviceWeights, workspace: Workspace) -> None:
        self._gpu = gpu
        self._shape = shape
        self._weights = weights
        self._workspace = workspace
        open_ranges(self, gpu.ranges)

    @ranged("encoder pass")
    def run(self, sources: Sequence[Sequence[int]], spans: Sequence[Span], stream: StreamLike) -> None:
        """Enqueue one pass over all ``sources``, and the writing of each one's KV to the start of its span.

        Parameters
        ----------
        sources : sequence of sequences of int
            Complete source ids, language and EOS included; together at most ``limits.encoder_tokens``.
        spans : sequence of Span
        stream : StreamLike
        """
        lengths = np.array([len(source) for source in sources])
        ids, positions = np.concatenate(sources), np.concatenate([np.arange(length) for length in lengths])
        adapters = np.repeat([span.adapter for span in spans], lengths)
        table = self._workspace.tables["encoder"].upload(
            stream,
            ids=ids,
            places=self._places(ids, positions),
            positions=positions,
            spans=np.repeat(np.array([int(span.ptr) for span in spans], dtype=np.uint64), lengths),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            adapters=adapters,
        )
        weights = self._weights
        rows = Rows.of(self._gpu, self._shape, self._workspace, "encoder", int(lengths.sum()), stream)
        rows = rows.adapted(table["adapters"], bool((adapters >= 0).any()))
        rows.embed(table["ids"], table["places"], weights.source_embedding, weights.position_table)
        for index in range(len(weights.encoder)):
            self._layer(rows, index, table["offsets"], len(sources), int(lengths.max()))
        rows.norm(weights.encoder_norm)
        self._write_cross_kv(rows, table["spans"], table["positions"])

    def _places(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position that each id is embedded at: among those of its source that are not padding.

        A padding id inside a text is read like any other, but it has no position, and the next one takes its place.
        """
        padding = (ids == self._shape.config.pad_token_id).astype(np.int64)
        skipped = np.cumsum(padding) - padding  # before each id, in all sources together
        first = np.arange(len(ids)) - positions  # where each id's source begins
        places: NDArray[np.int64] = positions - (skipped - skipped[first])
        return places

    @ranged("layer {index}")
    def _layer(self, rows: Rows, index: int, offsets: DevicePtr, sequences: int, longest: int) -> None:
        config, layer = self._shape.config, self._weights.encoder[index]
        rows.dense(rows.h, layer.qkv, rows.wide, 3 * config.d_model, norm=layer.norm)
        self._attend(rows, offsets, sequences, longest)
        rows.add_attention(layer.out)
        rows.add_feed_forward(layer.ffn_norm, layer.fc1, layer.fc2, config.encoder_ffn_dim)

    def _attend(self, rows: Rows, offsets: DevicePtr, sequences: int, longest: int) -> None:
        config = self._shape.config
        step = config.d_model * self._shape.itemsize
        ops.packed_attention(
            self._gpu,
            rows.wide,
            rows.wide.offset(step),
            rows.wide.offset(2 * step),
            offsets,
            rows.h,
            tokens=rows.count,
            sequences=sequences,
            longest=longest,
            heads=config.encoder_attention_heads,
            head_dim=config.encoder_head_dim,
            stride=3 * config.d_model,
            scale=config.encoder_head_dim**-0.5,
            dtype=self._shape.dtype,
            stream=rows.stream,
        )

    @ranged("cross keys and values")
    def _write_cross_kv(self, rows: Rows, spans: DevicePtr, positions: DevicePtr) -> None:
        """Compute keys and values of all decoder layers in one product, some rows at a time to bound the workspace."""
        shape = self._shape
        width = shape.kv_width
        for first in range(0, rows.count, CROSS_KV_ROWS):
            count = min(CROSS_KV_ROWS, rows.count - first)
            some = rows.part(first, count)
            kv = KvPlaces(spans.offset(first * 8), positions.offset(first * 4), 0, width)
            some.dense(some.h, self._weights.cross_kv, some.wide, width, kv=kv)
