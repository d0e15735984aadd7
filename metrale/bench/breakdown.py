# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the time of a pass goes, op by op.

A pass of the model is recorded launch by launch, with the addresses it really used. Then the launches of one kind (the
same op and sizes, one after another through the layers) run as a graph, each time after a read that empties the L2, so
that weights and KV come from memory as they do in the pass; the time of the read alone is taken off. What remains is
the time of the kind, with the gaps between its launches, and without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import GpuBackend, LaunchRecord, Op, StreamLike, dtypes
from metrale.bench.floors import TABLES, Call, cost, floor_us, total
from metrale.bench.timing import Clock, Reader

LEAST_CALLS = 8
"""Launches of a kind that are timed together at least; fewer are repeated."""


class Recorded:
    """What a pass enqueued: every launch that went through an op, and what the backend saw.

    Attributes
    ----------
    calls : list of Call
    trace : list of LaunchRecord
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.trace: list[LaunchRecord] = []

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


def kind_us(clock: Clock, reader: Reader, calls: Sequence[Call], repeats: int) -> float:
    """Return the microseconds that one launch of a kind takes, weights and KV coming from memory."""
    rounds = -(-LEAST_CALLS // len(calls))
    run = replay(clock.gpu, calls)

    def with_calls(stream: int) -> None:
        for _ in range(rounds):
            reader.flush(stream)
            run(stream)

    def without(stream: int) -> None:
        for _ in range(rounds):
            reader.flush(stream)

    return 1e3 * (clock.graph_ms(with_calls, repeats) - clock.graph_ms(without, repeats)) / (rounds * len(calls))


def breakdown(clock: Clock, reader: Reader, calls: Sequence[Call], repeats: int) -> dict[str, Any]:
    """Time each kind of launch of a pass, and the whole pass as one graph.

    The memory and tables that the launches use must still be as the pass left them, and nothing else may run.

    Returns
    -------
    dict
        ``ops`` (one entry a kind: times per launch in microseconds, bytes and operations per launch), their sums, the
        sum of floors, and ``graph_ms``: the pass as one graph, which is what it takes without the host.
    """
    rows: list[dict[str, Any]] = []
    for (label, count), group in kinds(calls).items():
        one, measured = total(group), kind_us(clock, reader, group, repeats)
        floor = sum(cost(call).floor_us() for call in group) / len(group)
        rows.append(
            {
                "op": label,
                "rows": count,
                "calls": len(group),
                "us": round(measured, 3),
                "floor_us": round(floor, 4),
                "ratio": round(measured / floor, 2),
                "weight_bytes": one.weights // len(group),
                "activation_bytes": one.activations // len(group),
                "kv_bytes": one.kv // len(group),
                "flop": one.flop // len(group),
            }
        )
    whole = total(calls)
    return {
        "ops": rows,
        "launches": len(calls),
        "sum_of_ops_ms": round(sum(row["us"] * row["calls"] for row in rows) / 1e3, 4),
        "graph_ms": round(clock.graph_ms(replay(clock.gpu, calls), repeats), 4),
        "floor_ms": round(floor_us(calls) / 1e3, 4),
        "weight_bytes": whole.weights,
        "activation_bytes": whole.activations,
        "kv_bytes": whole.kv,
        "flop": whole.flop,
    }
