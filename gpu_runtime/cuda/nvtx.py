# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranges that Nsight Systems shows: NVTX, through CuPy."""

from __future__ import annotations

from cupy.cuda import nvtx


class NvtxRanges:
    """NVTX's ranges of the calling thread. Where no profiler listens, a call does nothing."""

    def push(self, label: str) -> None:
        nvtx.RangePush(label)

    def pop(self) -> None:
        nvtx.RangePop()
