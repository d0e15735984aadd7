# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of orders share: the orders, and a backend that notes what has run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_runtime.checked import launch, opened

ORDERS: list[tuple[Any, int]] = [("in_order", 0), ("deferred", 0), *(("adversarial", seed) for seed in range(8))]
LATER = ORDERS[1:]
every_order = pytest.mark.parametrize(("order", "seed"), ORDERS)


class Noted:
    """A backend whose work notes the numbers that it is enqueued with, as it runs."""

    def __init__(self, order: Any, seed: int = 0, **options: Any) -> None:
        self.done: list[int] = []
        self.gpu = opened(lambda *, add, **_: self.done.append(add), order=order, seed=seed, **options)
        self._x = self.gpu.alloc(32)
        self.gpu.memset(self._x, 0, 32)

    def put(self, number: int, stream: int = 0) -> None:
        launch(self.gpu, stream, x=self._x, add=number)

    def end(self) -> None:
        self.gpu.sweep_unreleased()
        self.gpu.close()
