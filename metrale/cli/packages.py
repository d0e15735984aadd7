# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is installed, from the metadata of distributions: nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from typing import Any, Final

HOST: Final = {"numpy": "2.1", "safetensors": "0.6.2", "sentencepiece": "0.2.2", "ml_dtypes": "0.5", "tqdm": "4.66"}
"""The distributions that the host backend needs, and the oldest version of each."""

CUDA: Final = {"nvmath-python": ("0.5", None), "cuda-bindings": ("12.9", "13")}
"""The distributions that CUDA needs besides CuPy: the oldest version, and the first that is too new."""

CUDA_MAJOR: Final = 12
"""The major version of CUDA that metrale's requirements are for."""

CUPY: Final = {"cupy-cuda12x": "13.4", "cupy-cuda13x": "13.6"}
"""CuPy's wheels that serve, and the oldest version of each. Only one may be installed; the first is required."""

_CUPY_NAME: Final = re.compile(r"cupy(-cuda\d+x?|-rocm[-\d]+)?")


def probe() -> dict[str, Any]:
    """Return Python, platform, the ``versions`` of distributions (None: not there), and every ``cupy`` there is."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "system": platform.system(),
        "processors": os.cpu_count(),
        "versions": {name: _version(name) for name in (*HOST, *CUDA)},
        "cupy": _cupys(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cupys() -> list[dict[str, str]]:
    """Return every distribution that owns the package ``cupy``; the files of two of them overwrite each other."""
    found: dict[str, str] = {}
    for one in distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name and name not in found and (_CUPY_NAME.fullmatch(name) or "cupy" in _top_level(one)):
            found[name] = one.version
    return [{"name": name, "version": found[name]} for name in sorted(found)]


def _top_level(distribution: Distribution) -> list[str]:
    return (distribution.read_text("top_level.txt") or "").split()
