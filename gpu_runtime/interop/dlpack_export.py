# SPDX-License-Identifier: MIT OR Apache-2.0
"""Giving memory to a DLPack consumer.

NumPy makes the capsule: of an array over the memory, which nobody reads, and whose base is the export. Then the capsule
is told the device, and the element type where NumPy does not know it. So its deleter and its destructor are NumPy's
compiled ones: they take the GIL themselves, keep an exception that is being raised, and do nothing once the interpreter
is gone. Python code could promise none of that, and a consumer may call them anywhere.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from gpu_runtime import checks
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import told
from gpu_runtime.export import Array, Tensor
from gpu_runtime.interop import dlpack
from gpu_runtime.packing import packed, to_host
from gpu_runtime.streams import DEFAULT_STREAM, LEGACY_STREAM, StreamLike, stream_handle

HOST = (dlpack.CPU, 0)
NO_ORDER = -1


@dataclass(frozen=True, slots=True)
class Request:
    """What a consumer asks for: the arguments of ``__dlpack__``."""

    stream: int | None
    max_version: tuple[int, int] | None
    dl_device: tuple[int, int] | None
    copy: bool | None

    @property
    def versioned(self) -> bool:
        """Whether the consumer reads versioned capsules."""
        if self.max_version is None:
            return False
        try:
            major, minor = self.max_version
        except (TypeError, ValueError):
            raise TypeError(f"max_version: expected a pair of integers or None, got {self.max_version!r}") from None
        checks.integer("max_version", minor)
        return checks.integer("max_version", major) >= dlpack.MAJOR

    def target(self, here: tuple[int, int]) -> tuple[int, int]:
        """Return the device that the consumer wants the memory on."""
        if self.dl_device is None:
            return here
        try:
            kind, number = (operator.index(part) for part in self.dl_device)
        except (TypeError, ValueError):
            raise TypeError(f"dl_device: expected a pair of integers or None, got {self.dl_device!r}") from None
        if (kind, number) not in (here, HOST):
            raise BufferError(f"dl_device: expected {here}, where the memory is, or {HOST}, got {(kind, number)}")
        return kind, number


def export(tensor: Tensor, request: Request) -> Any:
    """Return a capsule, as `gpu_runtime.DeviceBuffer.__dlpack__` says."""
    here = tensor.holding.device()
    target, versioned = request.target(here), request.versioned
    check_copy(request.copy)
    consumer = _consumer(request.stream, on_host=here[0] != dlpack.CUDA)
    moves = here[0] == dlpack.CUDA and target == HOST
    if moves and request.copy is False:
        raise BufferError(f"copy: expected a copy to be allowed, as the memory of device {here} is wanted on the host")
    if moves or (request.copy and here[0] != dlpack.CUDA):
        refuse_capture(tensor.gpu, tensor.stream)
        return _capsule(to_host(tensor), tensor.dtype, HOST, versioned, copied=True)
    if tensor.readonly and not request.copy and not versioned:
        raise BufferError(
            "expected a consumer that knows read-only memory, which DLPack can say from version 1.0 on, "
            f"got max_version={request.max_version}"
        )
    if request.copy:
        refuse_capture(tensor.gpu, tensor.stream)
    given = packed(tensor, "a copy for a DLPack consumer") if request.copy else tensor
    array = given.export()
    order(given, consumer)
    return _capsule(array, tensor.dtype, target, versioned, copied=bool(request.copy))


def check_copy(copy: Any) -> None:
    """Raise ValueError for what is neither a bool nor None."""
    if not isinstance(copy, bool | None):
        raise ValueError(f"copy: expected True, False or None, got {told(copy)}")


def _consumer(stream: Any, *, on_host: bool) -> int | None:
    """Return the handle of the consumer's stream, None for the host itself, or `NO_ORDER`."""
    if stream is None:
        return None if on_host else LEGACY_STREAM
    handle = checks.integer("stream", stream, low=NO_ORDER)
    if handle == NO_ORDER:
        return NO_ORDER
    if on_host:
        raise ValueError(f"stream: expected None or -1 for memory that the host reads, got {stream!r}")
    if handle == 0:
        raise ValueError("stream: expected None, -1, 1 (legacy), 2 (per-thread) or a handle, got 0, which is ambiguous")
    return handle


def order(tensor: Tensor, consumer: int | None) -> None:
    """Let a consumer's stream, or (None) the host, come after the tensor's stream. Device work is ordered by an event.

    Raises
    ------
    BufferError
        When that would need a wait inside a capture.
    """
    gpu, ours = tensor.gpu, tensor.stream
    if consumer is None:
        refuse_capture(gpu, ours)
        gpu.synchronize(ours)
    elif consumer != NO_ORDER and consumer != same_handle(gpu, ours):
        order_after(gpu, consumer, ours)


def same_handle(gpu: GpuBackend, stream: StreamLike) -> int:
    """Return the handle by which others know a stream."""
    handle = stream_handle(stream)
    return gpu.default_stream() if handle == DEFAULT_STREAM else handle


def order_after(gpu: GpuBackend, later: StreamLike, earlier: StreamLike) -> None:
    """Let one stream come after what is on another one, by an event; the host goes on.

    Raises
    ------
    BufferError
        When either of them is capturing: the edge would break the capture, or draw the other stream into it.
    """
    refuse_capture(gpu, later)
    refuse_capture(gpu, earlier)
    event = gpu.create_event()
    try:
        gpu.record_event(event, earlier)
        gpu.stream_wait_event(later, event)
    finally:
        gpu.destroy_event(event)


def refuse_capture(gpu: GpuBackend, stream: StreamLike) -> None:
    """Raise BufferError when a stream is capturing."""
    if gpu.stream_is_capturing(stream):
        raise BufferError(
            f"stream {same_handle(gpu, stream):#x} is capturing: expected an exchange before the capture, on that "
            "stream itself, or with stream=-1"
        )


def _capsule(array: Array, dtype: str, device: tuple[int, int], versioned: bool, *, copied: bool) -> Any:
    """Return NumPy's capsule of an array, told where the memory really is and what it holds."""
    names = dlpack.VERSIONED if versioned else dlpack.LEGACY
    capsule = array.__dlpack__(max_version=(dlpack.MAJOR, 0)) if versioned else array.__dlpack__()
    managed = dlpack.managed_of(capsule, names)
    if copied and isinstance(managed, dlpack.Managed):
        managed.flags |= dlpack.IS_COPIED
    tensor = managed.tensor
    tensor.device.type, tensor.device.id = device
    tensor.dtype.code, tensor.dtype.bits = dlpack.TYPES[dtype]
    return capsule
