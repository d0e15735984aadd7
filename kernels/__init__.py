# SPDX-License-Identifier: MIT OR Apache-2.0
"""CUDA C++ sources of the kernels. Installed as ``metrale_kernels``: the name ``kernels`` is another package's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent


def path(name: str) -> Path:
    """Return the file of the kernel module ``name``.

    Raises
    ------
    FileNotFoundError
        When there is no such module.
    """
    found = ROOT / f"{name}.cu"
    if not found.is_file():
        known = ", ".join(sorted(file.stem for file in ROOT.glob("*.cu")))
        raise FileNotFoundError(f"kernel module: expected one of {known}, got {name!r}")
    return found
