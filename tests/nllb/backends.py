# SPDX-License-Identifier: MIT OR Apache-2.0
"""Host backends for tests of a model: one that knows what is ordered after what, and some that are more like a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpu_runtime.host import HostBackend
from gpu_runtime.limits import PORTABLE_CLUSTER, Limits
from gpu_runtime.streams import StreamLike

Nodes = int
"""A set of pieces of work: bit ``n`` stands for piece ``n``."""


class Padding(HostBackend):
    """A device that wants decode steps padded."""

    def limits(self) -> Limits:
        return replace(super().limits(), pad_batches=True)


class Clustered(HostBackend):
    """A device whose blocks form clusters."""

    def limits(self) -> Limits:
        return replace(super().limits(), max_cluster=PORTABLE_CLUSTER)


class ByShape(Padding):
    """A device whose products round far apart for another number of rows, as a library may for another algorithm."""

    def limits(self) -> Limits:
        return replace(super().limits(), fixed_rows=64)

    def gemm(self, a: int, w: int, c: int, m: int, *args: Any, **options: Any) -> None:
        super().gemm(a, w, c, m, *args, **options, alpha=1 + m / 1024)


class OrderedBackend(HostBackend):
    """Numbers the work that is enqueued, and keeps for each piece which others CUDA's rules put before it.

    The host backend runs work as soon as it is enqueued, so a missing wait would never show in the numbers.

    Attributes
    ----------
    before : list of Nodes
        For each piece of work, those that have ended when it begins: earlier work of its stream, what its stream
        waits for by an event, and what the host had waited for.
    host : Nodes
        The pieces that the host has waited for.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"check": True, **options})
        self.before: list[Nodes] = []
        self.host: Nodes = 0
        self._on_stream: dict[int, Nodes] = {}
        self._at_event: dict[int, Nodes] = {}

    def _key(self, stream: StreamLike) -> int:
        assert isinstance(stream, int)
        return int(stream) or self.default_stream()

    def _note(self, stream: StreamLike) -> None:
        if self.stream_is_capturing(stream):
            return  # it is no piece of work until its graph is launched
        known = self.host | self._on_stream.get(self._key(stream), 0)
        self.before.append(known)
        self._on_stream[self._key(stream)] = known | 1 << (len(self.before) - 1)

    def launch(self, *args: Any, **options: Any) -> None:
        super().launch(*args, **options)
        self._note(args[4])

    def gemm(self, *args: Any, **options: Any) -> None:
        super().gemm(*args, **options)
        self._note(options["stream"])

    def launch_graph(self, graph: int, stream: StreamLike = 0) -> None:
        super().launch_graph(graph, stream)
        self._note(stream)

    def copy_h2d_async(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        super().copy_h2d_async(src, dst, stream)
        self._note(stream)

    def copy_d2h_async(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        super().copy_d2h_async(src, dst, stream)
        self._note(stream)

    def copy_d2d_2d_async(self, *args: Any) -> None:
        super().copy_d2d_2d_async(*args)
        self._note(args[6])

    def memset_async(self, ptr: int, value: int, nbytes: int, stream: StreamLike = 0) -> None:
        super().memset_async(ptr, value, nbytes, stream)
        self._note(stream)

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        super().record_event(event, stream)
        self._at_event[event] = self._on_stream.get(self._key(stream), 0)

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        super().stream_wait_event(stream, event)
        key = self._key(stream)
        self._on_stream[key] = self._on_stream.get(key, 0) | self._at_event.get(event, 0)

    def event_synchronize(self, event: int) -> None:
        super().event_synchronize(event)
        self.host |= self._at_event.get(event, 0)

    def synchronize(self, stream: StreamLike = 0) -> None:
        super().synchronize(stream)
        self.host |= self._on_stream.get(self._key(stream), 0)

    def copy_d2h_on_stream(self, src: int, dst: Any, stream: StreamLike = 0) -> None:
        super().copy_d2h_on_stream(src, dst, stream)
        self.host |= self._on_stream.get(self._key(stream), 0)

    def copy_h2d_on_stream(self, src: Any, dst: int, stream: StreamLike = 0) -> None:
        super().copy_h2d_on_stream(src, dst, stream)
        self.host |= self._on_stream.get(self._key(stream), 0)

    @contextmanager
    def noted(self) -> Iterator[list[int]]:
        """Give a list that is filled, at the context's end, with the numbers of the work enqueued inside it."""
        nodes: list[int] = []
        first = len(self.before)
        try:
            yield nodes
        finally:
            nodes += range(first, len(self.before))

    def all_before(self, earlier: list[int], later: list[int]) -> bool:
        """Return whether every piece of ``earlier`` has ended when any piece of ``later`` begins."""
        assert later
        return all(holds(self.before[node], earlier) for node in later)


def holds(nodes: Nodes, wanted: list[int]) -> bool:
    """Return whether all of ``wanted``, at least one piece, are in ``nodes``."""
    assert wanted
    mask = sum(1 << node for node in wanted)
    return nodes & mask == mask
