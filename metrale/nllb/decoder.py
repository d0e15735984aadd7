# SPDX-License-Identifier: MIT OR Apache-2.0
"""The decoder: one row for each token fed, any number of sequences in one pass, logits rows out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpu_runtime.arena import REGION_ALIGNMENT
from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.nllb.device_weights import DeviceWeights
from metrale.nllb.fed import ADAPTERS, ANCESTRY, Fed
from metrale.nllb.layers import PINNED, KvPlaces, Rows, launches
from metrale.nllb.limits import ModelShape
from metrale.nllb.logits import maximum_at
from metrale.nllb.step_graphs import StepGraphs
from metrale.nllb.workspace import Workspace
from metrale.ops.dense import DTYPES as THIN_DTYPES
from metrale.ops.head_linear import MOST_ROWS

Observer = Callable[[Rows, int, Mapping[str, DevicePtr]], None]
"""What looks on in a pass: it is told the activations, the layer, and the columns of the pass' table."""


class Pass(NamedTuple):
    """All that the launches of a pass depend on, but for what its table holds: passes that are equal launch the same.

    Attributes
    ----------
    rows : int
        Rows of the pass, spare ones included.
    heads : int
        Rows that have logits.
    depth : int
        Of how many rows each, the last has them.
    fed : int
        Rows of each sequence, and so positions that are written.
    logits : int
        Where they go; NULL leaves them out.
    searched : bool
        Whether a row has an ancestry.
    adapted : bool
        Whether a row has an adapter.
    """

    rows: int
    heads: int
    depth: int
    fed: int
    logits: int
    searched: bool
    adapted: bool

    @property
    def body(self) -> Pass:
        """The pass without the output head."""
        return self._replace(heads=0, depth=1, logits=NULL)


