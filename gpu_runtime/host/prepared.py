# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls whose arguments have been checked and turned into arrays, kept for the next call with the same arguments.

A model repeats the same few launches step after step; checking and binding one takes several times as long as a small
launch computes. What is kept is good only as long as no block has been released since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gpu_runtime import checks
from gpu_runtime.host.memory import HostMemory
from gpu_runtime.op import Op

_MOST_KEPT: Final = 2048
"""A decode step of three layers makes about 40 different calls for each number of lanes. Past this many, everything is
forgotten at once, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One checked call: what it was found to be, and the state of memory that its arrays belong to."""

    call: Any
    bound: Any
    generation: int


class PreparedCalls:
    """Prepared calls by their arguments."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._kept: dict[Any, Prepared] = {}
        memory.on_release = self.clear  # an array would keep the released block's memory

    def clear(self) -> None:
        """Forget everything."""
        self._kept = {}

    def find(self, key: tuple[Any, ...], prepare: Callable[[], tuple[Any, Any]]) -> Prepared:
        """Return the prepared call for ``key``, calling ``prepare`` for ``(call, bound)`` when there is none.

        Values that are equal but not of one type (1, True and 1.0) are different keys: they are not equally valid.
        """
        typed = (key, tuple(map(type, key)))
        generation = self._memory.generation
        try:
            found = self._kept.get(typed)
        except TypeError:  # an argument that cannot be hashed; it will be refused, or used once
            return Prepared(*prepare(), generation)
        if found is None or found.generation != generation:
            found = Prepared(*prepare(), generation)
            if len(self._kept) >= _MOST_KEPT:
                self.clear()
            if all(map(_same_later, key)):
                self._kept[typed] = found
        return found

    def is_current(self, prepared: Prepared) -> bool:
        """Return whether no block has been released since ``prepared`` was made."""
        return prepared.generation == self._memory.generation


def _same_later(value: Any) -> bool:
    """Return whether a value of a key means the same when it comes again; an object with ``__index__`` may not."""
    return value is None or isinstance(value, str | bool | type | Op) or checks.repeats(value)
