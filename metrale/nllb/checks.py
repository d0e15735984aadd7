# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of ids, made on the host before any device work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from metrale.checks import integer
from metrale.errors import InvalidInput


def token_id(argument: str, value: object, vocab: int) -> int:
    """Return an id as an int. `InvalidInput` when it is not an integer or not in the vocabulary."""
    return integer(argument, value, 0, vocab - 1, f"an id in [0, {vocab})")


def token_ids(argument: str, values: Sequence[int], vocab: int) -> list[int]:
    """Return ids as a list of ints; an error names the first wrong one as ``argument[i]``."""
    if isinstance(values, (str, bytes)):
        raise InvalidInput(argument, "a sequence of ids", values)
    try:
        items = list(values)
    except TypeError:
        raise InvalidInput(argument, "a sequence of ids", values) from None
    return [
        value if type(value) is int and 0 <= value < vocab else token_id(f"{argument}[{index}]", value, vocab)
        for index, value in enumerate(items)
    ]


def pinned_results(dst: object, shape: tuple[int, ...]) -> None:
    """Refuse, with `InvalidInput`, what is no array for the 32-bit results of a choice."""
    if (
        not isinstance(dst, np.ndarray)
        or dst.shape != shape
        or dst.dtype.kind not in "iu"
        or dst.dtype.itemsize != dtypes.itemsize("i32")
        or not dst.dtype.isnative
        or not dst.flags.c_contiguous
        or not dst.flags.writeable
    ):
        got = f"{getattr(dst, 'dtype', type(dst).__name__)} {getattr(dst, 'shape', '')}"
        raise InvalidInput("dst", f"a writable contiguous array of 32-bit integers of shape {shape}", got)


def require_event(gpu: GpuBackend, event: object) -> None:
    """Refuse, with `InvalidInput`, what is no live event: before anything is enqueued."""
    try:
        gpu.event_query(event)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidInput("event", "an event of this model", event) from None
