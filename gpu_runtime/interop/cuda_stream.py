# SPDX-License-Identifier: MIT OR Apache-2.0
"""A stream of ours, as other libraries take it."""

from __future__ import annotations

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.interop.dlpack_export import same_handle
from gpu_runtime.streams import StreamLike


class CudaStream:
    """A stream of a GPU by the CUDA stream protocol: ``cupy.cuda.Stream.from_external`` takes it, for example.

    It does not own the stream: whoever created it destroys it when nobody uses it any more, and the default stream goes
    with its backend, which this object keeps alive.

    Parameters
    ----------
    gpu : GpuBackend
    stream : StreamLike
        0 is the backend's default stream.

    Attributes
    ----------
    gpu : GpuBackend
    handle : int
        The ``cudaStream_t``.

    Raises
    ------
    DeviceError
        When the backend is no GPU, or is closed, or the stream was destroyed.
    """

    def __init__(self, gpu: GpuBackend, stream: StreamLike = 0) -> None:
        if gpu.kind() != "cuda":
            raise DeviceError("CudaStream: expected a backend that is a GPU, got the host's, whose streams are its own")
        gpu.stream_is_capturing(stream)  # which refuses a stream that was destroyed
        self.gpu = gpu
        self.handle = same_handle(gpu, stream)
        self._stream = stream  # which may be an object that owns the handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle. DeviceError when the backend has been closed."""
        self.gpu.kind()
        return 0, self.handle

    def __repr__(self) -> str:
        return f"CudaStream({self.handle:#x})"
