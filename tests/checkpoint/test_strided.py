# SPDX-License-Identifier: MIT OR Apache-2.0
"""Strided views against NumPy's own, with how much is read, and every bound that they may not cross."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from metrale.checkpoint import strided
from metrale.checkpoint.strided import MAX_DIMENSIONS, ReadRun, Strided

F32 = np.dtype(np.float32)


class Flat:
    """A row of elements that notes what is read of it, and refuses what is outside."""

    def __init__(self, count: int) -> None:
        self.values = np.arange(count, dtype=F32)
        self.runs: list[tuple[int, int]] = []

    def read(self, first: int, out: NDArray[Any]) -> None:
        assert out.ndim == 1
        assert out.flags.c_contiguous
        assert 0 <= first <= first + len(out) <= len(self.values)
        self.runs.append((first, len(out)))
        out[:] = self.values[first : first + len(out)]


def read_rows(view: Strided, start: int, stop: int, dtype: np.dtype[Any], run: ReadRun) -> NDArray[Any]:
    """Read whole rows; a scalar is one."""
    out: NDArray[Any] = np.empty((stop - start, *view.shape[1:]) if view.shape else (), dtype)
    strided.read(view, start * math.prod(view.shape[1:]), out.reshape(-1), run)
    return out


def expected(flat: Flat, view: Strided) -> NDArray[Any]:
    steps = [4 * stride if extent > 1 else 0 for extent, stride in zip(view.shape, view.strides, strict=True)]
    return as_strided(flat.values[view.offset :], view.shape, steps, writeable=False)


VIEWS = {
    "contiguous": Strided(0, (6, 4, 2), (8, 2, 1)),
    "behind an offset": Strided(13, (3, 5), (5, 1)),
    "transposed": Strided(2, (9, 7), (1, 9)),
    "permuted": Strided(1, (3, 4, 5), (1, 15, 3)),
    "columns of a matrix": Strided(3, (6, 2), (9, 3)),
    "one row again and again": Strided(5, (6, 4), (0, 1)),
    "one element": Strided(7, (5, 3), (0, 0)),
    "overlapping windows": Strided(0, (20, 8), (1, 1)),
    "ones with strides of no matter": Strided(4, (1, 6, 1), (999, 1, 1 << 62)),
    "a one with a huge stride": Strided(4, (1, 3, 2), (1 << 62, 2, 9)),
    "far apart": Strided(0, (3, 3), (30, 14)),
    "to the last element": Strided(98, (2, 1), (1, 50)),
}


@pytest.mark.parametrize("gap", [0, 4, 40, 1 << 20])
@pytest.mark.parametrize("name", VIEWS)
def test_every_range_of_rows_is_what_numpy_has(name: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_GAP_BYTES", gap)
    view, flat = VIEWS[name], Flat(100)
    assert view.problem(100) is None
    whole = expected(flat, view)
    for start in range(view.shape[0] + 1):
        for stop in range(start, view.shape[0] + 1):
            rows = read_rows(view, start, stop, F32, flat.read)
            assert rows.flags.c_contiguous
            np.testing.assert_array_equal(rows, whole[start:stop], strict=True)


@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
@pytest.mark.parametrize("name", VIEWS)
def test_every_range_of_elements(name: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges begin and end in the middle of rows, at every depth."""
    monkeypatch.setattr(strided, "_GAP_BYTES", gap)
    view, flat = VIEWS[name], Flat(100)
    whole = expected(flat, view).reshape(-1)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1, 1 if len(whole) < 40 else 7):
            out = np.empty(stop - start, F32)
            strided.read(view, start, out, flat.read)
            np.testing.assert_array_equal(out, whole[start:stop])


@pytest.mark.parametrize(
    ("name", "at_once"), [("contiguous", True), ("ones with strides of no matter", True), ("transposed", False)]
)
def test_what_is_contiguous_is_read_straight_into_the_result(name: str, at_once: bool) -> None:
    flat, into = Flat(100), []

    def read(first: int, out: NDArray[Any]) -> None:
        into.append(out)
        flat.read(first, out)

    rows = read_rows(VIEWS[name], 0, VIEWS[name].shape[0], F32, read)
    assert [np.shares_memory(rows, out) for out in into] == [at_once]


def test_rows_with_gaps_are_read_straight_into_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_GAP_BYTES", 0)
    flat, into = Flat(100), []

    def read(first: int, out: NDArray[Any]) -> None:
        into.append(out)
        flat.read(first, out)

    rows = read_rows(Strided(5, (3, 20), (30, 1)), 0, 3, F32, read)
    assert flat.runs == [(5, 20), (35, 20), (65, 20)]
    assert all(np.shares_memory(rows, out) for out in into)


