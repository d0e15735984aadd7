# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the time of a pass goes, op by op, and by the parts of a layer.

A pass of the model is recorded launch by launch, with the addresses it really used. Then the launches of one kind (the
same op and sizes, one after another through the layers) run as a graph, each time after a read that empties the L2, so
that weights and KV come from memory as they do in the pass; the time of the read alone is taken off. What remains is
the time of the kind, with the gaps between its launches, and without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import GpuBackend, LaunchRecord, Op, StreamLike, dtypes
from metrale.bench.floors import H200, TABLES, Call, Rates, floor_us, total
from metrale.bench.parts import Place
from metrale.bench.timing import Clock, Reader

LEAST_CALLS = 8
"""Launches of a kind that are timed together at least; fewer are repeated."""


class Recorded:
    """What a pass enqueued: every launch that went through an op, and what the backend saw.

    Attributes
    ----------
    calls : list of Call
    trace : list of LaunchRecord
    first : list of int
        For each call, where in the trace the first is of what it enqueued.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.trace: list[LaunchRecord] = []
        self.first: list[int] = []

    def counts(self) -> dict[str, int]:
        """Return how many kernels, products, copies and memsets the backend was asked for."""
        kinds = [record.kind for record in self.trace]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def unseen(self) -> int:
        """Return how many kernels and products went past the ops, and are in no breakdown."""
        counts = self.counts()
        return counts.get("kernel", 0) + counts.get("gemm", 0) - len(self.calls)


@contextmanager
def recording(gpu: GpuBackend) -> Iterator[Recorded]:
    """Record what is enqueued inside the context, which waits for it at its end and reads the tables it used."""
    found = Recorded()
    original = Op.launch

    def launch(op: Op, on: GpuBackend, dtype: str, values: Sequence[Any], stream: StreamLike = 0) -> None:
        found.calls.append(Call(op, dtype, tuple(values)))
        found.first.append(len(trace))
        original(op, on, dtype, values, stream)

    with gpu.launch_trace() as trace, patch.object(Op, "launch", launch):
        yield found
    found.trace = list(trace)
    gpu.synchronize()
    found.calls = with_tables(gpu, found.calls)


def with_tables(gpu: GpuBackend, calls: Sequence[Call]) -> list[Call]:
    """Return the calls with what their tables hold now. The work that uses them must be done."""
    known: dict[tuple[int, tuple[int, ...]], NDArray[Any]] = {}

    def read(address: int, dtype: str, sizes: tuple[int, ...]) -> NDArray[Any]:
        table = known.get((address, sizes))
        if table is None:
            table = known[address, sizes] = np.empty(sizes, dtype=dtypes.NUMPY[dtype])
            gpu.copy_d2h(address, table)
        return table

    result = []
    for call in calls:
        tables = {
            arg.name: read(int(value), arg.dtype, arg.sizes(call.dims))
            for arg, value in zip(call.spec.args, call.values, strict=True)
            if arg.name in TABLES.get(call.spec.name, ()) and value
        }
        result.append(Call(call.op, call.dtype, call.values, tables))
    return result


def passes(calls: Sequence[Call]) -> list[list[Call]]:
    """Split the launches of a prefill into its passes, each of which begins with an embedding: encoder, decoder."""
    found: list[list[Call]] = []
    for call in calls:
        if call.spec.name == "embed" or not found:
            found.append([])
        found[-1].append(call)
    return found


def kinds(calls: Sequence[Call]) -> dict[tuple[str, int], list[Call]]:
    """Return the launches by label and rows (or searches), in the order in which each kind first appears."""
    found: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        dims = call.dims
        rows = next((dims[name] for name in ("rows", "tokens", "groups") if name in dims), 1)  # gemv has one row
        found.setdefault((call.label, rows), []).append(call)
    return found


def replay(gpu: GpuBackend, calls: Sequence[Call]) -> Callable[[int], None]:
    """Return a function that enqueues recorded launches on a stream."""

    def enqueue(stream: int) -> None:
        for call in calls:
            call.op.launch(gpu, call.dtype, call.values, stream)

    return enqueue


def kind_us(clock: Clock, reader: Reader | None, calls: Sequence[Call], repeats: int) -> float:
    """Return the microseconds that one launch of a kind takes, weights and KV coming from memory.

    Without a reader no cache is emptied, and they come from where the launch before left them.
    """
    rounds = -(-LEAST_CALLS // len(calls))
    run = replay(clock.gpu, calls)

    def flush(stream: int) -> None:
        if reader is not None:
            reader.flush(stream)

    def with_calls(stream: int) -> None:
        for _ in range(rounds):
            flush(stream)
            run(stream)

    def without(stream: int) -> None:
        for _ in range(rounds):
            flush(stream)

    flushing = 0.0 if reader is None else clock.graph_ms(without, repeats)
    return 1e3 * (clock.graph_ms(with_calls, repeats) - flushing) / (rounds * len(calls))


@dataclass(frozen=True, slots=True)
class Timed:
    """The launches of a pass, and how long each takes.

    Attributes
    ----------
    calls : sequence of Call
    us : sequence of float
        Microseconds of each. Those of one kind are timed together, so they have the same.
    graph_ms : float
        The pass as one graph, which is what it takes without the host.
    """

    calls: Sequence[Call]
    us: Sequence[float]
    graph_ms: float


def time_launches(clock: Clock, reader: Reader | None, calls: Sequence[Call], repeats: int) -> Timed:
    """Time each kind of launch of a pass, and the whole pass as one graph.

    The memory and tables that the launches use must still be as the pass left them, and nothing else may run.
    """
    us: dict[int, float] = {}
    for group in kinds(calls).values():
        us |= dict.fromkeys(map(id, group), kind_us(clock, reader, group, repeats))
    return Timed(calls, [us[id(call)] for call in calls], clock.graph_ms(replay(clock.gpu, calls), repeats))


def summary(timed: Timed, places: Sequence[Place] | None = None, rates: Rates = H200) -> dict[str, Any]:
    """Return where the time of a pass goes.

    Parameters
    ----------
    timed : Timed
    places : sequence of Place or None
        Where each launch belongs; None leaves out ``parts``.
    rates : Rates
        Of the floors.

    Returns
    -------
    dict
        ``ops`` (one entry a kind: times per launch in microseconds, bytes and operations per launch), ``parts`` (the
        same for each part of a layer), sums of these, the sum of floors, and ``graph_ms``.
    """
    calls = timed.calls
    us = dict(zip(map(id, calls), timed.us, strict=True))

    def row(group: Sequence[Call]) -> dict[str, Any]:
        return _row(group, [us[id(call)] for call in group], rates)

    ops = [{"op": label, "rows": count, **row(group)} for (label, count), group in kinds(calls).items()]
    found: dict[str, Any] = {"ops": ops}
    if places is not None:
        parts: dict[str, list[Call]] = {}
        for call, place in zip(calls, places, strict=True):
            parts.setdefault(place.part, []).append(call)
        found["parts"] = [{"part": part, **row(group)} for part, group in parts.items()]
    whole = total(calls)
    return found | {
        "launches": len(calls),
        "sum_of_ops_ms": round(sum(one["us"] * one["calls"] for one in ops) / 1e3, 4),
        "graph_ms": round(timed.graph_ms, 4),
        "floor_ms": round(floor_us(calls, rates) / 1e3, 4),
        "weight_bytes": whole.weights,
        "activation_bytes": whole.activations,
        "kv_bytes": whole.kv,
        "flop": whole.flop,
    }


def _row(calls: Sequence[Call], us: Sequence[float], rates: Rates) -> dict[str, Any]:
    """Return what one of some launches takes and must take, on average."""
    one, count = total(calls), len(calls)
    measured, floor = sum(us) / count, floor_us(calls, rates) / count
    return {
        "calls": count,
        "us": round(measured, 3),
        "floor_us": round(floor, 4),
        "ratio": round(measured / floor, 2),
        "weight_bytes": one.weights // count,
        "activation_bytes": one.activations // count,
        "kv_bytes": one.kv // count,
        "flop": one.flop // count,
    }


def joined(first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Return several summaries as one: lists one after another, and sums of numbers."""
    for other in others:
        first = {key: value + other[key] for key, value in first.items()}
    return first


def breakdown(
    clock: Clock, reader: Reader, calls: Sequence[Call], repeats: int, places: Sequence[Place] | None = None
) -> dict[str, Any]:
    """Time each kind of launch of a pass, as `time_launches` does; return its `summary`."""
    return summary(time_launches(clock, reader, calls, repeats), places)
