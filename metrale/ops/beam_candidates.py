# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a beam may go on with: the largest processed log-probabilities of each row, in order.

All in float32, row by row, whatever the neighbours are. Let ``x`` be the row's logits, NaN as minus infinity.

1. ``(x - max x) - log(sum(exp(x - max x)))``; minus infinity everywhere when the largest logit is not finite.
2. Repetition penalty, n-grams, bans and bad words, as `metrale.ops.processing` says.
3. Where an id is ``forced``, it has 0 and all others minus infinity, whatever the logits are.

Without a penalty, the order is that of the logits themselves, and with one that of what is computed; the lowest id wins
a tie. Minus infinity is an element as any other, the least.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, Tolerance, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs
from metrale.ops.argmax import spoil
from metrale.ops.processing import BANNED, SUPPRESS, WORDS, Processors, bitmap_bytes
from metrale.ops.top_k import largest

Array = np.ndarray[Any, np.dtype[Any]]

MAX_CANDIDATES: Final = 256
"""Most candidates of a row."""

ROW_COLUMNS: Final = ("slot", "length", "k", "ngram", "mode", "forced", "rules")
"""Columns of ``counts``: the row's place in ``history``; how many ids it has there; how many candidates it asks for, at
least 1; size of n-grams that may not repeat, 0 for any may; bits of `metrale.ops.processing`; the id that alone may
follow, -1 for none; the row's place in ``bans`` and ``bad_words``, which the beams of a search share."""

THREADS: Final = 1024
STATIC_SHARED: Final = 16 * 1024
"""Bytes of shared memory that the kernel has of its own, at most; a test holds it against what the compiler says."""

