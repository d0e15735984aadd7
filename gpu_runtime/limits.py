# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a device allows a launch to ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Launch limits of one device. Sizes are bytes.

    Attributes
    ----------
    compute_capability : tuple of int
        ``(major, minor)``.
    sm_count, warp_size, max_threads_per_block : int
    max_cluster : int
        Most blocks of a cluster; 1 where there are none, as below compute capability 9.0.
    max_grid : tuple of int
        Largest grid in x, y and z.
    max_shared_bytes : int
        Largest dynamic shared memory of one block, with the opt-in that sizes above 48 KiB need.
    gemm_workspace_bytes : int
        Workspace with which products run best; 0 when they have no use for one.
    runs_ahead : bool
        Whether enqueued work runs while the host goes on. Where it does not, there is no point in enqueuing more of it
        before looking at its results.
    pad_batches : bool
        Whether it pays to run a few batch sizes alone, the others padded to them: where preparing a launch of a new
        shape takes longer than the spare rows do.
    prefers_graphs : bool
        Whether launching a graph takes the host less time than enqueuing again what it holds.
    fixed_rows : int
        Rows with which a product of a given algorithm computes each row to the same bits whatever the others are, and
        whichever of them it is; 1: with any number.
    """

    compute_capability: tuple[int, int]
    sm_count: int
    max_shared_bytes: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_cluster: int = 1
    max_grid: tuple[int, int, int] = ((1 << 31) - 1, 65535, 65535)
    gemm_workspace_bytes: int = 0
    runs_ahead: bool = False
    pad_batches: bool = False
    prefers_graphs: bool = False
    fixed_rows: int = 1


PORTABLE_CLUSTER: Final = 8
"""Most blocks of a cluster on every device that has clusters."""

MINIMUM = Limits(compute_capability=(8, 0), sm_count=108, max_shared_bytes=99 * 1024)
"""The least device that every launch plan must fit: compute capability 8.0, and the 99 KiB of shared memory that
8.6 and 8.9 allow a block, which is the smallest opt-in among compute capabilities 8.0 and later."""
