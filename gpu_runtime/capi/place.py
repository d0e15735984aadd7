# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the header is, and which ABI it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ABI_VERSION: Final = (1, 0)
"""Major and minor version of what `gpu_runtime.h` describes; a test holds the header's numbers to it."""


def get_include() -> str:
    """Return the folder to compile with, for ``#include <gpu_runtime.h>``."""
    return str(Path(__file__).parents[1] / "include")
