# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the two halves of a LoRA product share: rows grouped by adapter, and random adapters for the tests.

An adapter slot holds ``segments`` pairs of matrices, one pair for each equal block of the product's columns, with room
for ``room`` ranks each. ``ranks[adapter, segment]`` says how many of them are there; the others are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpu_runtime.errors import InvalidPointer
from metrale.ops import inputs

Array = np.ndarray[Any, np.dtype[Any]]

Ranks = Sequence[Sequence[int]]
"""The rank of each segment, for each adapter."""

NOWHERE: Final = np.nan
"""What the tests' arrays hold where nothing may be read, so that reading it shows."""


def by_adapter(op: str, adapters: Array, ranks: Array, adapter_count: int, room: int) -> list[tuple[int, Array]]:
    """Return each adapter that is asked for, with the rows that ask for it; rows without one are left out.

    Parameters
    ----------
    op : str
        Whose parameters these are, for the message.
    adapters : array
        int32 ``[rows]``; less than 0 for none.
    ranks : array
        int32 ``[adapter_count, segments]``. Those of adapters that no row asks for are not looked at.

    Raises
    ------
    InvalidPointer
        When an adapter is `adapter_count` or more, or a rank is not in [0, room]: on a GPU, memory outside of the
        adapters would be read.
    """
    if adapters.max() >= adapter_count:
        raise InvalidPointer(
            f"{op}: adapters: expected adapters in [0, {adapter_count}), or less than 0 for none, got {adapters.max()}"
        )
    order = np.argsort(adapters, kind="stable")
    values, starts = np.unique(adapters[order], return_index=True)
    found = [
        (int(adapter), rows) for adapter, rows in zip(values, np.split(order, starts[1:]), strict=True) if adapter >= 0
    ]
    for adapter, _ in found:
        least, most = ranks[adapter].min(), ranks[adapter].max()
        if least < 0 or most > room:
            raise InvalidPointer(
                f"{op}: ranks: expected ranks in [0, {room}], got {least} to {most} for adapter {adapter}"
            )
    return found


def held(ranks: Array, room: int) -> Array:
    """Return bool ``[segments * room]``: where an adapter with these ranks (``[segments]``) has data."""
    return np.asarray(np.arange(room) < ranks[:, None]).ravel()


def choose(rng: np.random.Generator, rows: int, adapter_count: int) -> Array:
    """Return an adapter or none (any number below 0) for each row: the last row has the last adapter."""
    adapters = rng.integers(-2, adapter_count, rows).astype(np.int32)
    adapters[-1] = adapter_count - 1
    if rows > 2:
        adapters[:2] = (0, -1)
    return adapters


def matrices(
    rng: np.random.Generator, dtype: str, ranks: Ranks, room: int, width: int, *, std: float = 1.0
) -> tuple[Array, Array]:
    """Return the ranks as an array, and ``[adapters, segments * room * width]`` with data where there are ranks."""
    table = np.array(ranks, np.int32)
    full = inputs.normal(rng, (*table.shape, room, width), dtype, std=std)
    for adapter, row in enumerate(table):
        full[adapter].reshape(-1, width)[~held(row, room)] = NOWHERE
    return table, full.reshape(len(table), -1)
