# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many threads at once, which change so often that a missing lock shows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def eager_switching() -> Iterator[None]:
    """Change threads every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def hammer(work: Callable[[int], None], threads: int) -> None:
    """Run ``work(index)`` in all threads at once and raise what any of them raised."""
    barrier = threading.Barrier(threads)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
