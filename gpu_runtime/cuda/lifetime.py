# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a backend may still be used: not after `close`, and not in a child that was forked from its process."""

from __future__ import annotations

import os
import weakref
from typing import Final


class Lifetime:
    """``refusal`` says why the backend's calls are refused, and is empty while they are not.

    Parameters
    ----------
    own : dict
        The backend's streams, emptied with the first refusal: a launch looks there first.
    """

    def __init__(self, own: dict[int, int]) -> None:
        self.refusal = ""
        self._own = own
        _OPEN.add(self)

    def close(self) -> bool:
        """Refuse every further call; return whether it was open."""
        was_open = not self.refusal
        self.refuse("the backend is closed")
        return was_open

    def refuse(self, reason: str) -> None:
        """Refuse every further call. The first reason stays."""
        self.refusal = self.refusal or reason
        self._own.clear()


_OPEN: Final[weakref.WeakSet[Lifetime]] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """CUDA does not survive a fork: in the child every call would fail or hang, so none is made."""
    for lifetime in tuple(_OPEN):
        lifetime.refuse("the process was forked after the backend was opened; a child cannot use the parent's GPU")


os.register_at_fork(after_in_child=_refuse_in_child)
