# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions of the engine. What goes wrong with one request alone is in its result, not raised."""

from __future__ import annotations

from metrale.errors import MetraleError


def text_of(error: BaseException) -> str:
    """Return an error's kind and text; some errors have no text, or raise when they are asked for it."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__} (without a readable text)"


class EngineError(MetraleError, RuntimeError):
    """Base of every error that the engine raises by itself."""


class QueueFull(EngineError):
    """As many requests wait as may, and none left in the time that the caller gave."""


class RequestFailed(EngineError):
    """A request ended with "error"; raised by `metrale.engine.Generated.raise_for_error` alone."""


class EngineClosed(EngineError):
    """The engine takes no more requests."""
