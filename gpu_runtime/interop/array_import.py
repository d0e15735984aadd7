# SPDX-License-Identifier: MIT OR Apache-2.0
"""Taking memory from a producer of ``__cuda_array_interface__``."""

from __future__ import annotations

from typing import Any

from gpu_runtime import checks, dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.device_buffer import DeviceBuffer, foreign
from gpu_runtime.extents import Extents
from gpu_runtime.interop.dlpack_export import order_after, same_handle
from gpu_runtime.streams import StreamLike


def from_cuda_array_interface(gpu: GpuBackend, source: Any, *, stream: StreamLike = 0) -> DeviceBuffer:
    """Return a buffer over the memory of an object with ``__cuda_array_interface__``, which is kept alive.

    Parameters
    ----------
    gpu : GpuBackend
        A GPU.
    source : object
    stream : StreamLike
        What the buffer is ordered after: it is made to wait, on the device, for the stream that the producer names.

    Raises
    ------
    BufferError
        When the memory cannot be taken: a backend that is no GPU, a mask, an element type that device memory does not
        have, or a stream that is capturing.
    TypeError
        When ``source`` has no such interface.
    ValueError
        When the interface is malformed.
    """
    if gpu.kind() != "cuda":
        raise BufferError("from_cuda_array_interface: expected a backend that is a GPU, got the host's")
    described = getattr(source, "__cuda_array_interface__", None)
    if not isinstance(described, dict):
        kind = type(source).__name__
        raise TypeError(f"from_cuda_array_interface: expected an object with __cuda_array_interface__, got {kind}")
    if described.get("mask") is not None:
        raise BufferError("from_cuda_array_interface: expected an array without a mask, got one with a mask")
    try:
        (address, readonly), shape, typestr = described["data"], described["shape"], described["typestr"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"from_cuda_array_interface: expected data, shape and typestr, got {described!r}") from None
    try:
        dtype = dtypes.element_type(typestr)
    except ValueError as error:
        raise BufferError(f"from_cuda_array_interface: {error}") from None
    extents = Extents.of(shape, described.get("strides"), dtypes.itemsize(dtype))
    _order(gpu, described.get("stream"), stream)
    start = checks.address("from_cuda_array_interface: data", address or 0)
    return foreign(gpu, start, extents, dtype, source, readonly=bool(readonly), stream=stream)


def _order(gpu: GpuBackend, theirs: Any, ours: StreamLike) -> None:
    """Put a producer's work before what our stream does from here on."""
    if theirs is None:  # it says that there is nothing to wait for
        return
    handle = checks.integer("from_cuda_array_interface: stream", theirs, low=1)
    if handle != same_handle(gpu, ours):
        order_after(gpu, ours, handle)
