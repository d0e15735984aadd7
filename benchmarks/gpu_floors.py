# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an op must move and compute at least, and the time that takes on a device of given speed.

Bytes count each input read once and each output written once. They come from the op's spec; only what a spec does not
say, because it depends on tables in device memory, has rules here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_runtime import Op, OpSpec, dtypes
from gpu_runtime.op import ELEMENT, Arg, Dims

READ_BYTES_PER_S: Final = 4.55e12
"""Read bandwidth that was measured on an H200. Fixed, so that ratios of different runs can be compared."""

FLOP_PER_S: Final = 700e12
"""Rate of 16-bit products that was measured on an H200."""

WEIGHTS: Final = frozenset({"weight", "bias", "table", "position_table"})
"""Parameters that hold weights, in every op; all others are activations."""

GATHERED: Final = {("embed", "table"), ("embed", "position_table"), ("row_gather", "src")}
"""Parameters of which only one row is read for each row of the output."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved, by what they are, and operations. Costs add up."""

    weights: int = 0
    activations: int = 0
    kv: int = 0
    flop: int = 0

    @property
    def nbytes(self) -> int:
        return self.weights + self.activations + self.kv

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weights + other.weights,
            self.activations + other.activations,
            self.kv + other.kv,
            self.flop + other.flop,
        )

    def floor_us(self) -> float:
        """Return the microseconds below which no implementation gets: moving or computing, whichever takes longer."""
        return 1e6 * max(self.nbytes / READ_BYTES_PER_S, self.flop / FLOP_PER_S)


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: an op, its element type, and a value for each parameter.

    ``lengths`` is what the op's table says of its rows (decode attention) or sequences (packed attention): how many
    keys each of them has.
    """

    op: Op
    dtype: str
    values: tuple[Any, ...]
    lengths: tuple[int, ...] = ()

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
        if name == "linear":
            from metrale.ops.linear import ACTIVATION_NAMES

            after = "" if not dims["activation"] else f" {ACTIVATION_NAMES[dims['activation']]}"
            return f"linear {dims['n']}x{dims['k']}{after}{' +=' if dims['residual'] else ''}"
        if name == "decode_attention":
            fused = dims["q_stride"] > dims["heads"] * dims["head_dim"]  # q lies between its keys and values
            return f"decode_attention {'self' if fused else 'cross'}"
        if name == "kv_scatter":
            return f"kv_scatter {dims['width']}"
        return name


def cost(call: Call) -> Cost:
    """Return what one launch must move and compute."""
    dims = call.dims
    total = Cost()
    for arg, value in zip(call.spec.args, call.values, strict=True):
        if arg.is_pointer and value and not arg.is_scratch:
            total += _traffic(call, arg, dims)
    rule = RULES.get(call.spec.name)
    return total + rule(call, dims) if rule is not None else total


def _traffic(call: Call, arg: Arg, dims: Dims) -> Cost:
    sizes = arg.sizes(dims)
    if (call.spec.name, arg.name) in GATHERED:
        sizes = (dims["rows"], *sizes[1:])
    size = math.prod(sizes) * dtypes.itemsize(call.dtype if arg.dtype == ELEMENT else arg.dtype)
    times = arg.reads(dims) + (arg.role != "in")
    return Cost(weights=size * times) if arg.name in WEIGHTS else Cost(activations=size * times)


def _linear(call: Call, dims: Mapping[str, int]) -> Cost:
    return Cost(flop=2 * dims["rows"] * dims["n"] * dims["k"])


def _decode_attention(call: Call, dims: Mapping[str, int]) -> Cost:
    elements = 2 * sum(call.lengths) * dims["heads"] * dims["head_dim"]
    return Cost(kv=elements * dtypes.itemsize(call.dtype), flop=2 * elements)


def _packed_attention(call: Call, dims: Mapping[str, int]) -> Cost:
    return Cost(flop=4 * sum(length**2 for length in call.lengths) * dims["heads"] * dims["head_dim"])


def _kv_scatter(call: Call, dims: Mapping[str, int]) -> Cost:
    return Cost(kv=dims["rows"] * dims["width"] * dtypes.itemsize(call.dtype))


RULES: Final = {
    "linear": _linear,
    "decode_attention": _decode_attention,
    "packed_attention": _packed_attention,
    "kv_scatter": _kv_scatter,
}


def total(calls: Sequence[Call]) -> Cost:
    """Return the sum over all launches."""
    return sum(map(cost, calls), Cost())


def floor_us(calls: Sequence[Call]) -> float:
    """Return the sum of the launches' floors: each op waits for the one before it."""
    return sum(cost(call).floor_us() for call in calls)