class Decoder:
    """Enqueues decoder passes. It owns no memory; passes that may overlap must not share a side of a workspace.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape
    weights : DeviceWeights
    workspace : Workspace
    side : {"prefix", "decoder"}
        Whose activations it uses. Steps of ``"decoder"`` may be padded, and may take ids from cells.
    graphs : StepGraphs or None
        Where passes are kept as graphs; None: their launches are enqueued one by one.

    Attributes
    ----------
    hidden : DevicePtr
        The hidden rows of its last pass after the final norm.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        weights: DeviceWeights,
        workspace: Workspace,
        side: str,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._gpu = gpu
        self._shape = shape
        self._weights = weights
        self._workspace = workspace
        self._side = side
        self._graphs = graphs
        self.hidden = workspace[f"{side}.hidden"]
        self._cells: dict[str, int] = {}
        self._ancestry: dict[str, int] = {}
        if side == "decoder":
            self._ancestry = {
                "ancestry": workspace["beams.ancestry"],
                "ancestry_rows": shape.limits.max_batch,
                "ancestry_capacity": shape.limits.target_positions,
            }
            self._cells = {"cells": workspace["feed.cells"], "cell_count": shape.feed_cells}
        open_ranges(self, gpu.ranges)

    @ranged("{self._side} pass")
    def run(
        self,
        fed: Fed,
        logits: DevicePtr,
        stream: StreamLike,
        *,
        of_all: bool = False,
        observe: Observer | None = None,
    ) -> None:
        """Enqueue one pass: each weight is read once, whatever the number of sequences.

        Keys and values are written before any row attends, and a row sees target positions up to its own, so several
        ids a sequence are causal.

        Parameters
        ----------
        fed : Fed
        logits : DevicePtr
            Where the logits of lane ``i``'s last id go: row ``i`` from here. NULL leaves them out.
        stream : StreamLike
        of_all : bool
            Whether every id has logits, one row after the other, and not the last of each lane alone.
        observe : callable or None
            Called in each layer when ``rows.wide`` has the queries of cross-attention, to enqueue work of its own.
        """
        self._upload(fed, stream)
        adapter, ancestry = np.maximum.reduce(fed.counts[[ADAPTERS, ANCESTRY]], axis=1).tolist()
        work = Pass(
            rows=fed.counts.shape[1],
            heads=fed.lanes * fed.depth if of_all else fed.lanes,
            depth=1 if of_all else fed.depth,
            fed=fed.depth,
            logits=int(logits),
            searched=ancestry >= 0,
            adapted=self._shape.always_adapts or adapter >= 0,
        )
        if self._graphs is None or observe is not None:
            self._enqueue(work, observe, stream)
        elif work.heads == work.rows:
            self._graphs.run(work, partial(self._enqueue, work, None), stream)
        else:  # the head of the lanes alone, by itself: a row past them may be another's, and a graph serves them all
            self._graphs.run(work.body, partial(self._enqueue, work.body, None), stream)
            self._head(self._rows(work, stream), work)

    @ranged("table")
    def _upload(self, fed: Fed, stream: StreamLike) -> None:
        """Enqueue the copy of the pass' table."""
        self._workspace.tables[self._side].upload_blocks(stream, fed.spans, fed.counts)

    def _rows(self, work: Pass, stream: StreamLike) -> Rows:
        return Rows.of(self._gpu, self._shape, self._workspace, self._side, work.rows, stream)

    def _enqueue(self, work: Pass, observe: Observer | None, stream: StreamLike) -> None:
        """Enqueue the launches of a pass, whose table is or will be there."""
        table = self._workspace.tables[self._side].places
        cells = {**self._cells, "cell_index": table["cells"]} if self._cells else {}
        ancestry: dict[str, int] = {}
        if work.searched:  # without beams, the launches know nothing of them
            places = {"ancestry_index": table["ancestry"], "beam_positions": table["beam_positions"]}
            ancestry = {**self._ancestry, **places}
        weights = self._weights
        rows = self._rows(work, stream).adapted(table["adapters"], work.adapted)
        rows.embed(table["ids"], table["positions"], weights.target_embedding, weights.position_table, **cells)
        for index in range(len(weights.decoder)):
            self._layer(rows, index, table, ancestry, work.fed, observe)
        rows.norm(weights.decoder_norm, self.hidden)
        self._head(rows, work)

    @ranged("layer {index}")
    def _layer(
        self,
        rows: Rows,
        index: int,
        table: Mapping[str, DevicePtr],
        ancestry: Mapping[str, int],
        depth: int,
        observe: Observer | None,
    ) -> None:
        """Enqueue a layer; ``depth`` positions of each sequence are written in it."""
        config, layer = self._shape.config, self._weights.decoder[index]
        d = config.d_model
        keys = index * 2 * d  # where this layer's keys are in a KV position; its values follow them
        kv = KvPlaces(table["write_spans"], table["positions"], keys, 2 * d)
        rows.dense(rows.h, layer.qkv, rows.wide, 3 * d, norm=layer.norm, kv=kv)
        self._attend(rows, table["self_spans"], table["self_lengths"], 3 * d, keys, fresh=depth, **ancestry)
        rows.add_attention(layer.out)
        rows.dense(rows.h, layer.cross_q, rows.wide, d, norm=layer.cross_norm)
        if observe is not None:
            observe(rows, index, table)
        self._attend(rows, table["cross_spans"], table["cross_lengths"], d, keys, fresh=0)
        rows.add_attention(layer.cross_out)
        rows.add_feed_forward(layer.ffn_norm, layer.fc1, layer.fc2, config.decoder_ffn_dim)

    def _attend(
        self,
        rows: Rows,
        spans: DevicePtr,
        lengths: DevicePtr,
        q_stride: int,
        keys: int,
        *,
        fresh: int,
        **ancestry: int,
    ) -> None:
        config = self._shape.config
        ops.decode_attention(
            self._gpu,
            rows.wide,
            spans,
            lengths,
            rows.h,
            rows=rows.count,
            heads=config.decoder_attention_heads,
            head_dim=config.decoder_head_dim,
            q_stride=q_stride,
            k_offset=keys,
            v_offset=keys + config.d_model,
            kv_stride=self._shape.kv_width,
            scale=config.decoder_head_dim**-0.5,
            dtype=self._shape.dtype,
            fresh=fresh,
            stream=rows.stream,
            **ancestry,
        )

    @ranged("head")
    def _head(self, rows: Rows, work: Pass) -> None:
        """Multiply the last of each ``depth`` rows with the output head, unless the pass has no logits."""
        if not work.logits:
            return
        width = self._shape.config.d_model * self._shape.itemsize
        last, apart = self.hidden.offset((work.depth - 1) * width), work.depth * width
        if rows.invariant:
            self._multiply_alike(rows, last, apart, DevicePtr(work.logits), work.heads)
        else:
            self._multiply(rows, last, apart, work.logits, work.heads)

    def _multiply_alike(self, rows: Rows, hidden: DevicePtr, apart: int, logits: DevicePtr, heads: int) -> None:
        """Multiply with the head so that each row's bits are its own.

        The library's products have as many rows as the device asks for, all of them at one distance. The logits of
        those that nobody wants, behind the others, go to scratch memory: that place in the arena may be another's.
        """
        shape, gpu = self._shape, self._gpu
        width, row_bytes = shape.config.d_model * shape.itemsize, shape.logits_stride * shape.itemsize
        if apart != width and not shape.own_head:  # side by side, in memory that the pass is done with
            gpu.copy_d2d_2d_async(hidden, apart, rows.h, width, width, heads, rows.stream)
            hidden, apart = rows.h, width
        for first, count in launches(heads):
            source, wanted = hidden.offset(first * apart), logits.offset(first * row_bytes)
            made = shape.product_rows(count)
            out = wanted
            if shape.head_scratch_rows and (made > count or wanted % REGION_ALIGNMENT):
                out = self._workspace[f"{self._side}.logits"]
            self._multiply(rows, source, apart, out, made, first)
            if out != wanted:
                gpu.copy_d2d_async(out, wanted, count * row_bytes, rows.stream)

    def _multiply(self, rows: Rows, hidden: DevicePtr, apart: int, logits: int, heads: int, first: int = 0) -> None:
        """Multiply ``heads`` rows, so many bytes apart, with the output head; they are the pass' from row ``first``."""
        shape, weights, stream = self._shape, self._weights.head, rows.stream
        given: dict[str, Any] = {
            "weight": weights.weight,
            "bias": weights.bias,
            "out": logits,
            "n": shape.head_rows,
            "k": shape.config.d_model,
            "dtype": shape.dtype,
        }
        places: dict[str, Any] = {"x_stride": apart // shape.itemsize, "out_stride": shape.logits_stride, "rows": heads}
        if self._by_own_head(heads):
            places |= {"maxima": self._maxima_of(first), "counted": shape.vocab}
            ops.head_linear(self._gpu, hidden, **given, **places, stream=stream)
        elif heads == 1 and not rows.invariant and shape.dtype in THIN_DTYPES:
            # Reading the weights is all that takes time, and this begins to read them while the norm is under way.
            ops.gemv(self._gpu, hidden, **given, stream=stream)
        else:
            places |= {"workspace": rows.gemm.workspace, "workspace_bytes": rows.gemm.workspace_bytes}
            algorithm = PINNED if rows.invariant else None
            ops.linear(self._gpu, hidden, **given, **places, algorithm=algorithm, stream=stream)

    def _maxima_of(self, row: int) -> DevicePtr:
        """Return where the parts of a row's maximum go; NULL where nobody asks for them."""
        if self._side != "decoder":
            return DevicePtr.NULL
        return maximum_at(self._gpu, self._shape, self._workspace, row)

    def leaves_maxima(self, lanes: int) -> bool:
        """Return whether a pass with so many rows of logits also leaves the parts of their maxima."""
        return self._side == "decoder" and self._by_own_head(lanes)

    def _by_own_head(self, heads: int) -> bool:
        """Return whether `head_linear` multiplies so many rows: where their bits must be their own, or it is faster."""
        shape = self._shape
        if shape.batch_invariant:  # at most as many rows as it takes
            return shape.own_head
        return shape.own_head and 1 < heads <= MOST_ROWS and self._gpu.limits().max_cluster > 1
