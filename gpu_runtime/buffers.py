# SPDX-License-Identifier: MIT OR Apache-2.0
"""Host buffers as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def as_bytes(name: str, buffer: Any, *, writable: bool) -> Bytes:
    """Return a host buffer's bytes as a ``uint8`` view.

    Raises
    ------
    TypeError
        When ``buffer`` has no buffer, or is read-only where it must be written.
    ValueError
        When it is not contiguous.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{name}: expected a C-contiguous array, got strides {buffer.strides}")
        flat = np.asarray(buffer).reshape(-1).view(np.uint8)
    else:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise TypeError(f"{name}: expected an array or a buffer of bytes, got {type(buffer).__name__}") from None
        if not view.c_contiguous:
            raise ValueError(f"{name}: expected a contiguous buffer")
        flat = np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)
    if writable and not flat.flags.writeable:
        raise TypeError(f"{name}: expected a writable buffer, got a read-only one")
    return flat
