# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether the libraries behind the backend load, each by itself. A broken one may crash: ask in another process."""

from __future__ import annotations

from typing import Any


def nvrtc() -> dict[str, Any]:
    """Return NVRTC's ``version`` (major, minor) and ``archs``, the compute capabilities that it compiles for (90: 9.0).

    Raises
    ------
    BackendUnavailable, ImportError
        When it does not load, or CuPy does not.
    """
    from gpu_runtime.cuda import nvrtc as compiler

    return {"version": list(compiler.version()), "archs": list(compiler.supported_archs())}


def cublaslt() -> dict[str, Any]:
    """Return cuBLASLt's ``version`` (major, minor, patch), as nvmath loads it.

    Raises
    ------
    Exception
        When it does not load, or nvmath does not; it needs a driver.
    """
    from nvmath.bindings import cublasLt

    number = int(cublasLt.get_version())  # 10000 * major + 100 * minor + patch
    return {"version": [number // 10000, number % 10000 // 100, number % 100]}
