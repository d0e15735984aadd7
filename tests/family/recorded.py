# SPDX-License-Identifier: MIT OR Apache-2.0
"""The recorded logits: of each row some, and numbers that every one of them has a part in.

A row has 40 to 120 logits. Kept are 12 of them, at ids drawn for the row, and 12 sums of all of them with signs drawn
for the row, divided by the root of their number. When logits are off by a vector e, such a sum is off by about the root
of the mean square of e, and by no less than the largest part of e over the root of their number in half of all draws of
signs. So errors spread over a row show in the sums as they are, and one in a single logit when it is ten times the
tolerance; of 12 sums all miss it once in 4,096 draws, and a model has 28 rows. `tests.family.test_live` compares every
logit, where torch is installed.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "family_logits.safetensors"
OFFICIAL_FILE = DATA / "family_official.json"
SAMPLED = 12
SUMS = 12
TOLERANCE = 1e-5
"""Largest difference, relative to the largest logit of the model. Each side is off by about 1e-6: sums of float32."""

Rows = npt.NDArray[np.float32]


def digest(rows: Rows) -> Rows:
    """Return ``[..., SAMPLED + SUMS + 1]`` of logits ``[..., vocabulary]``; the last is the largest magnitude."""
    flat = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
    return np.array([_of_row(row, at) for at, row in enumerate(flat)], np.float32).reshape(*rows.shape[:-1], -1)


def _of_row(row: npt.NDArray[np.float64], at: int) -> list[float]:
    bits = np.random.PCG64(at)
    sampled = row[(bits.random_raw(SAMPLED) % np.uint64(len(row))).astype(np.int64)]
    signs = 1.0 - 2.0 * (bits.random_raw(SUMS * len(row)).reshape(SUMS, -1) >> np.uint64(63))
    # not summed by a product of matrices, whose order of summation is the library's
    return [*sampled, *((signs * row).sum(axis=1) / len(row) ** 0.5), np.abs(row).max()]


def worst(found: Rows, expected: Rows) -> float:
    """Return the largest difference of two arrays of logits, or of digests, relative to the largest number in one."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


@functools.cache
def recorded() -> dict[str, Rows]:
    """Return the digest of each model's logits, by its name."""
    return dict(load_file(FILE))
