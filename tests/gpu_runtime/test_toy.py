# SPDX-License-Identifier: MIT OR Apache-2.0
"""The CUDA forms of the tests' own kernels are their specs', and compile."""

from __future__ import annotations

import importlib.util

import pytest

from gpu_runtime import kernel_source
from gpu_runtime.op import Op
from tests.gpu_runtime import hold, toy

OPS = pytest.mark.parametrize("op", [toy.OP, hold.OP], ids=lambda op: op.spec.name)


def source(op: Op) -> str:
    assert op.source is not None
    return kernel_source.inlined(op.source, op.include)


@OPS
def test_parameters_are_the_specs(op: Op) -> None:
    kernel_source.check_spec(op.spec, source(op))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy's binding of NVRTC is not installed")
@pytest.mark.parametrize("arch", ["compute_80", "sm_90"])
@OPS
def test_compiles(op: Op, arch: str) -> None:
    from gpu_runtime.cuda import nvrtc

    entry = op.spec.entry(op.spec.dtypes[-1]).encode()
    assert entry in nvrtc.compile_source(source(op), f"{op.spec.name}.cu", arch, cache=None)
