# SPDX-License-Identifier: MIT OR Apache-2.0
"""The toy kernel's CUDA form is its spec's, and compiles."""

from __future__ import annotations

import importlib.util

import pytest

from gpu_runtime import kernel_source
from tests.gpu_runtime.toy import OP, SPEC


def source() -> str:
    assert OP.source is not None
    return kernel_source.inlined(OP.source, OP.include)


def test_parameters_are_the_specs() -> None:
    kernel_source.check_spec(SPEC, source())


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy's binding of NVRTC is not installed")
@pytest.mark.parametrize("arch", ["compute_80", "sm_90"])
def test_compiles(arch: str) -> None:
    from gpu_runtime.cuda import nvrtc

    assert b"toy_bf16" in nvrtc.compile_source(source(), "toy.cu", arch, cache=None)
