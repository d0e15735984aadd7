# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is measured, the same for every system; and how a peer's process reports it.

32 source tokens, the last of them EOS, and exactly 64 output tokens, greedy or by beam search. A call takes token ids
or strings from the host and gives the host its result; it is timed by the wall clock. A step is (total of 64 - total of
1) / 63, which leaves encoder, prefill and the call itself out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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

BEAM_REPEATS: Final = 2
"""Timed calls of 64 tokens at most: they take several times as long as greedy ones, and differ less."""

Array = NDArray[Any]


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


def timings(batch: int, ones: list[float], totals: list[float]) -> dict[str, Any]:
    """Return the figures of one case from the milliseconds of calls for 1 and for 64 tokens."""
    one = statistics.median(ones)
    return {
        "total_ms": spread(totals),
        "one_token_ms": spread(ones),
        "step_ms": spread([(ms - one) / (NEW_TOKENS - 1) for ms in totals]),
        "tokens_per_s": round(1e3 * batch * NEW_TOKENS / statistics.median(totals), 1),
    }


def beam_batches(shape: str, beams: int) -> tuple[int, ...]:
    """Return the batches for which a search with ``beams`` beams is measured; none for 0 beams."""
    return BEAM_BATCHES.get(shape, ()) if beams else ()


def measure(call: Callable[[int], object], batch: int, repeats: int) -> dict[str, Any]:
    """Time ``call(new_tokens)``, which waits for its result, after two whole calls to warm up."""

    def ms(new_tokens: int) -> float:
        start = time.perf_counter()
        call(new_tokens)
        return 1e3 * (time.perf_counter() - start)

    first = ms(NEW_TOKENS)
    ms(NEW_TOKENS)
    ms(1)
    ones = [ms(1) for _ in range(max(repeats, 3))]
    totals = [ms(NEW_TOKENS) for _ in range(repeats)]
    return {"first_call_ms": round(first, 1), **timings(batch, ones, totals)}


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


def log_probabilities(logits: Array, ids: list[list[int]]) -> Array:
    """Return the log-probability of ``ids[i][j]`` under ``logits[i, j]``."""
    rows = np.asarray(logits, dtype=np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return np.array([[rows[i, j, token] for j, token in enumerate(chosen)] for i, chosen in enumerate(ids)])


# a peer's process


def arguments(description: str | None) -> argparse.Namespace:
    """Read a peer's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="checkpoints")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float16", choices=tuple(TOLERANCE))
    parser.add_argument("--batches", default="1,8,64", help="batch sizes")
    parser.add_argument("--beams", type=int, default=0, help="also measure beam search with so many beams")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare with the logits.npz in each folder")
    options = parser.parse_args()
    options.models = [(name, Path(folder)) for name, _, folder in (pair.partition("=") for pair in options.models)]
    options.batches = [int(batch) for batch in options.batches.split(",")]
    return options


def report(**fields: Any) -> None:
    """Print one result as a line of JSON."""
    print(json.dumps(fields), flush=True)


@contextmanager
def reporting_errors(**where: Any) -> Iterator[None]:
    """Report an exception, with what it happened to, and go on after the context."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report(**where, error=f"{type(error).__name__}: {error}"[:2000])
