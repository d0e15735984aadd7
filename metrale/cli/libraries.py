# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where NVRTC and cuBLASLt are, and their versions. They load without a driver, and touch no device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("nvrtc", "cublasLt")
_MAJORS: Final = (12, 13, 11)  # metrale's first, then those that a person may have instead


def probe() -> dict[str, Any]:
    """Return ``path``, ``version`` and ``error`` of each library, as JSON-ready values by its name."""
    return {name: _probe(name) for name in NAMES}


def _probe(name: str) -> dict[str, Any]:
    problem = None
    for path in _candidates(name):
        try:
            return {"path": path, "version": _version(name, ctypes.CDLL(path)), "error": None}
        except (OSError, AttributeError) as error:
            if problem is None and Path(path).exists():  # a file that is there, but broken, is worth a word
                problem = str(error)
    return {"path": None, "version": None, "error": problem or "not found"}


def _candidates(name: str) -> Iterator[str]:
    """Yield where a library may be: NVIDIA's wheels, what NVIDIA's own finder knows, the system's search path."""
    yield from map(str, in_wheels(name, sys.path))
    with contextlib.suppress(Exception):  # the finder is optional, and says in many ways that it found nothing
        yield str(importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name).abs_path)
    for major in _MAJORS:
        yield f"lib{name}.so.{major}"


def in_wheels(name: str, folders: list[str]) -> list[Path]:
    """Return where NVIDIA's wheels below ``folders`` keep a library, those of metrale's CUDA version first."""
    found = [path for folder in folders for path in Path(folder or ".").glob(f"nvidia/*/lib/lib{name}.so.*")]
    majors = {path: re.search(r"\.so\.(\d+)", path.name) for path in found}
    ranks = {path: _rank(int(match.group(1))) for path, match in majors.items() if match}
    return sorted(ranks, key=ranks.__getitem__)


def _rank(major: int) -> int:
    return _MAJORS.index(major) if major in _MAJORS else len(_MAJORS)


def _version(name: str, library: Any) -> str:
    if name == "nvrtc":
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"
    get_property = getattr(library, f"{name}GetProperty")  # libraryPropertyType: major, minor, patch level
    parts = [ctypes.c_int() for _ in range(3)]
    for index, part in enumerate(parts):
        get_property(ctypes.c_int(index), ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)
