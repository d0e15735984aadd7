# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names of cases, which must be the same in every process that collects the tests."""

from __future__ import annotations

import re


def named(value: object) -> str:
    """Return a value's text without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
