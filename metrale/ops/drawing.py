# SPDX-License-Identifier: MIT OR Apache-2.0
"""How one id is drawn among many, in NumPy: scores, what the filters keep of them, and noise that depends on the place.

The largest of score plus Gumbel noise is a draw from the softmax of the scores (Gumbel, 1954). The noise comes from
Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): key and counter give
the number, nothing else does.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_MOST: Final = np.finfo(np.float32).max


def scaled(processed: Array, temperature: Any) -> Array:
    """Return the scores of processed logits: float32, the largest 0."""
    finite = np.minimum(processed, _MOST)
    return np.asarray((finite - finite.max()) / temperature)


def weights(scores: Array) -> Array:
    """Return ``exp`` of scores as integers, in units of ``2**-40``: uint64."""
    return (np.exp(scores) * np.float32(1 << 40)).astype(np.uint64)


def kept(scores: Array, top_k: int, top_p: Any, min_p: Any) -> Array:
    """Return the ids that top-k, top-p and min-p keep, in order. Each keeps what reaches some score."""
    bound = -_MOST
    if 0 < top_k < scores.size:
        bound = max(bound, np.partition(scores, scores.size - top_k)[scores.size - top_k])
    if top_p < 1:
        ranked = np.sort(scores[scores >= bound])[::-1]
        sums = weights(ranked).cumsum()
        limit = max(1, int(sums[-1]) * int(max(0.0, float(top_p)) * 2**32) >> 32)
        bound = ranked[np.searchsorted(sums, np.uint64(limit))]  # the first that brings the sum to the limit
    if min_p > 0:
        bound = max(bound, min(np.log(min_p), np.float32(0)))
    return np.flatnonzero(scores >= bound)


def noise(seed: int, length: int, ids: Array) -> Array:
    """Return a draw from the Gumbel distribution for each id of ``ids``, which are in order: float32."""
    blocks = ids >> 2
    begins = np.diff(blocks, prepend=-1) > 0
    counters = [blocks[begins].astype(np.uint64), *(np.full(int(begins.sum()), c, np.uint64) for c in (length, 0, 0))]
    words = np.stack(philox(counters, (seed & 0xFFFFFFFF, seed >> 32)))[ids & 3, np.cumsum(begins) - 1]
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.asarray(-np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)))))


def philox(counter: list[Array], key: tuple[int, int]) -> list[Array]:
    """Return the four words of Philox4x32-10, as uint64, for each counter of four words, ``[n]`` of uint64 each."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    (a, b, c, d), (first, second) = counter, key
    for _ in range(10):
        ahead, behind = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (behind >> shift) ^ b ^ np.uint64(first), behind & low
        c, d = (ahead >> shift) ^ d ^ np.uint64(second), ahead & low
        first, second = first + 0x9E3779B9 & 0xFFFFFFFF, second + 0xBB67AE85 & 0xFFFFFFFF
    return [a, b, c, d]
