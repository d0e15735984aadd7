# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a backend hands out besides addresses: kernels, traced operations, page-locked memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class KernelHandle:
    """A kernel that a backend can launch: its module and entry-point name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One traced operation.

    Attributes
    ----------
    kind : str
        ``kernel``, ``gemm``, ``copy`` or ``memset``; or ``wait``, for a call that had the host wait.
    name : str
        Entry point, or the kind of copy (``h2d``, ``d2h``, ``d2d``), or the product's shape, or what was waited for
        (``stream``, ``event``). A blocking copy or memset is one, followed by a wait for its stream.
    grid, block : tuple of int
        Geometry of a kernel; empty for everything else.
    nbytes : int
        Bytes that a copy or memset moves; 0 for everything else.
    stream : int
    shared_bytes : int
        Dynamic shared memory of a kernel's block; 0 for everything else.
    """

    kind: Literal["kernel", "gemm", "copy", "memset", "wait"]
    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    nbytes: int = 0
    stream: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PinnedMemory:
    """Page-locked host memory. ``array`` is its bytes; ``address`` its host address. Freed by `free_host_pinned`."""

    address: int
    nbytes: int
    array: np.ndarray[Any, np.dtype[np.uint8]]
