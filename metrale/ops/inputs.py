# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pieces of the random inputs that ops describe for their tests."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.op import AddressTable, Tolerance
from metrale.ops.processing import LEAST_WORD, encoded_words

Array = np.ndarray[Any, np.dtype[Any]]

ONE_ROUNDING: Final = Tolerance(f32=2e-6, f16=2**-11 + 1e-5, bf16=2**-8 + 1e-5)
"""For ops that compute in float32 and round once: the unit roundoff of the type, and a little for the float32 sums.

The largest float32 error over the edge shapes is 3.1e-7 on the host; 2e-6 leaves room for another order of summation.
"""

ATTENTION: Final = Tolerance(f32=1e-5, f16=2**-11 + 1e-5, bf16=2**-8 + 1e-5)
"""For attention: a score near 100, as the edge shapes have, is only exact to 100 * 2**-24 in float32 for each of the
few roundings on its way, and the softmax turns that absolute error into a relative one. The largest over the edge
shapes is 4.4e-6 on the host (with the BLAS kernels of an AVX2 processor)."""


SPECIALS: Final = ("nan", "inf", "-inf", "last nan", "all nan", "all -inf", "all inf", "last inf")
"""Rows of logits that are not sound, for `metrale.ops.argmax.spoil`: a row each."""


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, mean: float = 0.0, std: float = 1.0
) -> Array:
    """Return normally distributed values, rounded to ``dtype``."""
    return (mean + std * rng.standard_normal(shape)).astype(dtypes.NUMPY[dtype])


def output(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an output to be written: a value that no kernel computes, so that an unwritten element shows."""
    return np.full(shape, -77, dtype=dtypes.NUMPY[dtype])


def spans(
    rng: np.random.Generator, rows: int, positions: int, stride: int, dtype: str, role: Any, *, regular: bool = True
) -> AddressTable:
    """Return a table of ``rows`` separate spans of ``positions`` KV rows, in shuffled order.

    ``regular`` spans start at multiples of the row pitch, as in a KV pool; the others start anywhere.
    """
    gaps = np.zeros(rows, dtype=np.int64) if regular else np.arange(1, rows + 1, dtype=np.int64)
    starts = np.arange(rows) * positions * stride + np.cumsum(gaps)
    pool = normal(rng, (int(starts[-1]) + positions * stride,), dtype)
    return AddressTable(pool, rng.permutation(starts), role)


def offsets(lengths: tuple[int, ...]) -> Array:
    """Return the ``cu_seqlens`` of packed sequences: int32 ``[n + 1]``, starting at 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def ranked(logits: Array) -> Array:
    """Return six ids of a row, the largest logits first; fewer ids recur."""
    order = np.argsort(-np.nan_to_num(logits.astype(np.float32)), kind="stable")
    return np.resize(order[:6], 6)


def slot_tables(
    rng: np.random.Generator, best: list[Array], slots: Array, lengths: list[int], capacity: int, vocab: int
) -> tuple[Array, Array, Array]:
    """Return bans, bad words and histories that concern the ids ``best`` (`ranked`) of each row.

    There is one slot more than rows, with tables that nobody may look at.
    """
    count, words = len(best) + 1, -(-vocab // 32)
    bans = rng.integers(0, 1 << 32, (count, 2, words), np.uint32) & rng.integers(0, 1 << 32, words, np.uint32)
    history = rng.integers(0, vocab, (count, capacity)).astype(np.int32)
    tables = []
    for ids, slot, length in zip(best, slots, lengths, strict=False):
        history[slot, :length] = past = _repeating(ids, length)
        tables.append(encoded_words(_words(ids, past.tolist())))
        for plane in (0, 1):
            bans[slot, plane, ids[plane] >> 5] |= np.uint32(1 << int(ids[plane] & 31))
    bad_words = rng.integers(-1, vocab + 1, (count, max(map(len, tables)))).astype(np.int32)
    for table, slot in zip(tables, slots, strict=False):
        bad_words[slot, : len(table)] = table
    return bans, bad_words, history


def _repeating(best: Array, length: int) -> Array:
    """Return ids after which n-grams up to a size of 9 would repeat with ``best[0]``, which is not the last."""
    past = np.take(best[[3, 1, 2, 0]], np.arange(3 - length, 3), mode="wrap")
    if length >= 16:  # and of what came last, each part alone came before best[1]
        past[:4] = best[[1, 5, 2, 1]]
    return past


def _words(best: Array, past: list[int]) -> list[list[int]]:
    """Return bad words that ban ``best[0]`` and ``best[1]`` after ``past``, and others that ban nothing."""
    ids = best.tolist()
    words = [[ids[5], ids[4], ids[2]], [*past[-1:], ids[0]]]
    words += [[*past[-4:-1], ids[5], ids[3]], [ids[5], *past[-3:], ids[2]], [*past[-3:-1], ids[2]]]  # one id is wrong
    words += [[*past, ids[2]]] if len(past) < 9 else []  # longer than the history
    words += [[*past[-3:], ids[1]]]
    return [word for word in words if len(word) >= LEAST_WORD]
