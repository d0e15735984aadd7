# SPDX-License-Identifier: MIT OR Apache-2.0
"""Named ranges of the host's time, for a profiler: which calls enqueue what the device then does.

A method says with `ranged` what its range is called, which costs nothing. Where a backend has ranges, `open_ranges`
lets an object's methods open them; where it has none, the object is left as it is, and so are its calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

_LABEL: Final = "range_label"


class Ranges(Protocol):
    """Where ranges go. Those of one thread nest, and each thread has its own."""

    def push(self, label: str) -> None:
        """Open a range inside the one that this thread opened last."""

    def pop(self) -> None:
        """Close the range that this thread opened last."""


def ranged(label: str) -> Callable[[_Method], _Method]:
    """Return a decorator that gives a method's calls a name, and the method back as it is.

    ``label`` may name the method's parameters, in the manner of `str.format`: ``"layer {index}"``, ``"{self._side}"``.
    """

    def named(method: _Method) -> _Method:
        setattr(method, _LABEL, label)
        return method

    return named


def open_ranges(owner: Any, ranges: Ranges | None) -> None:
    """Let each method of ``owner`` that has a name open a range while a call of it lasts, also when it raises.

    Without ranges nothing is done. The object must have a ``__dict__``.
    """
    if ranges is None:
        return
    for name, method in inspect.getmembers(type(owner), inspect.isfunction):
        label = getattr(method, _LABEL, None)
        if label is not None:
            setattr(owner, name, _within(ranges, label, method, owner))


def _within(ranges: Ranges, label: str, method: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    signature = inspect.signature(method)
    is_fixed = "{" not in label

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        text = label if is_fixed else label.format_map(signature.bind(owner, *args, **kwargs).arguments)
        ranges.push(text)
        try:
            return method(owner, *args, **kwargs)
        finally:
            ranges.pop()

    return call
