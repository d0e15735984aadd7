# SPDX-License-Identifier: MIT OR Apache-2.0
"""Activations, and the small tables that tell a pass which tokens, positions and KV spans its rows have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, product
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import Arena, Layout
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.fed import COUNTS, SPANS
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.lora import low_rank_elements
from metrale.nllb.staging import Ring
from metrale.ops import row_parts
from metrale.ops.beam_candidates import MAX_CANDIDATES, ROW_COLUMNS
from metrale.ops.beam_layout import GROUP_COLUMNS, GROUP_SETTINGS, pool_width
from metrale.ops.head_linear import maxima_bytes
from metrale.ops.linear import scratch_bytes
from metrale.ops.sample import COUNT_COLUMNS, SETTING_COLUMNS

CROSS_KV_ROWS: Final = 2048
"""Source tokens whose cross-attention keys and values, of all layers, are computed in one product."""

Columns = Mapping[str, tuple[str, int]]
"""The columns of a table by name: their element type, and the elements of a row."""

ENCODER_COLUMNS: Final[Columns] = {
    "spans": ("u64", 1),
    "ids": ("i32", 1),
    "places": ("i32", 1),
    "positions": ("i32", 1),
    "offsets": ("i32", 1),
    "adapters": ("i32", 1),
}
DECODER_COLUMNS: Final[Columns] = {**dict.fromkeys(SPANS, ("u64", 1)), **dict.fromkeys(COUNTS, ("i32", 1))}
FEED_COLUMNS: Final[Columns] = {
    "seeds": ("u64", 1),
    "counts": ("i32", len(COUNT_COLUMNS)),
    "settings": ("f32", len(SETTING_COLUMNS)),
}
"""The parameters of the op ``sample``."""
BEAM_COLUMNS: Final[Columns] = {
    "row_counts": ("i32", len(ROW_COLUMNS)),
    "penalties": ("f32", 1),
    "group_counts": ("i32", len(GROUP_COLUMNS)),
    "settings": ("f32", len(GROUP_SETTINGS)),
    "members": ("i32", 1),
}
"""The parameters of the ops ``beam_candidates``, by row, and ``beam_select``, by search and by beam."""

UPLOADS_AHEAD: Final = 4
"""Passes of one side that the host may enqueue, at least, before the device has begun the first of them."""

UPLOAD_PARTS: Final = 2
"""Of a table's slots: one is refilled while the device copies from the other. An event for each upload instead would
take the host longer than to enqueue the upload."""


class Table:
    """Columns of values for each row, kept on the device and filled by one copy a pass.

    The values go through page-locked memory: an asynchronous copy from other memory is staged by the driver, which
    takes longer, and past some size waits for the work before it.

    Parameters
    ----------
    gpu : GpuBackend
    base : DevicePtr
        Device memory with the places of `table_layout`.
    columns : mapping
    rows : int
        Most rows of a column.

    Attributes
    ----------
    places : mapping
        Each column's address.
    """

    def __init__(self, gpu: GpuBackend, base: DevicePtr, columns: Columns, rows: int) -> None:
        layout = table_layout(columns, rows)
        self._base = base
        self.places: Final = {name: base.offset(start) for name, start in layout.offsets.items()}
        self._ring = Ring(gpu, layout.nbytes, UPLOAD_PARTS * UPLOADS_AHEAD, UPLOAD_PARTS)
        self._columns = [
            {
                name: slot[start : start + _column_bytes(columns[name], rows)].view(dtypes.NUMPY[columns[name][0]])
                for name, start in layout.offsets.items()
            }
            for slot in self._ring.slots
        ]
        self._blocks = [_blocks(list(each.values())) for each in self._columns]

    def upload(self, stream: StreamLike, **values: NDArray[Any] | list[int]) -> Mapping[str, DevicePtr]:
        """Enqueue one copy of all columns and return each column's address, which is always the same.

        A column of several elements a row comes as a flat array. Work that reads what the table held before must come
        before this on ``stream``. Uploads come one after the other on the device, on whatever streams; the host waits
        only when it is `UPLOADS_AHEAD` of them ahead, or more. Whole columns are copied, whatever the number of values:
        that takes hardly longer, and makes equal launches of passes that differ only in what their tables hold.
        """
        for name, column in self._columns[self._ring.take()].items():
            column[: len(values[name])] = values[name]
        self._ring.send(self._base, stream)
        return self.places

    def upload_blocks(self, stream: StreamLike, *blocks: NDArray[Any]) -> None:
        """Do as `upload`, with the values of neighbouring columns of one type together, ``[columns, rows]``."""
        for room, values in zip(self._blocks[self._ring.take()], blocks, strict=True):
            room[:, : values.shape[1]] = values
        self._ring.send(self._base, stream)

    def free(self) -> None:
        """Free the page-locked memory; the device memory is not the table's."""
        self._columns.clear()
        self._blocks.clear()
        self._ring.free()


