# SPDX-License-Identifier: MIT OR Apache-2.0
"""What C hosts hold by number: backends, and the page-locked memory that was allocated through each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi.codes import UnknownHandle
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.handles import PinnedMemory


@dataclass(slots=True)
class Held:
    """A backend that a host holds, and its page-locked memory by address."""

    backend: GpuBackend
    pinned: dict[int, PinnedMemory] = field(default_factory=dict)

    def take_pinned(self, address: int) -> PinnedMemory:
        """Forget page-locked memory and return it. InvalidPointer when none starts there."""
        memory = self.pinned.pop(address, None)
        if memory is None:
            raise InvalidPointer(f"free_host_pinned: expected what alloc_host_pinned gave, got {address:#x}")
        return memory


class Handles:
    """Numbers for backends: never given twice, so that one that was released stands for nothing for good.

    A handle is a strong reference: a host must find its backend as it left it, whatever Python does meanwhile. Each
    operation is a single one on a dict, and needs no lock.
    """

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._numbers = itertools.count(1)

    def add(self, backend: GpuBackend) -> int:
        """Hold a backend and return its handle."""
        handle = next(self._numbers)
        self._held[handle] = Held(backend)
        return handle

    def find(self, handle: int) -> Held:
        """Return what a handle stands for. UnknownHandle when that is nothing."""
        held = self._held.get(handle)
        if held is None:
            raise UnknownHandle(f"backend: expected a handle of gpurt_backend_from_object, not released, got {handle}")
        return held

    def release(self, handle: int) -> None:
        """Hold a backend no longer. UnknownHandle when the handle stands for nothing."""
        self.find(handle)
        self._held.pop(handle, None)

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()
