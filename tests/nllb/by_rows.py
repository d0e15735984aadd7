# SPDX-License-Identifier: MIT OR Apache-2.0
"""A device on which no row depends on its neighbours, to the bit.

On the host a product sums in an order that depends on the number of rows. Here each row is computed by itself, so that
what is found together can be compared with what is found alone without a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from tests.engine.alone import products_by_rows


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
    """Give a host backend with products that treat each row by itself, and limits with ``changes``."""
    with products_by_rows(), Like(changes or {}, **options) as gpu:
        yield gpu