SPEC: Final = OpSpec(
    name="beam_candidates",
    args=(
        tensor("logits", "in", "T", "rows", "vocab", row_stride="stride"),
        tensor("counts", "in", "i32", "rows", len(ROW_COLUMNS)),
        tensor("penalties", "in", "f32", "rows"),
        tensor("bans", "in", "u32", "slot_count", 2, "words"),
        tensor("bad_words", "in", "i32", "slot_count", "word_room"),
        tensor("history", "in", "i32", "slot_count", "capacity"),
        tensor("values", "out", "f32", "rows", "most"),
        tensor("ids", "out", "i32", "rows", "most"),
        tensor("flags", "out", "i32", "rows"),
        scalar("rows", "i32"),
        scalar("vocab", "i32"),
        scalar("stride", "i64"),
        scalar("slot_count", "i32"),
        scalar("words", "i32"),
        scalar("word_room", "i32"),
        scalar("capacity", "i32"),
        scalar("most", "i32"),
        scalar("adjust", "i32"),
    ),
    # Ids and flags are exact, and at 1e-6 of 256,205 one id is not taken for the next. Values are sums and logarithms
    # in float32 for every element type, as `top_k` has them.
    tolerance=Tolerance(f32=1e-6, f16=1e-6, bf16=1e-6),
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block of 1,024 threads a row; with ``adjust``, shared memory for two bitmaps of the vocabulary.

    Raises
    ------
    ValueError
        When ``most`` is not from 1 to `MAX_CANDIDATES`, ``words`` is not what the vocabulary takes, or it has too many
        ids for the bitmaps.
    """
    if not 1 <= dims["most"] <= MAX_CANDIDATES:
        raise ValueError(f"beam_candidates: most: expected 1 to {MAX_CANDIDATES}, got {dims['most']}")
    shared = bitmap_bytes(SPEC.name, dims, limits, STATIC_SHARED)
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (THREADS, 1, 1), shared)


def reference(
    *,
    logits: Array,
    counts: Array,
    penalties: Array,
    bans: Array,
    bad_words: Array,
    history: Array,
    values: Array,
    ids: Array,
    flags: Array,
    rows: int,
    vocab: int,
    stride: int,
    slot_count: int,
    words: int,
    word_room: int,
    capacity: int,
    most: int,
    adjust: int,
) -> None:
    """Row by row. What is out of range is an error; on a GPU it might be an access out of bounds."""
    column = dict(zip(ROW_COLUMNS, counts.T, strict=True))
    processors = Processors(SPEC.name, bans, bad_words, history)
    processors.check({**column, "penalty": penalties}, adjust)
    processors.in_range("k", column["k"], 1, most + 1)
    processors.in_range("forced", column["forced"], -1, vocab)

    flags[...] = ~np.isfinite(logits.astype(np.float32)).all(axis=1)
    values.fill(-np.inf)
    ids.fill(0)
    for row, k in enumerate(column["k"].tolist()):
        scores, order = _scored(logits[row], counts[row], penalties[row], processors)
        best = largest(order, min(k, vocab))
        values[row, : len(best)], ids[row, : len(best)] = scores[best], best


def _scored(logits: Array, counts: Array, penalty: Any, processors: Processors) -> tuple[Array, Array]:
    """Return a row's processed log-probabilities, and what orders them: float32 ``[vocab]`` each."""
    slot, length, _, ngram, mode, forced, rules = counts.tolist()
    asked = {"slot": slot, "rules": rules, "length": length, "ngram": ngram, "mode": mode, "penalty": penalty}
    x = np.fmax(logits.astype(np.float32), np.float32(-np.inf))
    if forced >= 0:
        scores = np.full_like(x, -np.inf)
        scores[forced] = 0
        return scores, scores
    scores = np.full_like(x, -np.inf)
    if np.isfinite(x.max()):
        scores = x - x.max()
        scores -= np.log(np.exp(scores).sum())
    if penalty == 1:
        processors.apply(x, **asked)
        scores[x == -np.inf] = -np.inf
        return scores, x
    processors.apply(scores, **asked)
    return scores, scores


ROWS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "penalty": {"penalty": 1.7},
    "bonus": {"penalty": 0.6},
    "1-gram": {"ngram": 1},
    "2-gram": {"ngram": 2},
    "3-gram, penalty": {"ngram": 3, "penalty": 1.2},
    "9-gram": {"ngram": 9},
    "banned": {"mode": BANNED},
    "suppressed": {"mode": SUPPRESS},
    "all banned": {"mode": BANNED},
    "words": {"mode": WORDS},
    "forced": {"forced": 11},
    "forced, all banned": {"forced": 0, "mode": BANNED | SUPPRESS, "ngram": 1, "penalty": 2.0},
    "everything": {"penalty": 1.3, "ngram": 3, "mode": BANNED | SUPPRESS | WORDS},
}
"""Kinds of rows for tests: what differs from a plain row."""


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    vocab: int,
    kinds: tuple[str, ...],
    most: int,
    pad: int = 0,
    length: int = 20,
    mean: float = 0.0,
    levels: int = 0,
    special: tuple[str, ...] = (),
    adjust: int = 1,
) -> Inputs:
    """``kinds`` are names of `ROWS`, a row each; ``levels`` leaves so many different logits, so that most are tied;
    ``special`` is as `spoil` takes it. N-grams, bans, and what a row may not look at, concern its largest logits.

    A row with a penalty has margins, so that errors of some units in the last place change no order: `_penalty`.
    """
    rows, words = len(kinds), -(-vocab // 32)
    logits = inputs.normal(rng, (rows, vocab + pad), dtype, mean=mean, std=2)
    if levels:
        logits[:, :vocab] = mean + rng.integers(0, levels, (rows, vocab))
    penalised = [row for row, kind in enumerate(kinds) if "penalty" in ROWS[kind]]
    logits[penalised] = np.round(logits[penalised].astype(np.float32) * _STEPS) / _STEPS
    spoil(rng, logits[:, :vocab], special)
    logits[:, vocab:] = np.inf  # padding must not be looked at
    slots = rng.permutation(rows + 1)
    lengths = [max(length - row // 2, 0) for row in range(rows)]
    best = [inputs.ranked(row[:vocab]) for row in logits]
    bans, bad_words, history = inputs.slot_tables(rng, best, slots, lengths, length, vocab)
    history = np.roll(history, 1, axis=0)  # so that no row has its rules and its history in the same place
    counts = np.zeros((rows, len(ROW_COLUMNS)), np.int32)
    penalties = np.ones(rows, np.float32)
    for row, kind in enumerate(kinds):
        asked, rules, past = ROWS[kind], slots[row], lengths[row]
        slot = (rules + 1) % (rows + 1)
        if "all banned" in kind:
            bans[rules, 0] = 0xFFFFFFFF
        ngram, mode, forced = (asked.get(name, off) for name, off in (("ngram", 0), ("mode", 0), ("forced", -1)))
        counts[row] = slot, past, max(most - row, 1), ngram, mode, forced, rules
        if "penalty" in asked:
            penalties[row] = _penalty(rng, logits[row, :vocab], history[slot, :past], asked["penalty"])
    return {
        "logits": logits,
        "counts": counts,
        "penalties": penalties,
        "bans": bans,
        "bad_words": bad_words,
        "history": history,
        "values": inputs.output((rows, most), "f32"),
        "ids": inputs.output((rows, most), "i32"),
        "flags": inputs.output((rows,), "i32"),
        "rows": rows,
        "vocab": vocab,
        "stride": vocab + pad,
        "slot_count": rows + 1,
        "words": words,
        "word_room": bad_words.shape[1],
        "capacity": length,
        "most": most,
        "adjust": adjust,
    }


_STEPS: Final = 64
"""Logits of rows with a penalty are multiples of ``1 / _STEPS``: equal, or further apart than any rounding."""


def _penalty(rng: np.random.Generator, logits: Array, past: Array, asked: float) -> Any:
    """Return a penalty near ``asked`` that puts no log-probability within 1e-4 of one that it leaves as it is."""
    x = np.fmax(logits.astype(np.float64), -np.inf)
    if not past.size or not np.isfinite(x.max()):
        return np.float32(asked)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    others, mine = (np.unique(part[np.isfinite(part)]) for part in (np.delete(logprobs, past), logprobs[past]))
    while True:
        penalty = np.float32(asked * (1 + 0.1 * rng.random()))
        if all(np.abs(others - value).min(initial=1.0) > 1e-4 for value in (mine * float(penalty)).tolist()):
            return penalty


# Each has a row with a flag, and ids that are not 0: an all-zero result must not pass for them.
CASES: Final = (
    {"vocab": 97, "pad": 31, "kinds": tuple(ROWS), "most": 30, "special": ("nan",)},
    {"vocab": 97, "kinds": tuple(ROWS)[::-1], "most": 97, "special": ("-inf",), "length": 3, "mean": 200.0},
    {"vocab": 33, "kinds": tuple(ROWS), "most": 256, "levels": 3, "special": ("nan",), "length": 1},
    {"vocab": 303, "pad": 17, "kinds": ("plain",) * 8, "most": 9, "special": inputs.SPECIALS, "adjust": 0},
    {"vocab": 303, "pad": 1, "kinds": ("everything",) * 8, "most": 12, "special": inputs.SPECIALS},
    {"vocab": 8240, "kinds": tuple(ROWS), "most": 256, "length": 300, "special": ("inf",)},
    {"vocab": 8240, "kinds": ("plain", "everything", "2-gram"), "most": 20, "levels": 4, "special": ("nan",)},  # ties
    {"vocab": 2000, "kinds": ("plain", "bonus"), "most": 256, "special": ("-inf",)},  # too few holders for a bound
    # rows at odd addresses
    {"vocab": 20011, "pad": 2, "kinds": ("plain", "banned", "words", "penalty"), "most": 16, "special": ("-inf",)},
    {"vocab": 256206, "pad": 50, "kinds": ("plain", "everything"), "most": 256, "special": ("-inf",)},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def beam_candidates(
    gpu: GpuBackend,
    logits: int,
    counts: int,
    penalties: int,
    bans: int,
    bad_words: int,
    history: int,
    values: int,
    ids: int,
    flags: int,
    *,
    rows: int,
    vocab: int,
    stride: int,
    slot_count: int,
    words: int,
    word_room: int,
    capacity: int,
    most: int,
    adjust: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the choice of each row's best candidates among ``rows`` rows of logits, as the module says.

    ``logits`` is ``dtype``, ``[rows, vocab]`` with rows ``stride`` elements apart. ``counts`` (int32, ``[rows, 7]``)
    has the columns of `ROW_COLUMNS`, and ``penalties`` (float32, ``[rows]``) 1 where there is none. ``bans`` is uint32
    ``[slot_count, 2, words]``, bit ``i % 32`` of word ``i // 32`` for id ``i``, ``bad_words`` int32 ``[slot_count,
    word_room]`` (`metrale.ops.processing.encoded_words`), and ``history`` int32 ``[slot_count, capacity]``; a row looks
    at its own places, if it asks for what is there.

    ``values`` (float32) and ``ids`` (int32) are ``[rows, most]``: a row's ``k`` candidates, the best first, or all of a
    smaller vocabulary; what is left has minus infinity and id 0. ``flags`` is int32 ``[rows]``, 1 where the logits have
    a NaN or an infinity, else 0.

    ``adjust`` may be 0 when no row has a penalty, n-grams, bans or bad words: the launch then needs no shared memory
    for them.

    Raises
    ------
    ValueError
        When ``most`` is not from 1 to `MAX_CANDIDATES`, ``words`` is not ``vocab / 32``, rounded up, or the vocabulary
        is too large.
    """
    pointers = (logits, counts, penalties, bans, bad_words, history, values, ids, flags)
    sizes = (rows, vocab, stride, slot_count, words, word_room, capacity, most, int(adjust))
    OP.launch(gpu, dtype, (*pointers, *sizes), stream)