def _blocks(columns: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return views of columns as they lie in memory, each of neighbours of one type and length, which lie evenly."""
    blocks = []
    for _, group in groupby(columns, lambda column: (column.dtype, len(column))):
        first, *others = group
        pitch = others[0].ctypes.data - first.ctypes.data if others else 0
        strides = (pitch, first.itemsize)
        blocks.append(np.lib.stride_tricks.as_strided(first, (1 + len(others), len(first)), strides))
    return blocks


def table_layout(columns: Columns, rows: int) -> Layout:
    """Return the places of a table's columns, of ``rows`` rows each."""
    layout = Layout()
    for name, column in columns.items():
        layout.add(name, _column_bytes(column, rows))
    return layout


def _column_bytes(column: tuple[str, int], rows: int) -> int:
    kind, width = column
    return rows * width * dtypes.itemsize(kind)


def workspace_layout(shape: ModelShape) -> Layout:
    """Return the places of all activations and tables.

    Each side has ``x`` (the residual stream), ``h`` (what a norm or an attention hands on) and ``wide`` (q, k and v, or
    the inside of the feed-forward block). The encoder's ``wide`` also takes the cross-attention keys and values. The
    sides of a prefill, ``encoder`` and ``prefix``, share nothing with ``decoder``, so that both can run at once. Where
    products have rows that nobody wants, each side of the decoder has room for them, and ``logits`` for what the head
    makes of them. Where the head is a kernel of ours, it leaves the parts of a step's maxima in ``decoder.maxima``.
    """
    config, limits, layout = shape.config, shape.limits, Layout()
    d, tokens, wide = config.d_model, limits.encoder_tokens, _encoder_wide(shape)
    for name, elements in (("encoder.x", tokens * d), ("encoder.h", tokens * d), ("encoder.wide", wide)):
        layout.add(name, elements * shape.itemsize)
    for side, rows in (("prefix", shape.prefix_rows), ("decoder", limits.max_batch)):
        for name, width in _activations(shape).items():
            layout.add(f"{side}.{name}", shape.product_rows(rows) * width * shape.itemsize)
        if shape.head_scratch_rows:
            layout.add(f"{side}.logits", shape.head_scratch_rows * shape.logits_stride * shape.itemsize)
        layout.add(f"{side}.table", table_layout(DECODER_COLUMNS, rows).nbytes)
    if shape.own_head:
        layout.add("decoder.maxima", maxima_bytes(limits.max_batch, shape.head_rows))
    if shape.spare_rows:
        layout.add("decoder.spare", shape.spare_rows * shape.position_bytes)
    if limits.max_adapters:
        for side, size in low_rank_bytes(shape).items():
            layout.add(f"{side}.low", size)
    layout.add("encoder.table", table_layout(ENCODER_COLUMNS, tokens + 1).nbytes)
    layout.add("argmax", 2 * shape.logits_rows * dtypes.itemsize("i32"))
    _add_row_parts(shape, layout, "argmax")
    _add_feed(shape, layout)
    _add_beams(shape, layout)
    for name, size in gemm_bytes(shape).items():
        layout.add(f"{name}.gemm", size)
    return layout


def _activations(shape: ModelShape) -> Mapping[str, int]:
    """Return what each side of the decoder has for every row of its products, and the elements of a row."""
    d = shape.config.d_model
    return {"x": d, "h": d, "wide": max(3 * d, shape.config.decoder_ffn_dim), "hidden": d}


def _add_row_parts(shape: ModelShape, layout: Layout, user: str) -> None:
    """Add what the blocks of logits rows leave for each other, apart for each user, since two may run at once."""
    layout.add(f"{user}.parts", shape.logits_rows * row_parts.PARTS_BYTES)
    layout.add(f"{user}.arrivals", arrivals_bytes(shape))


def arrivals_bytes(shape: ModelShape) -> int:
    """Return the bytes of a user's arrivals, which must be zeros at first."""
    return shape.logits_rows * row_parts.ARRIVALS_BYTES


def low_rank_bytes(shape: ModelShape) -> Mapping[str, int]:
    """Return the bytes that each side has for what adapters' products hold between their two halves, in float32."""
    limits, item = shape.limits, dtypes.itemsize("f32")
    rows = {"encoder": limits.encoder_tokens, "prefix": shape.prefix_rows, "decoder": limits.max_batch}
    cross = {"encoder": min(limits.encoder_tokens, CROSS_KV_ROWS)}
    return {side: item * low_rank_elements(shape, count, cross.get(side, 0)) for side, count in rows.items()}


def _encoder_wide(shape: ModelShape) -> int:
    """Return the elements of the encoder's ``wide``."""
    config, tokens = shape.config, shape.limits.encoder_tokens
    inside = tokens * max(3 * config.d_model, config.encoder_ffn_dim)
    return max(inside, min(tokens, CROSS_KV_ROWS) * shape.kv_width)


def attention_rows(shape: ModelShape, sources: int) -> int:
    """Return the rows whose cross-attention to so many sources, in float32, the encoder's ``wide`` can take."""
    heads, room = shape.config.decoder_attention_heads, _encoder_wide(shape) * shape.itemsize
    return max(room // (heads * sources * dtypes.itemsize("f32")), 1)


def _add_feed(shape: ModelShape, layout: Layout) -> None:
    """Add what the token feed works with."""
    for name, size in feed_state(shape).items():
        layout.add(name, size)
    layout.add("feed.results", 3 * shape.logits_rows * dtypes.itemsize("i32"))
    _add_row_parts(shape, layout, "feed")
    layout.add("feed.table", table_layout(FEED_COLUMNS, shape.logits_rows).nbytes)


def _add_beams(shape: ModelShape, layout: Layout) -> None:
    """Add what beam searches work with."""
    slots, word = shape.limits.max_batch, dtypes.itemsize("i32")
    for name, size in beam_state(shape).items():
        layout.add(name, size)
    for name, words in (("values", MAX_CANDIDATES), ("ids", MAX_CANDIDATES), ("flags", 1), ("results", 1)):
        layout.add(f"beams.{name}", slots * words * word)
    layout.add("beams.table", table_layout(BEAM_COLUMNS, slots).nbytes)


def beam_state(shape: ModelShape) -> Mapping[str, int]:
    """Return the bytes of what the device keeps of searches: for each slot a beam, and a finished hypothesis."""
    slots, positions, word = shape.limits.max_batch, shape.limits.target_positions, dtypes.itemsize("i32")
    return {
        "beams.running": slots * word,
        "beams.ancestry": slots * positions * word,
        "beams.logps": slots * positions * word,
        "beams.pool": slots * pool_width(positions) * word,
        "beams.state": slots * word,
    }


def feed_state(shape: ModelShape) -> Mapping[str, int]:
    """Return the bytes of what the token feed keeps: ids to be fed, and each slot's ids so far, bans and words."""
    slots, word = shape.limits.max_batch, dtypes.itemsize("i32")
    return {
        "feed.cells": shape.feed_cells * word,
        "feed.history": slots * shape.limits.target_positions * word,
        "feed.bans": slots * 2 * shape.ban_words * word,
        "feed.words": slots * WORD_ROOM * word,
    }


def gemm_bytes(shape: ModelShape) -> Mapping[str, int]:
    """Return the workspace of each side's products: what suits the device, and at least what they cannot do without.

    Only the first product of a feed-forward block ends in an activation, which is what some need scratch memory for.
    The two sides of a prefill take turns with one.
    """
    config, limits = shape.config, shape.limits

    def least(rows: int, n: int) -> int:
        return scratch_bytes(rows, n, config.d_model, shape.dtype, config.activation_function)

    prefill = max(
        least(limits.encoder_tokens, config.encoder_ffn_dim), least(shape.prefix_rows, config.decoder_ffn_dim)
    )
    step = least(limits.max_batch, config.decoder_ffn_dim)
    needs = {"prefill": prefill, "decoder": step}
    return {name: max(shape.gemm_workspace_bytes, need) for name, need in needs.items()}


class GemmSpace(NamedTuple):
    """The workspace that products take turns with: its address, and its size in bytes."""

    workspace: DevicePtr
    workspace_bytes: int


class Workspace:
    """The allocation behind `workspace_layout`, with its regions by name.

    Raises
    ------
    OutOfMemory
        When it does not fit; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, shape: ModelShape) -> None:
        with ExitStack() as undo:
            layout = workspace_layout(shape)
            self.arena = Arena(gpu, layout, tag="workspace")
            undo.callback(self.arena.free)

            def table(name: str, columns: Columns, rows: int) -> Table:
                made = Table(gpu, self.arena[f"{name}.table"], columns, rows)
                undo.callback(made.free)
                return made

            limits = shape.limits
            self.tables: Final = {
                "encoder": table("encoder", ENCODER_COLUMNS, limits.encoder_tokens + 1),
                "prefix": table("prefix", DECODER_COLUMNS, shape.prefix_rows),
                "decoder": table("decoder", DECODER_COLUMNS, limits.max_batch),
                "feed": table("feed", FEED_COLUMNS, shape.logits_rows),
                "beams": table("beams", BEAM_COLUMNS, limits.max_batch),
            }
            if shape.head_scratch_rows:  # products read rows past those of a pass, so these must hold something
                for side, part in product(("prefix", "decoder"), _activations(shape)):
                    name = f"{side}.{part}"
                    gpu.memset(self.arena[name], 0, layout.sizes[name])
            self._teardown = undo.pop_all()
        sizes = gemm_bytes(shape)
        spaces = {
            name: GemmSpace(self.arena[f"{name}.gemm"] if size else DevicePtr.NULL, size)
            for name, size in sizes.items()
        }
        self.gemm: Final = {"encoder": spaces["prefill"], "prefix": spaces["prefill"], "decoder": spaces["decoder"]}

    def __getitem__(self, name: str) -> DevicePtr:
        return self.arena[name]

    def free(self) -> None:
        """Free everything. Work that is enqueued may still use it. Calling it again does nothing."""
        self._teardown.close()
