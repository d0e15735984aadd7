# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tables of bad words: how they are written, and that a malformed one is refused."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_runtime.errors import InvalidPointer
from metrale.ops.processing import WORDS, Processors, encoded_words


def scores_with(table: list[int]) -> list[float]:
    """Return what a table leaves of ten scores of 0 after the ids 4, 5."""
    processors = Processors(
        "sample", np.zeros((1, 2, 1), np.uint32), np.array([table], np.int32).reshape(1, -1), np.array([[4, 5]])
    )
    scores = np.zeros(10, np.float32)
    processors.apply(scores, slot=0, rules=0, length=2, ngram=0, mode=WORDS, penalty=1.0)
    return scores.tolist()


def test_a_table_has_the_number_of_words_their_places_and_their_ids() -> None:
    table = encoded_words([(7, 8), (1, 2, 3), (7, 9)])
    assert table.tolist() == [3, 5, 7, 10, 12, 7, 8, 1, 2, 3, 7, 9]
    assert table.dtype == np.int32
    assert encoded_words([]).tolist() == [0, 2]


@pytest.mark.parametrize(
    "table", [[0], [0, 99, -99], [2, 4, 6, 8, 5, 0, 9, 1], [2, 4, 6, 8, 5, 0, 9, 1, -1, 99], [1, 3, 6, 4, 5, 0]]
)
def test_a_sound_table_is_taken_whatever_comes_after_it(table: list[int]) -> None:
    banned = 0.0 if table[0] == 0 or len(table) == 6 else -np.inf  # a word of three ids is longer than the history
    assert scores_with(table) == [banned, *[0.0] * 9]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([-1, 2], r"number of words: expected values in \[0, 1\), got -1 to -1"),
        ([1], r"number of words: expected values in \[0, 1\), got 1 to 1"),
        ([4, 0, 0, 0, 0], r"number of words: expected values in \[0, 4\), got 4 to 4"),
        ([1, 2, 4, 5, 0], r"places: expected values in \[3, 6\), got 2 to 4"),
        ([1, 3, 6, 5, 0], r"places: expected values in \[3, 6\), got 3 to 6"),
        ([2, 4, 7, 6, 5, 0, 1, 2], r"ids of a word: expected values in \[2, 8\), got -1 to 3"),
        ([1, 3, 4, 5, 0], r"ids of a word: expected values in \[2, 5\), got 1 to 1"),
        ([1, 3, 5, 5, 10], r"ids: expected values in \[0, 10\), got 5 to 10"),
        ([1, 3, 5, -1, 0], r"ids: expected values in \[0, 10\), got -1 to 0"),
    ],
)
def test_a_malformed_table_is_refused(table: list[int], message: str) -> None:
    with pytest.raises(InvalidPointer, match=f"^sample: bad_words: {message}$"):
        scores_with(table)


def test_a_table_without_room_has_no_words() -> None:
    assert scores_with([]) == [0.0] * 10
