# SPDX-License-Identifier: MIT OR Apache-2.0
"""Inputs of the op `sample`, for tests that say what a row asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from metrale.ops.row_parts import PARTS
from metrale.ops.sample import COUNT_COLUMNS, SETTING_COLUMNS

_OFF = {"top_p": 1.0, "penalty": 1.0, "mask0": -1, "mask1": -1, "cell": -1, "forced": -1}


def inputs_of(
    logits: Any, *, seed: Any = 0, capacity: int = 0, cell_count: int = 4, word_room: int = 8, **columns: Any
) -> dict[str, Any]:
    """Return the op's parameters for contiguous float32 rows with a slot each.

    ``columns`` are those of ``counts`` and ``settings``, one value or one for each row; ``adjust`` and ``greedy`` may
    be among them. History, bans and bad words are 0, cells -77. Without ``capacity`` there is room for one more id than
    there are.
    """
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape
    words, greedy = -(-vocab // 32), columns.pop("greedy", 0)
    adjust = columns.pop("adjust", 1 - greedy)
    given = {"slot": np.arange(rows), **_OFF, **columns}
    counts = np.stack([np.broadcast_to(given.pop(name, 0), rows) for name in COUNT_COLUMNS], axis=1)
    settings = np.stack([np.broadcast_to(given.pop(name, 0), rows) for name in SETTING_COLUMNS], axis=1)
    assert not given, f"no such column: {given}"
    capacity = capacity or int(counts[:, 1].max()) + 1
    return {
        "logits": logits,
        "counts": counts.astype(np.int32),
        "settings": settings.astype(np.float32),
        "seeds": np.broadcast_to(np.asarray(seed, np.uint64), rows).copy(),
        "bans": np.zeros((rows, 2, words), np.uint32),
        "bad_words": np.zeros((rows, word_room), np.int32),
        "history": np.zeros((rows, capacity), np.int32),
        "cells": np.full(cell_count, -77, np.int32),
        "ids": np.full(rows, -77, np.int32),
        "logprobs": np.full(rows, -77, np.float32),
        "flags": np.full(rows, -77, np.int32),
        "parts": np.zeros((rows, PARTS, 4), np.uint32),
        "arrivals": np.zeros(rows, np.uint32),
        "rows": rows,
        "vocab": vocab,
        "stride": vocab,
        "slot_count": rows,
        "words": words,
        "word_room": word_room,
        "capacity": capacity,
        "cell_count": cell_count,
        "adjust": adjust,
        "greedy": greedy,
    }


def row_of(values: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return the op's parameters for some of the rows, in another order; slots and cells stay as they are."""
    wanted = list(rows)
    of_rows = ("logits", "counts", "settings", "seeds", "ids", "logprobs", "flags", "parts", "arrivals")
    return {**values, **{name: values[name][wanted] for name in of_rows}, "rows": len(wanted)}
