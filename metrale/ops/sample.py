# SPDX-License-Identifier: MIT OR Apache-2.0
"""The next id of each row: logits processed as transformers does it, in its order, and then the largest or a draw.

All in float32, row by row, whatever the neighbours are. Let ``x`` be the row's logits, NaN as minus infinity.

1. Repetition penalty, n-grams, bans and bad words, as `metrale.ops.processing` says.
2. Minus infinity for ``mask0`` and ``mask1``. When nothing is left, the id is 0 and the flag 2 is set.
3. ``temperature`` 0: the largest, the lowest id of a tie. Otherwise the row's scores are ``(x - max x) / temperature``,
   infinity counting as the largest finite number.
4. Top-k keeps scores from the k-th largest up, ties included. Top-p weighs an id with ``floor(2**40 * exp(score))``, 0
   where top-k did not keep it, and keeps it when the sum of the weights of strictly larger scores is below
   ``max(1, floor(sum of all * p))``, ``p`` cut to a multiple of ``2**-32``: sums of integers, the same in any order.
   Min-p keeps scores of at least ``log(min_p)``. The largest is always kept.
5. The draw is the largest ``score + noise`` of what is kept, the lowest id of a tie (Gumbel-max). Noise depends on the
   seed, the length and the id alone: word ``id % 4`` of Philox4x32-10 (Salmon et al. 2011) with the seed as key and the
   counter ``(id // 4, length, 0, 0)`` gives ``v = (word + 0.5) * 2**-32``, at most ``1 - 2**-24``, and the noise is
   ``-log(-log1p(-v))``.

Where an id is ``forced``, it is chosen whatever the logits are, and none of this is done.

With ``greedy``, a launch promises that every row's id is forced or that of its largest logit: no row has a temperature,
a mask, or anything of `metrale.ops.processing`. Several blocks share a row then. The results are the same.

The log-probability is that of the logits as they were given. ``exp`` and ``log`` may differ in the last bit from one
device to another, so that a draw may differ where two ids are as close as that.
"""

from __future__ import annotations

from typing import Any, Final

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY, Dims, Inputs, LaunchPlan, Op, OpSpec, Tolerance, scalar, tensor
from gpu_runtime.streams import StreamLike
from metrale.ops import inputs, row_parts
from metrale.ops.argmax import choose, spoil
from metrale.ops.drawing import kept, noise, scaled
from metrale.ops.processing import BANNED, SUPPRESS, WORDS, Processors, adjusts, bitmap_bytes

Array = np.ndarray[Any, np.dtype[Any]]

COUNT_COLUMNS: Final = ("slot", "length", "top_k", "ngram", "mode", "mask0", "mask1", "cell", "forced")
"""Columns of ``counts``: the row's place in ``bans``, ``bad_words`` and ``history``; how many ids its history has;
scores that top-k keeps, 0 for all; size of n-grams that may not repeat, 0 for any may; bits, those of
`metrale.ops.processing` and as below; two ids that may not be chosen, -1 for none; where in ``cells`` the id goes, -1
for nowhere; the id that is chosen whatever the logits are, -1 for none."""

SETTING_COLUMNS: Final = ("temperature", "top_p", "min_p", "penalty")
"""Columns of ``settings``. A top-p of 1, a min-p of 0 and a penalty of 1 change nothing."""

_PENALTY: Final = SETTING_COLUMNS.index("penalty")

KEEP: Final = 4
"""Mode: the id is written to ``history[slot, length]``, if there is room."""
LOGPROB: Final = 8
"""Mode: the log-probability is computed; without it, it is 0."""

NOT_FINITE: Final = 1
"""Flag: the row's logits have a NaN or an infinity."""
NOTHING_LEFT: Final = 2
"""Flag: there was nothing that could be chosen."""

MOST_VOCAB: Final = 1 << 23
"""Most ids: the sum of their weights, 2**40 each, must fit in 64 bits."""

