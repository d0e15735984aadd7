# SPDX-License-Identifier: MIT OR Apache-2.0
"""The protocol that all systems share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metrale.bench import protocol
from metrale.bench.protocol import (
    EOS,
    FIRST_WORD,
    NEW_TOKENS,
    TOLERANCE,
    Lengths,
    difference,
    forced_ids,
    log_probabilities,
    measure,
    sources,
    timings,
)


def test_sources() -> None:
    few, many = sources(2, 32, 1000), sources(64, 32, 1000)
    assert few == many[:2], "the check's sources are the first of every batch"
    assert all(len(ids) == 32 and ids[0] == FIRST_WORD and ids[-1] == EOS for ids in many)
    words = [word for ids in many for word in ids[1:-1]]
    assert min(words) >= FIRST_WORD
    assert max(words) < 1000
    assert len(set(words)) > 500
    assert [len(ids) for ids in sources(3, 64, 1000)] == [64] * 3


def test_a_step_leaves_out_what_one_token_takes() -> None:
    found = timings(8, [10.0, 12.0, 50.0], [12.0 + 63 * 2.0, 12.0 + 63 * 3.0, 12.0 + 63 * 7.0])
    assert found["step_ms"] == {"median": 3.0, "min": 2.0, "max": 7.0, "n": 3}
    assert found["one_token_ms"]["median"] == 12.0
    assert found["tokens_per_s"] == pytest.approx(8 * 64 / 0.201, rel=1e-3)


def test_calls_are_warmed_up_before_they_are_timed() -> None:
    calls: list[int] = []
    found = measure(calls.append, 1, 4)
    assert calls == [NEW_TOKENS, NEW_TOKENS, 1] + 4 * [1] + 4 * [NEW_TOKENS]
    assert found["total_ms"]["n"] == 4


def test_difference() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3, 50))
    assert difference(rows, rows) == 0
    assert difference(np.zeros_like(rows), rows) == 1, "zeros pass under no tolerance"
    assert max(TOLERANCE.values()) < 1
    near = rows.copy()
    near[1, 2, 7] += 0.01 * np.abs(rows[1, 2]).max()
    assert difference(near, rows) == pytest.approx(0.01)
    near[0, 0, 0] = np.nan
    assert difference(near, rows) == math.inf


def test_log_probabilities() -> None:
    logits = np.log(np.array([[[1.0, 3.0], [9.0, 1.0]]]))
    assert np.allclose(np.exp(log_probabilities(logits, [[1, 0]])), [[0.75, 0.9]])


def test_forced_ids_are_words() -> None:
    ids = forced_ids(100)
    assert len(ids) == protocol.CHECK_SOURCES
    assert ids[0] != ids[1]
    assert all(len(one) == protocol.CHECK_STEPS and min(one) >= FIRST_WORD and max(one) < 100 for one in ids)


def test_other_lengths() -> None:
    found = timings(2, [10.0], [10.0 + 4 * 2.5], 5)
    assert found["step_ms"]["median"] == 2.5
    assert found["tokens_per_s"] == 500.0
    assert timings(2, [10.0], [10.0], 1)["step_ms"] is None, "after the only token there is no step"
    calls: list[int] = []
    measure(calls.append, 1, 5, 7)
    assert calls == [7, 7, 1] + 5 * [1] + 5 * [7]


@pytest.mark.parametrize(
    ("new", "half_way", "steps"), [(64, 32, 5), (500, 250, 5), (9, 4, 4), (3, 1, 1), (2, 1, 0), (1, 0, 0)]
)
def test_steps_half_way_are_within_what_is_put_out(new: int, half_way: int, steps: int) -> None:
    lengths = Lengths(8, new)
    assert (lengths.half_way, lengths.device_steps(5)) == (half_way, steps)
    assert Lengths().device_steps(1000) == protocol.DEVICE_STEPS
