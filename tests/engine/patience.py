# SPDX-License-Identifier: MIT OR Apache-2.0
"""Waiting for the engine's thread, and making it wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

PATIENCE: Final = 60.0
"""Seconds after which a wait that should have ended is a failure. No test that passes comes near it."""


def until(condition: Callable[[], bool]) -> None:
    """Wait, in small steps, for another thread."""
    for _ in range(int(PATIENCE / 0.001)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


class Gate:
    """An ``on_token`` callback that stops the engine's thread at its call number ``at`` until the gate is opened.

    A context manager, which opens it at the latest.
    """

    def __init__(self, at: int = 1) -> None:
        self.at = at
        self.calls = 0
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, token: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            self._reached.set()
            assert self._opened.wait(PATIENCE)

    def reach(self) -> None:
        """Wait until the engine's thread stands here."""
        assert self._reached.wait(PATIENCE)

    def open(self) -> None:
        self._opened.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
