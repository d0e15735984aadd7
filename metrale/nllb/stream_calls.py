# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on streams, events and page-locked memory, which are its backend's."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.nllb.core import NllbCore


class StreamCalls(NllbCore):
    """`metrale.model.ModelStreams`, and what `ModelDeviceFeed` has of the kind."""

    def default_stream(self) -> int:
        return self.gpu.default_stream()

    def runs_ahead(self) -> bool:
        return self.gpu.limits().runs_ahead

    def create_stream(self) -> int:
        return self.gpu.create_stream()

    def destroy_stream(self, stream: int) -> None:
        self.gpu.destroy_stream(stream)

    def create_event(self) -> int:
        return self.gpu.create_event()

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        self.gpu.record_event(event, stream)

    def event_query(self, event: int) -> bool:
        return self.gpu.event_query(event)

    def event_synchronize(self, event: int) -> None:
        self.gpu.event_synchronize(event)

    def destroy_event(self, event: int) -> None:
        self.gpu.destroy_event(event)

    def copy_d2h_async(self, src: DevicePtr, dst: NDArray[Any], stream: StreamLike = 0) -> None:
        self.gpu.copy_d2h_async(src, dst, stream)

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        return self.gpu.alloc_host_pinned(nbytes)

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self.gpu.free_host_pinned(memory)

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        self.gpu.stream_wait_event(stream, event)

    def synchronize(self, stream: StreamLike = 0) -> None:
        self.gpu.synchronize(stream)
