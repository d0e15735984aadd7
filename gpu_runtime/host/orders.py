# SPDX-License-Identifier: MIT OR Apache-2.0
"""The orders in which a host backend may run what is enqueued, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from gpu_runtime import checks
from gpu_runtime.host.adversarial import Adversarial
from gpu_runtime.host.queued import Deferred
from gpu_runtime.host.streams import InOrder, Order

OrderName = Literal["in_order", "deferred", "adversarial"]

_ORDERS: Final[Mapping[str, Callable[[int], Order]]] = {
    "in_order": lambda seed: InOrder(),
    "deferred": lambda seed: Deferred(),
    "adversarial": Adversarial,
}


def open_order(name: Any, seed: Any) -> Order:
    """Return a new order; ``seed``, which is at least 0, is what "adversarial" chooses by.

    Raises
    ------
    ValueError
        When there is no order of that name, or the seed is negative.
    TypeError
        When the seed is not an integer.
    """
    number = checks.integer("seed", seed, low=0)
    if not isinstance(name, str) or name not in _ORDERS:
        raise ValueError(f"order: expected one of {', '.join(map(repr, _ORDERS))}, got {name!r}")
    return _ORDERS[name](number)