THREADS: Final = 1024
STATIC_SHARED: Final = 20 * 1024
"""Bytes of shared memory that the kernel has of its own, at most; a test holds it against what the compiler says."""

SPEC: Final = OpSpec(
    name="sample",
    args=(
        tensor("logits", "in", "T", "rows", "vocab", row_stride="stride"),
        tensor("counts", "in", "i32", "rows", len(COUNT_COLUMNS)),
        tensor("settings", "in", "f32", "rows", len(SETTING_COLUMNS)),
        tensor("seeds", "in", "u64", "rows"),
        tensor("bans", "in", "u32", "slot_count", 2, "words"),
        tensor("bad_words", "in", "i32", "slot_count", "word_room"),
        tensor("history", "inout", "i32", "slot_count", "capacity"),
        tensor("cells", "inout", "i32", "cell_count"),
        tensor("ids", "out", "i32", "rows"),
        tensor("logprobs", "out", "f32", "rows"),
        tensor("flags", "out", "i32", "rows"),
        *row_parts.ARGS,
        scalar("rows", "i32"),
        scalar("vocab", "i32"),
        scalar("stride", "i64"),
        scalar("slot_count", "i32"),
        scalar("words", "i32"),
        scalar("word_room", "i32"),
        scalar("capacity", "i32"),
        scalar("cell_count", "i32"),
        scalar("adjust", "i32"),
        scalar("greedy", "i32"),
    ),
    # Integers are exact, and at 1e-6 of 256,205 one id is not taken for the next. The sum of a log-probability is one
    # of float32 for every element type, as `top_k` has it.
    tolerance=Tolerance(f32=1e-6, f16=1e-6, bf16=1e-6),
    variants=("greedy",),
)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block of 1,024 threads a row; with ``adjust``, shared memory for two bitmaps of the vocabulary. With
    ``greedy``, as `row_parts.plan` has it.

    Raises
    ------
    ValueError
        When ``words`` is not what the vocabulary takes, or it has too many ids, for the bitmaps or altogether; or with
        both ``adjust`` and ``greedy``.
    """
    if dims["vocab"] > MOST_VOCAB:
        raise ValueError(f"sample: vocab: expected at most {MOST_VOCAB} ids, got {dims['vocab']}")
    shared = bitmap_bytes(SPEC.name, dims, limits, STATIC_SHARED)
    if dims["greedy"]:
        if dims["adjust"]:
            raise ValueError("sample: adjust: expected 0 with greedy, got 1")
        return row_parts.plan(SPEC.entry(dtype, "greedy"), dims, dtype, limits)
    return LaunchPlan(SPEC.entry(dtype), (dims["rows"], 1, 1), (THREADS, 1, 1), shared)


def reference(
    *,
    logits: Array,
    counts: Array,
    settings: Array,
    seeds: Array,
    bans: Array,
    bad_words: Array,
    history: Array,
    cells: Array,
    ids: Array,
    logprobs: Array,
    flags: Array,
    parts: Array,
    arrivals: Array,
    rows: int,
    vocab: int,
    stride: int,
    slot_count: int,
    words: int,
    word_room: int,
    capacity: int,
    cell_count: int,
    adjust: int,
    greedy: int,
) -> None:
    """All rows as `argmax` does; then one by one those that ask for more.

    A slot, a cell, a length, a table or an id that is out of range is an error; on a GPU it might be an access out of
    bounds. So is a row that asks for more with ``greedy``, where a GPU would pass over that.
    """
    column = dict(zip(COUNT_COLUMNS, counts.T, strict=True))
    mode, forced = column["mode"], column["forced"]
    processors = Processors(SPEC.name, bans, bad_words, history)
    processors.check({**column, "penalty": settings[:, _PENALTY]}, adjust, needs_slot=mode & KEEP != 0)
    for name, after in (("mask0", vocab), ("mask1", vocab), ("cell", cell_count), ("forced", vocab)):
        processors.in_range(name, column[name], -1, after)

    asks = adjusts(column["ngram"], mode, settings[:, _PENALTY]) | (settings[:, 0] > 0)
    asks, free = asks | (column["mask0"] >= 0) | (column["mask1"] >= 0), forced < 0
    if greedy and (asks & free).any():
        row = (asks & free).argmax()
        raise ValueError(f"sample: greedy: expected 0, as row {row} asks for more than its largest logit")
    row_parts.arrive(SPEC.name, arrivals)
    choose(logits, ids, flags)
    for row in ((asks | (flags != 0)) & free).nonzero()[0]:
        scores = _processed(logits[row], counts[row], settings[row, _PENALTY], processors)
        ids[row] = _choose(scores, counts[row], settings[row], seeds[row])
        if scores.max() == -np.inf:
            flags[row] |= NOTHING_LEFT
    ids[forced >= 0] = forced[forced >= 0]

    logprobs.fill(0)
    scored = (mode & LOGPROB).nonzero()[0]
    if scored.size:
        logprobs[scored] = _logprobs(logits[scored], ids[scored])
    keep(counts, ids, history, cells)


def keep(counts: Array, ids: Array, history: Array, cells: Array) -> None:
    """Put each row's id where its row of ``counts`` says, in a reference that has checked them."""
    column = dict(zip(COUNT_COLUMNS, counts.T, strict=True))
    slot, length, cell = (column[name] for name in ("slot", "length", "cell"))
    keeps = (column["mode"] & KEEP != 0) & (length < history.shape[1])
    history[slot[keeps], length[keeps]] = ids[keeps]
    celled = cell >= 0
    cells[cell[celled]] = ids[celled]