def test_random_views(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    seen = 0
    for _ in range(600):
        monkeypatch.setattr(strided, "_GAP_BYTES", int(random.integers(0, 200)))
        shape = tuple(int(n) for n in random.integers(0, 5, random.integers(0, 5)))
        strides = tuple(int(n) for n in random.integers(0, 20, len(shape)))
        view, flat = Strided(int(random.integers(0, 30)), shape, strides), Flat(100)
        if view.problem(100) is not None:
            continue
        seen += bool(np.prod(shape))
        rows = shape[0] if shape else 1
        start = int(random.integers(0, rows + 1)) if shape else 0
        got = read_rows(view, start, rows, F32, flat.read)
        np.testing.assert_array_equal(got, expected(flat, view)[start:] if shape else expected(flat, view), strict=True)
    assert seen > 200


def test_what_is_read_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a transposed matrix lie all over the storage: their columns are read, and not what is between them."""
    monkeypatch.setattr(strided, "_GAP_BYTES", 64)
    flat = Flat(40_000)
    view = Strided(0, (200, 200), (1, 200))
    np.testing.assert_array_equal(read_rows(view, 50, 150, F32, flat.read), expected(flat, view)[50:150])
    assert max(count for _, count in flat.runs) <= 100
    assert sum(count for _, count in flat.runs) == 100 * 200
    flat.runs.clear()
    read_rows(Strided(0, (200, 200), (200, 1)), 50, 150, F32, flat.read)
    assert flat.runs == [(10_000, 20_000)]  # rows of a contiguous one are one run
    flat.runs.clear()
    read_rows(Strided(0, (2, 64), (10_000, 1)), 0, 2, F32, flat.read)
    assert flat.runs == [(0, 64), (10_000, 64)]  # halved where the elements are far apart
    flat.runs.clear()
    read_rows(Strided(9, (100, 100), (0, 0)), 0, 100, F32, flat.read)
    assert flat.runs == [(9, 1)]


BIG = (1 << 63) - 1
WRONG = {
    "one element too many": (Strided(1, (10, 10), (10, 1)), "elements up to 101 of a storage of 100"),
    "behind the end": (Strided(100, (1,), (1,)), "elements up to 101"),
    "a scalar behind the end": (Strided(100, (), ()), "elements up to 101"),
    "strides that reach too far": (Strided(0, (2, 2), (99, 1)), "elements up to 101"),
    "a huge stride": (Strided(0, (2,), (BIG,)), "elements up to"),
    "a huge dimension": (Strided(0, (BIG,), (1,)), "elements up to"),
    "huge both": (Strided(BIG, (BIG, BIG), (BIG, BIG)), "elements up to"),
    "a negative offset": (Strided(-1, (2,), (1,)), "a negative offset, dimension or stride"),
    "a negative dimension": (Strided(0, (-1, 5), (1, 1)), "a negative offset, dimension or stride"),
    "a negative stride": (Strided(9, (10,), (-1,)), "a negative offset, dimension or stride"),
    "a negative stride of a dimension of one": (Strided(9, (1,), (-1,)), "a negative offset, dimension or stride"),
    "more dimensions than strides": (Strided(0, (2, 2), (1,)), "2 dimensions and 1 strides"),
    "too many dimensions": (Strided(0, (1,) * 33, (1,) * 33), "expected equal numbers of 32 at most"),
}


@pytest.mark.parametrize("name", WRONG)
def test_views_that_are_refused(name: str) -> None:
    view, reason = WRONG[name]
    assert reason in str(view.problem(100))


@pytest.mark.parametrize(
    "view",
    [
        Strided(0, (10, 10), (10, 1)),
        Strided(99, (), ()),
        Strided(99, (1, 1), (BIG, BIG)),
        Strided(100, (0, 5), (5, 1)),
        Strided(500, (3, 0), (5, 1)),
        Strided(0, (1 << 40, 4), (0, 1)),
        Strided(0, (1,) * MAX_DIMENSIONS, (1,) * MAX_DIMENSIONS),
    ],
)
def test_views_that_are_sound(view: Strided) -> None:
    assert view.problem(100) is None


def test_the_volume_counts_what_an_empty_array_would_have() -> None:
    assert Strided(0, (), ()).volume == 1
    assert Strided(0, (3, 4), (0, 1)).volume == 12
    assert Strided(0, (0, 1 << 40, 5), (1, 1, 1)).volume == 5 << 40
