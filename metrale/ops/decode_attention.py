# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of one query row each over the first ``lengths[r]`` positions of its own span of the KV cache.

``out[r, h] = sum_p softmax_p(scale * q[r, h] . k[p, h]) v[p, h]`` (Vaswani et al. 2017). It serves self-attention,
where a span is a sequence's decoder positions, and cross-attention, where it is its source. Spans are laid out as in
`kv_scatter`; ``k_offset`` and ``v_offset`` say where in a position a layer's keys and values are.

Beams of a sequence share a span: the storage of one beam after the other, ``beam_positions[r]`` positions each. A beam
that goes on from another one leaves its earlier positions where they were written, so a row may have an ancestry: for
each position ``p`` the beam ``a[p]`` whose storage holds it, at position ``a[p] * beam_positions[r] + p`` of the span.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import NULL, GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, DeviceMemory, Dims, Inputs, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="decode_attention",
    args=(
        tensor("q", "in", "T", "rows", "heads*head_dim", row_stride="q_stride"),
        tensor("spans", "in", "u64", "rows"),
        tensor("lengths", "in", "i32", "rows"),
        tensor("ancestry", "in", "i32", "ancestry_rows", "ancestry_capacity", optional=True),
        tensor("ancestry_index", "in", "i32", "rows", optional=True),
        tensor("beam_positions", "in", "i32", "rows", optional=True),
        tensor("out", "out", "T", "rows", "heads*head_dim"),
        scalar("rows", "i32"),
        scalar("heads", "i32"),
        scalar("head_dim", "i32"),
        scalar("q_stride", "i64"),
        scalar("k_offset", "i64"),
        scalar("v_offset", "i64"),
        scalar("kv_stride", "i64"),
        scalar("scale", "f32"),
        scalar("ancestry_rows", "i32"),
        scalar("ancestry_capacity", "i32"),
        scalar("fresh", "i32"),
    ),
    tolerance=inputs.ATTENTION,
    indirect=True,
)

SPLITS: Final = 8
"""Parts, at most, that a row's keys are taken in. Part of the order in which a row is summed, so the same for every
launch."""

_WARPS: Final = 4  # of a block: they share a pair's keys, or have a pair each
_SPREAD: Final = 8  # warps that a multiprocessor wants, and twice as many where heads are wider than this
_WIDE: Final = 64

UNKNOWN: Final = -1
"""``fresh`` where anything may have been written just now."""

MOST_HEAD_DIM: Final = 256

_KEYS = 16  # what the reference rounds a row's number of keys up to


