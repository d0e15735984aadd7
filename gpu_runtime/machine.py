# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the machine has."""

from __future__ import annotations

import os


def machine_bytes() -> int:
    """Return the machine's physical memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
