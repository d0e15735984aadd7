# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether what a model generated degenerates into a loop.

A *run* is a stretch of ids of which each equals the one ``n`` places before it, for some ``n`` up to `LONGEST_PERIOD`,
with at least `LEAST_COPIES` copies and `LEAST_IDS` ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

LONGEST_PERIOD: Final = 32
"""Ids of what is repeated: a model repeats words, and whole sentences."""

LEAST_COPIES: Final = 4
LEAST_IDS: Final = 16
"""Below these, somebody may have said it so: very, very, very good."""

TIMES_THE_GIVEN: Final = 2
"""A text that repeats something has a translation that does; a loop goes on for longer than twice as many ids."""

_LEAST_EQUAL: Final = LEAST_IDS - LEAST_IDS // LEAST_COPIES
"""Ids of the shortest run that equal an earlier one."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run: its first id, the one after its last, and how many ids are repeated."""

    start: int
    stop: int
    period: int


def repeats(ids: Sequence[int], *given: Sequence[int], whole: bool) -> bool:
    """Return whether generated ids are a loop.

    They are when at least half of them are in runs, or when a run goes on to their end and they were stopped there;
    unless what was given has runs too, there of any length, with at least half as many ids in them.

    Parameters
    ----------
    ids : sequence of int
        What was generated, without EOS.
    *given : sequence of int
        The source's ids, and those of a prefix.
    whole : bool
        Whether the model ended it, and no limit.
    """
    if len(ids) - len(set(ids)) < _LEAST_EQUAL:  # nearly always, and much cheaper
        return False
    found = list(runs(ids))
    covered = _covered(found, len(ids))
    last = max((run.stop - run.start for run in found if run.stop == len(ids)), default=0)
    looping = max(covered if 2 * covered >= len(ids) else 0, 0 if whole else last)
    if not looping:
        return False
    return looping > TIMES_THE_GIVEN * max((_covered(runs(one, least_ids=0), len(one)) for one in given), default=0)


def runs(ids: Sequence[int], *, least_ids: int = LEAST_IDS) -> Iterator[Run]:
    """Yield every run of at least ``least_ids``, once for each period that it has."""
    row = np.asarray(ids, np.int64)
    for period in range(1, min(LONGEST_PERIOD, len(row) // LEAST_COPIES) + 1):
        least_equal = max(LEAST_COPIES * period, least_ids) - period
        equal = row[period:] == row[:-period]
        if np.count_nonzero(equal) < least_equal:
            continue
        edges = np.flatnonzero(np.diff(equal.astype(np.int8), prepend=0, append=0)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start >= least_equal:
                yield Run(start, stop + period, period)


def _covered(found: Iterable[Run], size: int) -> int:
    """Return how many of ``size`` ids are in a run."""
    inside = np.zeros(size, np.bool_)
    for run in found:
        inside[run.start : run.stop] = True
    return int(np.count_nonzero(inside))
