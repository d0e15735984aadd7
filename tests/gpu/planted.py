# SPDX-License-Identifier: MIT OR Apache-2.0
"""A kernel that writes one element past the end of a block: what a memory checker must find.

``python -m tests.gpu.planted`` under ``compute-sanitizer --tool memcheck`` has to fail, which shows that a run without
a finding means something. Blocks are allocations of exactly their size, as with ``--no-pool``.
"""

from __future__ import annotations

import numpy as np

from gpu_runtime.backend import GpuBackend
from tests.backends import open_cuda
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.ops.harness import upload

COUNT = 64  # 256 bytes, so that nothing lies between the last element and the end of the allocation


def overrun(gpu: GpuBackend, count: int) -> None:
    """Write ``count`` elements into a block of `COUNT`, the last of the process's blocks."""
    x = upload(gpu, np.ones(2 * COUNT, dtype=np.float32))
    out = max(gpu.alloc(4 * COUNT) for _ in range(8))
    assert x + 8 * COUNT <= out or out + 4 * COUNT + 4 <= x, "what lies behind the block must be nobody's"
    launch(gpu, values(x, out, width=count, x_stride=count, out_stride=count))
    gpu.synchronize()


def main() -> None:
    with open_cuda(ops=REGISTRY, pool=False, redzones=False) as gpu:
        overrun(gpu, COUNT)
        overrun(gpu, COUNT + 1)
        gpu.sweep_unreleased()


if __name__ == "__main__":
    main()