def _processed(logits: Array, counts: Array, penalty: Any, processors: Processors) -> Array:
    """Return a row's logits after all processors and masks: float32 ``[vocab]``."""
    slot, length, _, ngram, mode, mask0, mask1, _, _ = counts.tolist()
    scores = np.fmax(logits.astype(np.float32), np.float32(-np.inf))  # NaN is less than everything else
    processors.apply(scores, slot=slot, rules=slot, length=length, ngram=ngram, mode=mode, penalty=penalty)
    scores[[mask for mask in (mask0, mask1) if mask >= 0]] = -np.inf
    return scores


def _choose(processed: Array, counts: Array, settings: Array, seed: Any) -> int:
    """Return the id that is chosen among processed logits, 0 when there is none to choose."""
    best = int(processed.argmax())
    if processed[best] == -np.inf or not settings[0] > 0:
        return best
    scores = scaled(processed, settings[0])
    ids = kept(scores, int(counts[2]), settings[1], settings[2])
    return int(ids[(scores[ids] + noise(int(seed), int(counts[1]), ids)).argmax()])


def _logprobs(logits: Array, ids: Array) -> Array:
    """Return the log-softmax of each row at its id, which is not finite when the row's largest is not."""
    values = np.fmax(logits.astype(np.float32), np.float32(-np.inf))
    largest = values.max(axis=1)
    chosen = values[np.arange(len(ids)), ids]
    values -= largest[:, None]
    return np.asarray(chosen - largest - np.log(np.exp(values, out=values).sum(axis=1)))


