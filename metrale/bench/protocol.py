# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is measured, the same for every system.

So many source tokens, the last of them EOS, and so many output tokens exactly, greedy or by beam search: 32 and 64
where nothing else is said. A call takes token ids or strings from the host and gives the host its result; it is timed
by the wall clock. A step is (total of 64 - total of 1) / 63, which leaves encoder, prefill and the call itself out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SOURCE_TOKENS: Final = 32
NEW_TOKENS: Final = 64
EOS: Final = 2
FIRST_WORD: Final = 4
"""The first id that is not special."""

BEAM_BATCHES: Final = {"tiny": (1, 3), "600M": (1, 64), "3.3B": (64,)}
"""The batches for which beam search is measured, by shape; for others it is not."""

RUNS: Final = 5
"""Timed calls of each case, where nothing else is said: enough for a median, and for a best one that is no accident."""

LEAST_ONES: Final = 3
"""Timed calls for one token at least: their median is taken off every other one."""

DEVICE_STEPS: Final = 16
"""Most steps that are timed on the device, from half way on."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a case is: tokens of each source, language and EOS included, and tokens that are put out."""

    source: int = SOURCE_TOKENS
    new: int = NEW_TOKENS

    @property
    def budget(self) -> int:
        """Target tokens that there must be room for: the language, those put out, and one to spare."""
        return self.new + 2

    @property
    def half_way(self) -> int:
        """Steps after which a step is of average length."""
        return self.new // 2

    def device_steps(self, repeats: int) -> int:
        """Return how many steps can be timed on the device from half way on; none when there are too few tokens."""
        return max(min(repeats, DEVICE_STEPS, self.new - self.half_way - 1), 0)


STANDARD: Final = Lengths()
"""The lengths of the performance table."""


def sources(count: int, length: int, vocab: int, first: int = FIRST_WORD, seed: int = 1) -> list[list[int]]:
    """Return ``count`` sources of ``length`` ids: ``first`` (a language, say), random words, EOS."""
    words = random.Random(seed)
    return [[first, *(words.randrange(FIRST_WORD, vocab) for _ in range(length - 2)), EOS] for _ in range(count)]


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most, and how many there are."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def timings(batch: int, ones: list[float], totals: list[float], new: int = NEW_TOKENS) -> dict[str, Any]:
    """Return the figures of one case from the milliseconds of calls for 1 and for ``new`` tokens.

    ``step_ms`` is None when ``new`` is 1: no step comes after the first token.
    """
    one = statistics.median(ones)
    return {
        "total_ms": spread(totals),
        "one_token_ms": spread(ones),
        "step_ms": spread([(ms - one) / (new - 1) for ms in totals]) if new > 1 else None,
        "tokens_per_s": round(1e3 * batch * new / statistics.median(totals), 1),
    }


def beam_batches(shape: str, beams: int) -> tuple[int, ...]:
    """Return the batches for which a search with ``beams`` beams is measured; none for 0 beams."""
    return BEAM_BATCHES.get(shape, ()) if beams else ()


def measure(call: Callable[[int], object], batch: int, repeats: int, new: int = NEW_TOKENS) -> dict[str, Any]:
    """Time ``call(new_tokens)``, which waits for its result, by the wall clock; see `measure_ms`."""

    def ms(tokens: int) -> float:
        start = time.perf_counter()
        call(tokens)
        return 1e3 * (time.perf_counter() - start)

    return measure_ms(ms, batch, repeats, new)


def measure_ms(ms: Callable[[int], float], batch: int, repeats: int, new: int = NEW_TOKENS) -> dict[str, Any]:
    """Return the figures of one case from a call that returns its own milliseconds, after whole calls to warm up."""
    first = ms(new)
    ms(new)
    ms(1)
    ones = [ms(1) for _ in range(max(repeats, LEAST_ONES))]
    totals = [ms(new) for _ in range(repeats)]
    return {"first_call_ms": round(first, 1), **timings(batch, ones, totals, new)}


# the check

CHECK_SOURCES: Final = 2
CHECK_STEPS: Final = 3
"""Tokens that are fed after the language, whatever the model would choose: random ones."""

TOLERANCE: Final = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 2e-1}
"""How far two systems' logits may differ, by the type they compute in, relative to the largest of a row. Rounding gives
a tenth of that or less; a wrong weight, position or mask gives about 1, and a row of zeros exactly that."""


SCORE_TOLERANCE: Final = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 3e-1}
"""How far a token's log-probability may be from another system's, or from that of another way through this one. With
these weights the logits of a row have a deviation of 0.6 to 0.9, so that is how far another row, or another token, is
off; float16 can tell numbers near -12 apart by 0.008."""


def forced_ids(vocab: int) -> list[list[int]]:
    """Return the ids that each source of the check feeds to the decoder after start token and language."""
    words = random.Random(2)
    return [[words.randrange(FIRST_WORD, vocab) for _ in range(CHECK_STEPS)] for _ in range(CHECK_SOURCES)]


def difference(ours: Array, theirs: Array) -> float:
    """Return the largest difference of two arrays ``[..., n]``, relative to the largest of its row; inf for a NaN."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    error = np.abs(a - b).max(axis=-1) / np.abs(b).max(axis=-1)
    return float(error.max()) if np.isfinite(error).all() else float("inf")


def compare_logits(ours: Array, theirs: Array, dtype: str) -> dict[str, Any]:
    """Return how far two systems' logits ``[..., vocab]`` are apart, and whether that may be in this element type.

    Returns
    -------
    dict
        ``largest_relative_difference`` (`difference`), the ``tolerance`` it is held to, ``same_likeliest`` (in how many
        rows both have the same likeliest id) and ``passed``.
    """
    error = difference(ours, theirs)
    return {
        "largest_relative_difference": float(f"{error:.3g}"),
        "tolerance": TOLERANCE[dtype],
        "same_likeliest": f"{int((ours.argmax(-1) == theirs.argmax(-1)).sum())} of {ours[..., 0].size}",
        "passed": error <= TOLERANCE[dtype],
    }


def log_probabilities(logits: Array, ids: list[list[int]]) -> Array:
    """Return the log-probability of ``ids[i][j]`` under ``logits[i, j]``."""
    rows = np.asarray(logits, dtype=np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return np.array([[rows[i, j, token] for j, token in enumerate(chosen)] for i, chosen in enumerate(ids)])
