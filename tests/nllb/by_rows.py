# SPDX-License-Identifier: MIT OR Apache-2.0
"""A device on which no row depends on its neighbours, to the bit.

On the host a product, or an attention, sums in an order that depends on the number of rows and on the longest of them.
Here each row is computed by itself, so that what is found together can be compared with what is found alone without a
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Op, OpRegistry
from tests.engine.alone import products_by_rows

ROW_BY_ROW = ("decode_attention", "lora_down", "lora_up")


class Like(HostBackend):
    """A host backend that says of itself what a GPU would: its limits have ``changes``."""

    def __init__(self, changes: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._changes = changes

    def limits(self) -> Limits:
        return replace(super().limits(), **self._changes)


class Unhurried(Like):
    """A device that the host runs ahead of. It frees page-locked memory at its end only, and does not finish the work
    that may use it, as a GPU does not."""

    def __init__(self, **options: Any) -> None:
        super().__init__({"runs_ahead": True}, check=True, **options)
        self._kept: list[PinnedMemory] = []

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self._kept.append(memory)

    def close(self) -> None:
        for memory in self._kept:
            super().free_host_pinned(memory)
        super().close()


@contextmanager
def device_by_rows(changes: Mapping[str, Any] | None = None, **options: Any) -> Iterator[HostBackend]:
    """Give a host backend with products and ops that treat each row by itself, and limits with ``changes``."""
    with products_by_rows(), Like(changes or {}, ops=_ops(), **options) as gpu:
        yield gpu


def _ops() -> OpRegistry:
    ops = OpRegistry()
    for op in REGISTRY:
        if op.spec.name in ROW_BY_ROW:
            op = replace(op, reference=partial(_rows, op))
        elif op.spec.name == "packed_attention":
            op = replace(op, reference=partial(_sequences, op.reference))
        ops.register(op)
    return ops


def _rows(op: Op, *, rows: int, **arguments: Any) -> None:
    """Run an op's reference for one row after the other."""
    own = [arg.name for arg in op.spec.args if arg.shape and arg.shape[0] == "rows"]
    own = [name for name in own if arguments[name] is not None]
    for row in range(rows):
        op.reference(rows=1, **arguments | {name: arguments[name][row : row + 1] for name in own})


def _sequences(
    reference: Callable[..., None], *, offsets: Any, offset_count: int, tokens: int, **arguments: Any
) -> None:
    """Run packed attention for one sequence after the other."""
    assert offset_count == len(offsets)
    for first, after in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        own = {name: arguments[name][first:after] for name in ("q", "k", "v", "out")}
        reference(offsets=np.array([0, after - first]), offset_count=2, tokens=after - first, **arguments | own)