ROWS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "score": {"mode": LOGPROB},
    "warm": {"temperature": 1.0, "mode": LOGPROB},
    "hot": {"temperature": 4.0},
    "cold": {"temperature": 0.01},
    "top-k": {"temperature": 0.7, "top_k": 5},
    "top-k 1": {"temperature": 2.0, "top_k": 1},
    "top-k all": {"temperature": 2.0, "top_k": 1 << 20},
    "top-k most": {"temperature": 3.0, "top_k": 0.8},  # of the vocabulary
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "top-p 0": {"temperature": 1.3, "top_p": 0.0},
    "top-p half": {"temperature": 1.0, "top_p": 0.5},
    "top-p most": {"temperature": 3.0, "top_p": 0.99},
    "min-p": {"temperature": 1.1, "min_p": 0.3},
    "min-p 2": {"temperature": 1.1, "min_p": 2.0},
    "top-k top-p": {"temperature": 2.5, "top_k": 20, "top_p": 0.6},
    "penalty": {"penalty": 1.6180339},  # a ratio of no two 16-bit logits, so that no rounding makes a tie
    "bonus": {"penalty": 0.6180339, "temperature": 0.5},
    "1-gram": {"ngram": 1},
    "2-gram": {"ngram": 2, "temperature": 0.4},
    "3-gram": {"ngram": 3},
    "4-gram": {"ngram": 4},
    "9-gram": {"ngram": 9},
    "banned": {"mode": BANNED},
    "suppressed": {"mode": SUPPRESS | KEEP},
    "all banned": {"mode": BANNED | KEEP | LOGPROB},
    "words": {"mode": WORDS},
    "words, warm": {"mode": WORDS | KEEP, "temperature": 0.8},
    "forced": {"forced": 11, "mode": LOGPROB | KEEP},
    "forced, all banned": {"forced": 0, "mode": BANNED | LOGPROB, "penalty": 2.0, "temperature": 0.5},
    "masked": {"masks": (0, 1), "mode": KEEP},
    "masked one": {"masks": (-1, 0)},
    "everything": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "penalty": 1.3,
        "ngram": 3,
        "mode": BANNED | SUPPRESS | WORDS | KEEP | LOGPROB,
        "masks": (4, -1),
    },
}
"""Kinds of rows for tests: what differs from a greedy row. ``masks`` are places in the
order of the logits."""


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    vocab: int,
    kinds: tuple[str, ...],
    pad: int = 0,
    length: int = 20,
    mean: float = 0.0,
    levels: int = 0,
    special: tuple[str, ...] = (),
    adjust: int = 1,
    greedy: int = 0,
) -> Inputs:
    """``kinds`` are names of `ROWS`, a row each; ``levels`` leaves so many different logits, so that most are tied;
    ``special`` is as `spoil` takes it. Bans, n-grams, and what a row may not look at, concern its largest logits.

    Draws have margins, so that errors of some units in the last place of ``exp`` and ``log`` change no id: `_seed`.
    """
    rows, words = len(kinds), -(-vocab // 32)
    logits = inputs.normal(rng, (rows, vocab + pad), dtype, mean=mean, std=2)
    if levels:
        logits[:, :vocab] = mean + rng.integers(0, levels, (rows, vocab))
    spoil(rng, logits[:, :vocab], special)
    logits[:, vocab:] = np.inf  # padding must not be looked at
    settings = np.tile(np.array([0, 1, 0, 1], np.float32), (rows, 1))
    counts = np.zeros((rows, len(COUNT_COLUMNS)), np.int32)
    seeds = np.zeros(rows, np.uint64)
    slots, places = rng.permutation(rows + 1), rng.permutation(rows + 2)
    lengths = [max(length - row // 2, 0) for row in range(rows)]  # the first two have no room for more
    best = [inputs.ranked(row[:vocab]) for row in logits]
    bans, bad_words, history = inputs.slot_tables(rng, best, slots, lengths, length, vocab)
    processors = Processors(SPEC.name, bans, bad_words, history)
    for row, kind in enumerate(kinds):
        asked, ids = ROWS[kind], best[row]
        if "all banned" in kind:
            bans[slots[row], 0] = 0xFFFFFFFF
        top_k = asked.get("top_k", 0)
        top_k = int(top_k * vocab) if isinstance(top_k, float) else top_k
        masks = [-1 if place < 0 else ids[place] for place in asked.get("masks", (-1, -1))]
        counts[row, :5] = slots[row], lengths[row], top_k, asked.get("ngram", 0), asked.get("mode", 0)
        counts[row, 5:] = *masks, places[row] if row else -1, asked.get("forced", -1)
        settings[row] = [asked.get(name, off) for name, off in zip(SETTING_COLUMNS, settings[row], strict=True)]
        processed = _processed(logits[row, :vocab], counts[row], settings[row, _PENALTY], processors)
        seeds[row] = _seed(rng, processed, counts[row], settings[row])
    return {
        "logits": logits,
        "counts": counts,
        "settings": settings,
        "seeds": seeds,
        "bans": bans,
        "bad_words": bad_words,
        "history": history,
        "cells": inputs.output((rows + 2,), "i32"),
        "ids": inputs.output((rows,), "i32"),
        "logprobs": inputs.output((rows,), "f32"),
        "flags": inputs.output((rows,), "i32"),
        **row_parts.make_inputs(rng, rows),
        "rows": rows,
        "vocab": vocab,
        "stride": vocab + pad,
        "slot_count": rows + 1,
        "words": words,
        "word_room": bad_words.shape[1],
        "capacity": length,
        "cell_count": rows + 2,
        "adjust": adjust,
        "greedy": greedy,
    }


_FACTORS: Final = np.array([1 - 1e-4, 1, 1 + 1e-4], np.float32)


def _seed(rng: np.random.Generator, processed: Array, counts: Array, settings: Array) -> Any:
    """Return a seed with which the best total of a drawing row is ahead of the next by 1e-3, and is the same one when
    top-p and min-p are 1e-4 of themselves smaller or larger."""
    seed = rng.integers(0, 1 << 64, dtype=np.uint64)
    if not settings[0] > 0 or processed.max() == -np.inf:
        return seed
    scores = scaled(processed, settings[0])
    top_k, (top_p, min_p) = int(counts[2]), settings[1:3]
    keeps = [kept(scores, top_k, top_p * factor, min_p * factor) for factor in _FACTORS]
    while True:
        totals = [scores[ids] + noise(int(seed), int(counts[1]), ids) for ids in keeps]
        chosen = {int(ids[total.argmax()]) for ids, total in zip(keeps, totals, strict=True)}
        ahead = [total.max() - np.partition(total, -2)[-2] for total in totals if total.size > 1]
        if len(chosen) == 1 and min(ahead, default=1.0) > 1e-3:
            return seed
        seed = rng.integers(0, 1 << 64, dtype=np.uint64)


# Each has a row with a flag, and ids that are not 0: an all-zero result must not pass for them.
CASES: Final = (
    {"vocab": 97, "pad": 31, "kinds": tuple(ROWS), "special": ("nan",)},
    {"vocab": 33, "kinds": tuple(ROWS), "special": ("-inf",), "levels": 3},
    {"vocab": 33, "kinds": tuple(ROWS)[::-1], "special": ("-inf",), "length": 3, "mean": -9.0},
    {"vocab": 33, "kinds": ("bonus", "bonus", "score"), "special": ("-inf",), "length": 1, "mean": -9.0},
    {"vocab": 33, "kinds": (*["words"] * 8, "score"), "special": ("-inf",), "length": 4},
    {"vocab": 303, "pad": 17, "kinds": ("score",) * 8, "special": inputs.SPECIALS},
    {"vocab": 303, "pad": 1, "kinds": ("warm",) * 8, "special": inputs.SPECIALS},
    {"vocab": 303, "kinds": ("everything",) * 8, "special": inputs.SPECIALS},
    {"vocab": 303, "kinds": ("forced",) * 8, "special": inputs.SPECIALS, "adjust": 0},
    {"vocab": 8240, "kinds": ("greedy", "score", "masked", "warm", "top-k", "top-p"), "adjust": 0, "special": ("inf",)},
    {"vocab": 8240, "kinds": tuple(ROWS), "length": 300, "special": ("-inf",)},
    {"vocab": 8240, "kinds": tuple(ROWS), "levels": 4, "special": ("nan",)},  # ties at every bound
    {"vocab": 303, "pad": 17, "kinds": ("score", "forced") * 4, "special": inputs.SPECIALS, "adjust": 0, "greedy": 1},
    {"vocab": 33, "kinds": ("greedy", "forced", "score"), "special": ("nan",), "levels": 3, "adjust": 0, "greedy": 1},
    {"vocab": 8240, "kinds": ("forced", "score", "greedy"), "special": ("inf",), "adjust": 0, "greedy": 1},
    {"vocab": 140007, "pad": 1, "kinds": ("score", "greedy"), "special": ("-inf",), "adjust": 0, "greedy": 1},
    # rows at odd addresses
    {"vocab": 20011, "pad": 2, "kinds": ("score", "forced"), "special": ("-inf",), "adjust": 0, "greedy": 1},
    {"vocab": 20011, "pad": 2, "kinds": ("masked", "hot", "top-k most", "penalty", "score"), "special": ("-inf",)},
    # sums of many weights, each less than 2**32
    {"vocab": 256206, "pad": 50, "kinds": ("score", "everything", "hot", *["top-p half"] * 3), "special": ("-inf",)},
)

OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def sample(
    gpu: GpuBackend,
    logits: int,
    counts: int,
    settings: int,
    seeds: int,
    bans: int,
    bad_words: int,
    history: int,
    cells: int,
    ids: int,
    logprobs: int,
    flags: int,
    parts: int,
    arrivals: int,
    *,
    rows: int,
    vocab: int,
    stride: int,
    slot_count: int,
    words: int,
    word_room: int,
    capacity: int,
    cell_count: int,
    adjust: int,
    greedy: int,
    dtype: str,
    stream: StreamLike = 0,
) -> None:
    """Enqueue the choice of an id for each of ``rows`` rows of logits, as the module says.

    ``logits`` is ``dtype``, ``[rows, vocab]`` with rows ``stride`` elements apart. ``counts`` (int32, ``[rows, 9]``)
    and ``settings`` (float32, ``[rows, 4]``) have the columns of `COUNT_COLUMNS` and `SETTING_COLUMNS`, ``seeds`` is
    uint64 ``[rows]``. ``bans`` is uint32 ``[slot_count, 2, words]``, bit ``i % 32`` of word ``i // 32`` for id ``i``,
    ``bad_words`` int32 ``[slot_count, word_room]`` (`metrale.ops.processing.encoded_words`), and ``history`` int32
    ``[slot_count, capacity]``; a row looks at its own slot, if it asks for what is there.

    The id goes to ``ids`` (int32, ``[rows]``), always one of the vocabulary; to ``cells[cell]`` (int32,
    ``[cell_count]``); and, with `KEEP`, to ``history[slot, length]``, which no other row of the launch may use.
    ``logprobs`` (float32) and ``flags`` (int32, of `NOT_FINITE` and `NOTHING_LEFT`) are ``[rows]``. A log-probability
    is not finite where a row's largest logit is not.

    ``parts`` and ``arrivals`` are as for `argmax`.

    ``adjust`` may be 0 when no row has a penalty, n-grams, bans or bad words: the launch then needs no shared memory
    for them. ``greedy`` may be 1 when, besides, no row has a temperature or a mask: it is faster then.

    Raises
    ------
    ValueError
        When ``words`` is not ``vocab / 32``, rounded up, the vocabulary is too large, or both ``adjust`` and ``greedy``
        are given.
    """
    outputs = (history, cells, ids, logprobs, flags, parts, arrivals)
    pointers = (logits, counts, settings, seeds, bans, bad_words, *outputs)
    sizes = (rows, vocab, stride, slot_count, words, word_room, capacity, cell_count, int(adjust), int(greedy))
    OP.launch(gpu, dtype, (*pointers, *sizes), stream)
