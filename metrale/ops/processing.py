# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is done to the scores of a row before ids are chosen, in NumPy: penalty, n-grams, bans and bad words.

The steps and their order are those of transformers. Scores are logits, or log-probabilities in a beam search.

1. Repetition penalty: where an id stands in the row's history, ``x / penalty`` if ``x > 0``, else ``x * penalty``.
2. Minus infinity for ids that would complete an n-gram that the history has already; for those in the planes of
   ``bans`` that ``mode`` names; and, with `WORDS`, for the last id of a bad word whose other ids the history ends in. A
   word that has more ids than the history bans nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import Dims

Array = np.ndarray[Any, np.dtype[Any]]

BANNED: Final = 1
"""Mode: ids in plane 0 of the slot's bans may not be chosen."""
SUPPRESS: Final = 2
"""Mode: ids in plane 1 of the slot's bans may not be chosen."""
WORDS: Final = 16
"""Mode: the slot's bad words may not be completed."""

LEAST_WORD: Final = 2
"""Ids of the shortest bad word: one of a single id is a ban."""


def remembers(ngram: Array, mode: Array, penalty: Array) -> Array:
    """Return which rows depend on their history: bool ``[rows]``."""
    return np.asarray((penalty != 1) | (ngram > 0) | (mode & WORDS != 0))


def adjusts(ngram: Array, mode: Array, penalty: Array) -> Array:
    """Return which rows have any of this done to them, so that the launch must ``adjust``: bool ``[rows]``."""
    return np.asarray(remembers(ngram, mode, penalty) | (mode & (BANNED | SUPPRESS) != 0))


def encoded_words(words: Sequence[Sequence[int]]) -> Array:
    """Return a slot's table of bad words, int32: their number ``n``, ``n + 1`` places in the table, and their ids.

    The ids of word ``i`` are those from place ``i`` to place ``i + 1``.
    """
    first = len(words) + 2
    places = np.cumsum([first, *map(len, words)])
    return np.array([len(words), *places, *(token for word in words for token in word)], dtype=np.int32)


def bitmap_bytes(op: str, dims: Dims, limits: Limits, static_shared: int) -> int:
    """Return the dynamic shared memory of a block that adjusts: a bit for each id, twice. 0 without ``adjust``.

    Raises
    ------
    ValueError
        When ``words`` is not what the vocabulary takes, or there is not so much memory beside ``static_shared`` bytes.
    """
    vocab, words = dims["vocab"], -(-dims["vocab"] // 32)
    if dims["words"] != words:
        raise ValueError(f"{op}: words: expected {words}, a bit for each of {vocab} ids, got {dims['words']}")
    shared = 2 * 4 * words if dims["adjust"] else 0
    room = limits.max_shared_bytes - static_shared
    if shared > room:
        raise ValueError(f"{op}: vocab: expected at most {room // 8 * 32} ids to adjust on this device, got {vocab}")
    return shared


def in_range(op: str, name: str, values: Array, low: int, after: int) -> None:
    """Raise InvalidPointer when one of the values is not in ``[low, after)``."""
    if values.size and not low <= values.min() <= values.max() < after:
        got = f"{values.min()} to {values.max()}"
        raise InvalidPointer(f"{op}: {name}: expected values in [{low}, {after}), got {got}")


@dataclass(frozen=True, slots=True)
class Processors:
    """The steps above for the rows of one launch, whose arguments are checked as a GPU would not.

    Attributes
    ----------
    op : str
        For the errors.
    bans : ndarray
        uint32 ``[slot_count, 2, words]``, bit ``i % 32`` of word ``i // 32`` for id ``i``.
    bad_words : ndarray
        int32 ``[slot_count, word_room]``: a table of `encoded_words` each, and anything after it.
    history : ndarray
        int32 ``[slot_count, capacity]``.
    """

    op: str
    bans: Array
    bad_words: Array
    history: Array

    def check(self, columns: Mapping[str, Array], adjust: int, needs_slot: Array | bool = False) -> None:
        """Check the columns of a launch: "slot", "rules" (if there), "length", "ngram", "mode" and "penalty".

        Raises
        ------
        InvalidPointer
            When a length is negative, or a row that uses a table (or ``needs_slot``) has no place in it.
        ValueError
            When a row must be adjusted and ``adjust`` is 0.
        """
        asked = columns["ngram"], columns["mode"], columns["penalty"]
        adjusted, (slots, capacity) = adjusts(*asked), self.history.shape
        self.in_range("length", columns["length"], 0, 1 << 31)
        for name in ("slot", "rules"):
            if name in columns:
                self.in_range(name, columns[name][adjusted | needs_slot], 0, slots)
        self.in_range("length", columns["length"][remembers(*asked)], 0, capacity + 1)
        if not adjust and adjusted.any():
            row = adjusted.argmax()
            raise ValueError(f"{self.op}: adjust: expected 1, as row {row} has penalty, n-grams, bans or words")

    def in_range(self, name: str, values: Array, low: int, after: int) -> None:
        """`in_range` of the op."""
        in_range(self.op, name, values, low, after)

    def apply(self, scores: Array, *, slot: int, rules: int, length: int, ngram: int, mode: int, penalty: Any) -> None:
        """Process a row's scores, float32 ``[vocab]``, in place: the history is ``slot``'s, the rest ``rules``'."""
        if penalty != 1 or ngram > 0 or mode & WORDS:
            past = self.history[slot, :length]
            self.in_range("history", past, 0, scores.size)
            if penalty != 1:
                found = scores[past]
                scores[past] = np.where(found > 0, found / penalty, found * penalty)
            if 0 < ngram <= length:
                grams = np.lib.stride_tricks.sliding_window_view(past, ngram)
                scores[past[ngram - 1 :][(grams[:, :-1] == past[length - ngram + 1 :]).all(axis=1)]] = -np.inf
            if mode & WORDS:
                for word in self._words(rules, scores.size):
                    if word.size <= length and np.array_equal(word[:-1], past[length - word.size + 1 :]):
                        scores[word[-1]] = -np.inf
        for plane, bit in enumerate((BANNED, SUPPRESS)):
            if mode & bit:
                octets = self.bans[rules, plane].astype("<u4").view(np.uint8)
                scores[np.unpackbits(octets, count=scores.size, bitorder="little").view(np.bool_)] = -np.inf

    def _words(self, slot: int, vocab: int) -> list[Array]:
        """Return the bad words of a slot, whose table is checked."""
        table = self.bad_words[slot]
        self.in_range("bad_words: number of words", table[:1], 0, max(table.size - 1, 1))
        count = int(table[0]) if table.size else 0
        if not count:
            return []
        places = table[1 : count + 2]
        self.in_range("bad_words: places", places, count + 2, table.size + 1)
        self.in_range("bad_words: ids of a word", np.diff(places), LEAST_WORD, table.size)
        self.in_range("bad_words: ids", table[places[0] : places[-1]], 0, vocab)
        return [table[start:end] for start, end in pairwise(places.tolist())]
