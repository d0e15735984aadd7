# SPDX-License-Identifier: MIT OR Apache-2.0
"""Handles without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metrale.engine.handle import RequestHandle
from metrale.engine.request import FinishReason, Request
from tests.engine.clock import FakeClock

EOS = 2


def make(*, clock: Callable[[], float] | None = None, **options: Any) -> RequestHandle:
    on_cancel = options.pop("on_cancel", None)
    request = Request([5], **{"eos_ids": frozenset({EOS}), "max_new_tokens": 100, **options})
    return RequestHandle(request, clock=clock or FakeClock(), on_cancel=on_cancel)


def run(handle: RequestHandle, tokens: list[int], reason: FinishReason = "eos") -> None:
    """Do as the engine does."""
    for token in tokens:
        assert handle.push(token) is None
    handle.finish(reason)


def waiters(handle: RequestHandle) -> int:
    return len(handle._token_waiters) + len(handle._end_waiters)
