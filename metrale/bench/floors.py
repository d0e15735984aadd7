# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an op must move and compute at least, and the time that takes on a device of given speed.

Bytes count each input read once and each output written once. They come from the op's spec; only what a spec does not
say, because it depends on tables in device memory, has rules here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import Op, OpSpec, dtypes
from gpu_runtime.op import ELEMENT, Arg, Dims
from metrale.ops.beam_layout import GROUP_COLUMNS

READ_BYTES_PER_S: Final = 4.55e12
"""Read bandwidth that was measured on an H200. Fixed, so that ratios of different runs can be compared."""

FLOP_PER_S: Final = 700e12
"""Rate of 16-bit products that was measured on an H200."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device moves and computes at best: what floors follow from."""

    read_bytes_per_s: float
    flop_per_s: float


H200: Final = Rates(READ_BYTES_PER_S, FLOP_PER_S)

WEIGHTS: Final = frozenset({"weight", "bias", "gamma", "beta", "sums", "table", "position_table"})
"""Parameters that hold weights, in every op; all others are activations."""

GATHERED: Final = {("embed", "table"), ("embed", "position_table"), ("row_gather", "src")}
"""Parameters of which only one row is read for each row of the output."""

BY_RULE: Final = {
    ("decode_attention", "ancestry"),
    *(("beam_candidates", name) for name in ("bans", "bad_words", "history")),
    *(("beam_select", name) for name in ("values", "ids", "bans", "running", "history", "ancestry", "logps")),
    *(("beam_select", name) for name in ("pool", "state", "cells")),
    *(("sample", name) for name in ("bans", "bad_words", "history", "cells")),
    *(("join_maxima", name) for name in ("history", "cells")),
    *(("lora_down", name) for name in ("ranks", "a")),
    *(("lora_up", name) for name in ("t", "ranks", "scales", "b", "out")),
}
"""Parameters of which a launch need not touch the whole: the ops' rules say how much, which may be nothing."""

TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "decode_attention": ("spans", "lengths", "ancestry", "ancestry_index", "beam_positions"),
    "attention_weights": ("spans", "lengths"),
    "packed_attention": ("offsets",),
    "beam_select": ("counts",),
    "lora_down": ("adapters", "ranks"),
    "lora_up": ("adapters", "ranks"),
}
"""The parameters in device memory that say how much work a launch is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved, by what they are, and operations; ``written`` is how many of the bytes are written. Costs add up."""

    weights: int = 0
    activations: int = 0
    kv: int = 0
    flop: int = 0
    written: int = 0

    @property
    def nbytes(self) -> int:
        return self.weights + self.activations + self.kv

    @property
    def read(self) -> int:
        return self.nbytes - self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weights + other.weights,
            self.activations + other.activations,
            self.kv + other.kv,
            self.flop + other.flop,
            self.written + other.written,
        )

    def floor_us(self, rates: Rates = H200) -> float:
        """Return the microseconds below which no implementation gets: moving or computing, whichever takes longer."""
        return 1e6 * max(self.nbytes / rates.read_bytes_per_s, self.flop / rates.flop_per_s)


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: an op, its element type, a value for each parameter, and what its `TABLES` hold."""

    op: Op
    dtype: str
    values: tuple[Any, ...]
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def spec(self) -> OpSpec:
        return self.op.spec

    @property
    def dims(self) -> dict[str, int]:
        return self.spec.dims(self.values)

    def value(self, name: str) -> Any:
        """Return the value of a parameter. `StopIteration` when there is none of that name."""
        return next(value for arg, value in zip(self.spec.args, self.values, strict=True) if arg.name == name)

    @property
    def label(self) -> str:
        """What kind of work this is: launches of the same kind and sizes differ only in their addresses."""
        name, dims = self.spec.name, self.dims
        if name in ("linear", "thin_linear", "cluster_linear", "gemv"):
            from metrale.ops.linear import ACTIVATION_NAMES

            after = "" if not dims["activation"] else f" {ACTIVATION_NAMES[dims['activation']]}"
            may_norm = any(arg.name == "gamma" for arg in self.spec.args)
            normed = " normed" if may_norm and self.value("gamma") else ""
            kept = " to kv" if self.spec.indirect and self.value("spans") else ""
            return f"{name} {dims['n']}x{dims['k']}{normed}{after}{' +=' if dims['residual'] else ''}{kept}"
        if name == "head_linear":
            return f"head_linear {dims['n']}x{dims['k']}"
        if name == "decode_attention":
            fused = dims["q_stride"] > dims["heads"] * dims["head_dim"]  # q lies between its keys and values
            beams = ", beams" if self.value("ancestry") else ""
            return f"decode_attention {'self' if fused else 'cross'}{beams}"
        if name == "kv_scatter":
            return f"kv_scatter {dims['width']}"
        if name == "lora_down":
            return f"lora_down {dims['segments']}x{dims['k']}"
        if name == "lora_up":
            return f"lora_up {dims['segments']}x{dims['width']}"
        return name


def cost(call: Call) -> Cost:
    """Return what one launch must move and compute."""
    dims = call.dims
    total = Cost()
    for arg, value in zip(call.spec.args, call.values, strict=True):
        if arg.is_pointer and value and not arg.is_scratch and (call.spec.name, arg.name) not in BY_RULE:
            total += _traffic(call, arg, dims)
    rule = RULES.get(call.spec.name)
    return total + rule(call, dims) if rule is not None else total


def _traffic(call: Call, arg: Arg, dims: Dims) -> Cost:
    sizes = arg.sizes(dims)
    if (call.spec.name, arg.name) in GATHERED:
        sizes = (dims["rows"], *sizes[1:])
    size = math.prod(sizes) * dtypes.itemsize(call.dtype if arg.dtype == ELEMENT else arg.dtype)
    written = size if arg.role != "in" else 0
    moved = written + (size if arg.reads(dims) else 0)
    if arg.name in WEIGHTS:
        return Cost(weights=moved, written=written)
    return Cost(activations=moved, written=written)


def _linear(call: Call, dims: Mapping[str, int]) -> Cost:
    """`gemv` has one row. Columns from `kv_from` on, where there is such a parameter, go into the KV cache."""
    rows = dims.get("rows", 1)
    kept = rows * (dims["n"] - dims.get("kv_from", dims["n"]))
    return Cost(kv=kept * dtypes.itemsize(call.dtype), flop=2 * rows * dims["n"] * dims["k"])


def _decode_attention(call: Call, dims: Mapping[str, int]) -> Cost:
    """Beams share keys and values: those of their source, and of the positions that they have in common."""
    size = 2 * dims["heads"] * dims["head_dim"]  # keys and values of a position
    total = int(call.tables["lengths"].sum())
    kv = _cached_positions(call.tables) * size * dtypes.itemsize(call.dtype)
    return Cost(activations=4 * total if "ancestry" in call.tables else 0, kv=kv, flop=2 * total * size)


def _attention_weights(call: Call, dims: Mapping[str, int]) -> Cost:
    size = dims["heads"] * dims["head_dim"]
    total = int(call.tables["lengths"].sum())
    return Cost(kv=_cached_positions(call.tables) * size * dtypes.itemsize(call.dtype), flop=2 * total * size)


def _cached_positions(tables: Mapping[str, NDArray[Any]]) -> int:
    """Return how many different positions of the KV cache the rows of an attention look at.

    A position is told by the span that it is in, the beam that wrote it (0 without an ancestry), and its place.
    """
    lengths = tables["lengths"]
    place = np.arange(lengths.max())
    writers = np.zeros((lengths.size, place.size), dtype=np.int64)
    if "ancestry" in tables:
        index = tables["ancestry_index"]
        beams = index >= 0
        writers[beams] = tables["ancestry"][index[beams], : place.size]
    _, span = np.unique(tables["spans"], return_inverse=True)
    position = (span.reshape(-1, 1) * (writers.max() + 1) + writers) * place.size + place
    return np.unique(position[place < lengths[:, None]]).size


def _packed_attention(call: Call, dims: Mapping[str, int]) -> Cost:
    pairs = int((np.diff(call.tables["offsets"]).astype(np.int64) ** 2).sum())
    return Cost(flop=4 * pairs * dims["heads"] * dims["head_dim"])


def _kv_scatter(call: Call, dims: Mapping[str, int]) -> Cost:
    size = dims["rows"] * dims["width"] * dtypes.itemsize(call.dtype)
    return Cost(kv=size, written=size)


def _sample(call: Call, dims: Mapping[str, int]) -> Cost:
    """An id goes to its cell. Bans, words and histories are those of settings that a benchmark does not have."""
    size = 4 * dims["rows"]
    return Cost(activations=size, written=size)


def _beam_select(call: Call, dims: Mapping[str, int]) -> Cost:
    """A search reads the candidates that it keeps, and the tables of its beams follow their parents: three words an id.

    Each beam has a score, which is read and written, and a cell; each search a state. The pool need not be touched.
    """
    count = dict(zip(GROUP_COLUMNS, call.tables["counts"].astype(np.int64).T, strict=True))
    beams, rows = count["beams"], np.where(count["fresh"], 1, count["beams"])
    candidates = 2 * rows * count["k"]
    reads = candidates + 3 * beams * count["length"] + beams + 1
    writes = 3 * beams * (count["length"] + 1) + 2 * beams + 1
    return Cost(activations=4 * int((reads + writes).sum()), written=4 * int(writes.sum()))


def _ranks(call: Call) -> tuple[int, int, int]:
    """Return how many ranks the adapters of a launch's rows have, each adapter once; how many its rows have; and rows.

    Only rows with an adapter are counted.
    """
    adapters = call.tables["adapters"]
    adapters = adapters[adapters >= 0]
    ranks = call.tables["ranks"].astype(np.int64).sum(axis=1)
    return int(ranks[np.unique(adapters)].sum()), int(ranks[adapters].sum()), adapters.size


def _lora_down(call: Call, dims: Mapping[str, int]) -> Cost:
    held, by_row, _ = _ranks(call)
    return Cost(weights=held * dims["k"] * dtypes.itemsize(call.dtype), flop=2 * by_row * dims["k"])


def _lora_up(call: Call, dims: Mapping[str, int]) -> Cost:
    """Rows without an adapter are touched only when there is an activation."""
    held, by_row, adapted = _ranks(call)
    itemsize, width = dtypes.itemsize(call.dtype), dims["width"]
    rows = dims["rows"] if dims["activation"] else adapted
    out = rows * dims["segments"] * width * itemsize
    return Cost(weights=held * width * itemsize, activations=4 * by_row + 2 * out, flop=2 * by_row * width, written=out)


RULES: Final = {
    "linear": _linear,
    "thin_linear": _linear,
    "cluster_linear": _linear,
    "gemv": _linear,
    "head_linear": _linear,
    "decode_attention": _decode_attention,
    "attention_weights": _attention_weights,
    "packed_attention": _packed_attention,
    "kv_scatter": _kv_scatter,
    "sample": _sample,
    "join_maxima": _sample,
    "beam_select": _beam_select,
    "lora_down": _lora_down,
    "lora_up": _lora_up,
}


def total(calls: Sequence[Call]) -> Cost:
    """Return the sum over all launches."""
    return sum(map(cost, calls), Cost())


def floor_us(calls: Sequence[Call], rates: Rates = H200) -> float:
    """Return the sum of the launches' floors: each op waits for the one before it."""
    return sum(cost(call).floor_us(rates) for call in calls)
