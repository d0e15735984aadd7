# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a stream argument may be, and how it becomes a handle."""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias, runtime_checkable

from gpu_runtime import checks

DEFAULT_STREAM: Final = 0
"""The backend's own default stream: non-blocking, and never the legacy stream, which cannot be captured."""

LEGACY_STREAM: Final = 1
"""CUDA's legacy default stream (``cudaStreamLegacy``)."""

PER_THREAD_STREAM: Final = 2
"""CUDA's per-thread default stream (``cudaStreamPerThread``)."""


@runtime_checkable
class SupportsCudaStream(Protocol):
    """Any object that follows the CUDA stream protocol: ``__cuda_stream__()`` returns ``(version, handle)``."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = int | SupportsCudaStream
"""0, 1, 2, a raw ``cudaStream_t`` as an int, or an object with ``__cuda_stream__``."""


def stream_handle(stream: StreamLike) -> int:
    """Return the handle that a stream argument stands for.

    An ``int`` is taken as it is. In the protocol, handle 0 means the *legacy* stream, whereas the int 0 means the
    backend's default: the two are told apart here and nowhere else.

    Raises
    ------
    TypeError
        When ``stream`` is neither an integer nor an object with ``__cuda_stream__``, or the latter does not return a
        pair of integers.
    ValueError
        When the handle does not fit in 64 bits or the protocol's version is not 0.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):  # first, because asking for a protocol is slow
        return checks.address("stream", stream)
    if isinstance(stream, SupportsCudaStream) and not isinstance(stream, type):
        return _protocol_handle(stream)
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream: expected an int or an object with __cuda_stream__, got {stream!r}")
    return checks.address("stream", stream)


def _protocol_handle(stream: SupportsCudaStream) -> int:
    if not callable(stream.__cuda_stream__):
        raise TypeError(f"stream: expected __cuda_stream__ to be a method, got {stream.__cuda_stream__!r}")
    pair = stream.__cuda_stream__()
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"stream: expected __cuda_stream__ to return (version, handle), got {pair!r}")
    version = checks.integer("stream: version", pair[0])
    if version != 0:
        raise ValueError(f"stream: expected version 0 of the __cuda_stream__ protocol, got {version}")
    return checks.address("stream", pair[1]) or LEGACY_STREAM
