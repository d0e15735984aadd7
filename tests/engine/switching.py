# SPDX-License-Identifier: MIT OR Apache-2.0
"""Threads that take turns as often as they can."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as they can. A context, and a decorator of tests."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
