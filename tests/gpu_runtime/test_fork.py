# SPDX-License-Identifier: MIT OR Apache-2.0
"""A forked child has the host backend's memory as it has all memory: a copy. tests/gpu has CUDA's refusal."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.backends import open_host
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.ops.harness import download, upload

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("order", ["in_order", "deferred"])
def test_the_host_backend_after_a_fork(order: str) -> None:
    """What was enqueued before runs in both."""
    with open_host(ops=REGISTRY, order=order) as gpu:
        ptr, stream = upload(gpu, X), gpu.create_stream()
        launch(gpu, values(ptr, ptr), stream)
        child = os.fork()
        if not child:
            status = 1
            try:
                launch(gpu, values(ptr, ptr), stream)
                gpu.synchronize(stream)
                correct = download(gpu, ptr, X).tolist() == (4 * X).tolist()
                gpu.free(ptr)
                gpu.close()
                status = 10 if correct else 11
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        gpu.synchronize(stream)
        assert download(gpu, ptr, X).tolist() == (2 * X).tolist()
        gpu.free(ptr)