def spread(dims: Dims, dtype: str, limits: Limits, warps: int) -> LaunchPlan:
    """Return the launch in which so many warps, a divisor of 4, share a row and head, or pair."""
    pairs, each = dims["rows"] * dims["heads"], _WARPS if warps == 1 else 1
    return LaunchPlan(
        SPEC.entry(dtype),
        (-(-pairs // each), 1, 1),
        (limits.warp_size, warps, each),
        0 if warps == 1 else SPLITS * (dims["head_dim"] + 2) * 4,
        programmatic=True,
    )


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """Give each row and head, or pair, a warp; the fewer pairs there are, and the wider, the more warps share one.

    Raises
    ------
    ValueError
        When the heads are wider than the kernel can hold.
    """
    if dims["head_dim"] > MOST_HEAD_DIM:
        raise ValueError(f"decode_attention: head_dim: expected at most {MOST_HEAD_DIM}, got {dims['head_dim']}")
    pairs, warps = dims["rows"] * dims["heads"], _WARPS
    wanted = _SPREAD * limits.sm_count * (2 if dims["head_dim"] > _WIDE else 1)
    while warps > 1 and pairs * warps > wanted:
        warps //= 2
    return spread(dims, dtype, limits, warps)


def reference(
    *,
    memory: DeviceMemory,
    q: Array,
    spans: Array,
    lengths: Array,
    ancestry: Array | None,
    ancestry_index: Array | None,
    beam_positions: Array | None,
    out: Array,
    rows: int,
    heads: int,
    head_dim: int,
    q_stride: int,
    k_offset: int,
    v_offset: int,
    kv_stride: int,
    scale: float,
    ancestry_rows: int,
    ancestry_capacity: int,
    fresh: int,
) -> None:
    """Scores, softmax and weighted sum in float32; keys past a row's length have weight 0.

    Rows whose numbers of keys round up to the same are taken together: the order of a row's sums follows from its own.
    """
    if lengths.min() < 1:
        raise InvalidPointer(f"decode_attention: lengths: expected at least 1 key a row, got {lengths.min()}")
    width = heads * head_dim
    first = min(k_offset, v_offset)  # keys and values are neighbours as a rule: one gather fetches both
    where = {"offset": first, "stride": kv_stride, "width": max(k_offset, v_offset) + width - first}
    rounded = -(-lengths // _KEYS) * _KEYS
    places = _places(lengths, int(rounded.max()), ancestry, ancestry_index, beam_positions)
    rooms = sorted({*rounded.tolist()})
    for room in rooms:
        some = np.flatnonzero(rounded == room) if len(rooms) > 1 else slice(None)
        addresses, counts, depth = spans[some], lengths[some], room
        count = len(counts)
        if places is not None:  # one address a position: no stride leads from an ancestor's position to the next
            steps = places[some, :room] * (kv_stride * q.itemsize)
            addresses = (addresses[:, None] + steps.astype(np.uint64)).ravel()
            counts, depth = np.ones(steps.size, dtype=np.int32), 1
        gathered = memory.gather_rows(addresses, counts, **where, dtype=dtypes.name_of(q.dtype), room=depth)
        cached = gathered.reshape(count, room, -1).astype(np.float32, copy=False)
        keys, values = (
            cached[:, :, offset - first :][:, :, :width].reshape(count, room, heads, head_dim)
            for offset in (k_offset, v_offset)
        )
        query = q[some].astype(np.float32).reshape(count, heads, 1, head_dim)
        query *= np.float32(scale)
        scores = np.matmul(query, keys.transpose(0, 2, 3, 1))
        past = np.arange(room) >= lengths[some, None]
        scores += np.where(past, np.float32(-np.inf), np.float32(0.0))[:, None, None, :]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = np.matmul(scores, values.transpose(0, 2, 1, 3))
        mixed /= scores.sum(axis=-1, keepdims=True)
        out[some] = mixed.reshape(count, width)


def _check_ancestry(ancestry: object, ancestry_index: object, beam_positions: object) -> None:
    """Raise ValueError when some of the three are NULL and others are not."""
    if (ancestry is None) is (ancestry_index is None) is (beam_positions is None):
        return
    tables = {"ancestry": ancestry, "ancestry_index": ancestry_index, "beam_positions": beam_positions}
    missing = next(name for name, table in tables.items() if table is None)
    given = next(name for name, table in tables.items() if table is not None)
    raise ValueError(f"decode_attention: {missing}: expected an address, as {given} has one, got NULL")


def _places(
    lengths: Array, room: int, ancestry: Array | None, ancestry_index: Array | None, beam_positions: Array | None
) -> Array | None:
    """Return which position of its span each position of each row is, or None where no row has an ancestry.

    The result is int64 ``[rows, room]``; places past a row's length repeat its last one.

    Raises
    ------
    ValueError
        When some of the three tables are there and others are not.
    InvalidPointer
        When a row has an ancestry that does not exist, or is shorter than the row or its beams' storage allow.
    """
    _check_ancestry(ancestry, ancestry_index, beam_positions)
    if ancestry is None or ancestry_index is None or beam_positions is None or ancestry_index.max() < 0:
        return None
    count, capacity = ancestry.shape
    if ancestry_index.max() >= count:
        raise InvalidPointer(
            f"decode_attention: ancestry_index: expected rows in [0, {count}), or less than 0 for none, "
            f"got {ancestry_index.max()}"
        )
    beams = np.flatnonzero(ancestry_index >= 0)
    most = np.minimum(beam_positions[beams], capacity)
    if np.any(lengths[beams] > most):
        row = beams[np.argmax(lengths[beams] > most)]
        raise InvalidPointer(
            f"decode_attention: lengths: expected at most the {capacity} positions of an ancestry and the "
            f"{beam_positions[row]} of a beam's storage, got {lengths[row]} in row {row}"
        )
    position = np.minimum(np.arange(room), lengths[:, None] - 1)
    ancestors = np.zeros(position.shape, dtype=np.int64)
    ancestors[beams] = ancestry[ancestry_index[beams, None], position[beams]]
    if ancestors.min() < 0:
        raise InvalidPointer(f"decode_attention: ancestry: expected beams of at least 0, got {ancestors.min()}")
    return np.asarray(ancestors * beam_positions[:, None] + position)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    lengths: tuple[int, ...],
    heads: int,
    head_dim: int,
    layers: int = 2,
    layer: int = 1,
    pad: int = 0,
    spread: float = 1.0,
    regular: bool = True,
    beams: tuple[int, ...] = (),
    fresh: int = UNKNOWN,
) -> Inputs:
    """``beams[r]`` is how many beams share a row's span; 0, or no ``beams`` at all: the row has no ancestry."""
    rows, width = len(lengths), heads * head_dim
    stride = layers * 2 * width
    storage = max(lengths) + 3 if beams else max(lengths)
    ancestry, index = _ancestries(rng, lengths, beams) if beams else (None, None)
    storages = np.asarray(lengths, dtype=np.int32) + np.arange(rows, dtype=np.int32) % 4 if beams else None
    return {
        "q": inputs.normal(rng, (rows, width + pad), dtype, std=spread),
        "spans": inputs.spans(rng, rows, max((1, *beams)) * storage, stride, dtype, "in", regular=regular),
        "lengths": np.asarray(lengths, dtype=np.int32),
        "ancestry": ancestry,
        "ancestry_index": index,
        "beam_positions": storages,
        "out": inputs.output((rows, width), dtype),
        "rows": rows,
        "heads": heads,
        "head_dim": head_dim,
        "q_stride": width + pad,
        "k_offset": layer * 2 * width,
        "v_offset": (layer * 2 + 1) * width,
        "kv_stride": stride,
        "scale": head_dim**-0.5,
        "ancestry_rows": 0 if ancestry is None else len(ancestry),
        "ancestry_capacity": 0 if ancestry is None else ancestry.shape[1],
        "fresh": fresh,
    }


def _ancestries(rng: np.random.Generator, lengths: tuple[int, ...], beams: tuple[int, ...]) -> tuple[Array, Array]:
    """Return ancestries at random, in shuffled order and with one that no row asks for, and each row's index."""
    count = len(beams) + 1
    index = rng.permutation(count)[:-1]
    ancestry = np.zeros((count, max(lengths) + 2), dtype=np.int32)
    ancestry[index] = rng.integers(0, np.maximum(beams, 1)[:, None], (len(beams), ancestry.shape[1]))
    none = rng.integers(-3, 0, len(beams))
    return ancestry, np.where(np.asarray(beams) > 0, index, none).astype(np.int32)


CASES: Final = (
    {"lengths": (1,), "heads": 1, "head_dim": 8},
    {"lengths": (3, 1, 7, 2), "heads": 4, "head_dim": 16, "pad": 128},
    {"lengths": (17, 33, 5), "heads": 2, "head_dim": 64, "layers": 3, "layer": 0},
    {"lengths": (4, 6), "heads": 3, "head_dim": 5, "regular": False},
    {"lengths": (5, 3) * 33, "heads": 2, "head_dim": 16},
    {"lengths": (1100, 40), "heads": 2, "head_dim": 128},
    {"lengths": (400, 9), "heads": 2, "head_dim": 64, "spread": 30.0},  # scores far past what exp can hold unshifted
    {"lengths": (65, 64, 1, 300), "heads": 2, "head_dim": 64},  # about as many keys as a block takes at a time
    {"lengths": (70, 3), "heads": 2, "head_dim": 200},  # wide heads: more than a load for a lane
    {"lengths": (9, 40), "heads": 2, "head_dim": 64, "regular": False},
    {"lengths": (40, 9), "heads": 1, "head_dim": 101, "regular": False},
    {"lengths": (5, 3, 7, 1), "heads": 2, "head_dim": 16, "beams": (3, 0, 2, 4)},
    {"lengths": (70, 9, 33), "heads": 3, "head_dim": 5, "beams": (2, 5, 0), "regular": False},
    {"lengths": (9, 150, 1), "heads": 2, "head_dim": 64, "beams": (4, 4, 0), "pad": 8},
    {"lengths": (66, 40), "heads": 1, "head_dim": 101, "beams": (3, 0), "regular": False},
    {"lengths": (37, 3), "heads": 2, "head_dim": 200, "beams": (2, 6)},
    {"lengths": (3, 2), "heads": 1, "head_dim": 128, "beams": (0, 0)},  # ancestries that no row asks for
    {"lengths": (33, 260, 1, 32, 300), "heads": 8, "head_dim": 64, "fresh": 1},
    {"lengths": (33, 2, 70) * 3, "heads": 30, "head_dim": 16, "fresh": 2, "beams": (3, 0, 2) * 3},  # two warps a pair
    # a warp for each pair, and a block that has three pairs alone
    {"lengths": (*(7, 40, 1, 9, 33, 2, 3) * 8, 7, 70, 4), "heads": 9, "head_dim": 16, "fresh": 0},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path("decode_attention"))
)


def decode_attention(
    gpu: GpuBackend,
    q: int,
    spans: int,
    lengths: int,
    out: int,
    *,
    rows: int,
    heads: int,
    head_dim: int,
    q_stride: int,
    k_offset: int,
    v_offset: int,
    kv_stride: int,
    scale: float,
    dtype: str,
    ancestry: int = NULL,
    ancestry_index: int = NULL,
    beam_positions: int = NULL,
    ancestry_rows: int = 0,
    ancestry_capacity: int = 0,
    fresh: int = UNKNOWN,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the attention of ``rows`` queries.

    ``q`` is ``dtype``, ``[rows, heads * head_dim]`` with rows ``q_stride`` elements apart; ``out`` is contiguous.
    ``spans`` is uint64 ``[rows]``, device addresses; ``lengths`` is int32 ``[rows]``, each at least 1. Offsets and
    ``kv_stride`` are elements.

    ``ancestry`` (int32, ``[ancestry_rows, ancestry_capacity]``), ``ancestry_index`` and ``beam_positions`` (int32,
    ``[rows]``) are all addresses or all NULL. Where ``a = ancestry[ancestry_index[r]]`` exists, ``spans[r]`` is the
    address of beam 0's storage, each beam's storage has ``beam_positions[r]`` positions, at least ``lengths[r]``, and
    position ``p`` of the row is position ``p`` of beam ``a[p]``. A row with an index less than 0 has its positions one
    after the other, and its ``beam_positions`` may be anything. How keys are reached does not change a row's bits.

    The kernel may start before the one ahead of it on the stream has ended. With ``fresh`` of 0 or more it then reads
    all but ``q`` and the last ``fresh`` positions of each row: nothing else may be written by a kernel that is still
    under way, which may be any from the last launch on that was not to start early, where a copy counts as such a
    launch, or since the beginning of a graph.

    Raises
    ------
    ValueError
        When some of the three tables are NULL and others are not.
    """
    _check_ancestry(ancestry or None, ancestry_index or None, beam_positions or None)
    tables = (spans, lengths, ancestry, ancestry_index, beam_positions)
    sizes = (
        rows,
        heads,
        head_dim,
        q_stride,
        k_offset,
        v_offset,
        kv_stride,
        scale,
        ancestry_rows,
        ancestry_capacity,
        fresh,
    )
    OP.launch(gpu, dtype, (q, *tables, out, *sizes), stream)
