# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernel sources of the project, and what a compiler made of one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import metrale_kernels

from gpu_runtime import cuda
from gpu_runtime.kernel_source import Parameter, inlined

ARCHITECTURES: Final = ("compute_80", "compute_90", "compute_100")

OPS: Final = sorted(metrale_kernels.ROOT.glob("*.cu"))
"""One for each op."""

RUNTIME: Final = sorted(Path(cuda.__file__).parent.glob("*.cu"))
"""What the backend launches for itself."""

_ENTRY: Final = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)")
_PARAMETER: Final = re.compile(r"\.param\s+\.([a-z]+)(\d+)\b")


def asks_for_generation(source: Path) -> bool:
    """Return whether another generation of GPUs may get another program of a source, its headers included."""
    return "__CUDA_ARCH__" in inlined(source, (metrale_kernels.ROOT,))


def entries_of_ptx(ptx: bytes) -> dict[str, list[tuple[bool, int]]]:
    """Return, for each entry point that a compiler emitted, whether each parameter is a float, and its bits."""
    return {
        match[1]: [(kind == "f", int(bits)) for kind, bits in _PARAMETER.findall(match[2])]
        for match in _ENTRY.finditer(ptx.decode())
    }


def passed(parameters: tuple[Parameter, ...]) -> list[tuple[bool, int]]:
    """Return the same of parsed parameters. An address has 64 bits."""
    return [
        (False, 64) if one.role != "scalar" else (one.dtype.startswith("f"), int(one.dtype[1:])) for one in parameters
    ]
