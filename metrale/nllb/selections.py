# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a selection tells the device of its searches, gathered from what is kept of each when it begins."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrale.nllb.search import Search
from metrale.nllb.slots import Batch, Numbers, SlotColumns
from metrale.ops.beam_candidates import ROW_COLUMNS
from metrale.ops.beam_layout import AT_LIMIT, EARLY, GROUP_COLUMNS

_KEPT: Final = ("given", "limit", "least", "withholding", "forced", "start", "adjusts")
"""Of each search, by the first of its slots. ``withholding`` is the mode while there are fewer than ``least`` ids."""

_LENGTH, _MODE, _FORCED = map(ROW_COLUMNS.index, ("length", "mode", "forced"))
_ROW, _MEMBER, _BEAMS, _FRESH, _AT, _BITS = map(
    GROUP_COLUMNS.index, ("row", "member", "beams", "fresh", "length", "mode")
)


class Selection(NamedTuple):
    """One selection.

    Attributes
    ----------
    rows : ndarray
        int64: rows of logits that each search looks at.
    columns : mapping
        Flat values for `metrale.nllb.workspace.BEAM_COLUMNS`.
    members : int
        Beams of all searches.
    adjust : bool
        Whether scores are processed before one of them selects, or will be.
    """

    rows: Numbers
    columns: dict[str, NDArray[Any]]
    members: int
    adjust: bool


class SearchColumns:
    """What is kept, for all searches of a model.

    Parameters
    ----------
    slots : int
    positions : int
        Decoder positions of a slot.
    columns : SlotColumns
        Where a search's ids wait: those of the last selection, at the position before the next one's.
    """

    def __init__(self, slots: int, positions: int, columns: SlotColumns) -> None:
        self._columns = columns
        self._kept: Numbers = np.zeros((len(_KEPT), slots), np.int64)
        self._rows = np.zeros((len(ROW_COLUMNS), slots), np.int32)  # of each beam, but for what changes
        self._groups = np.zeros((len(GROUP_COLUMNS), slots), np.int32)  # of each search
        self._penalties = np.ones(slots, np.float32)
        self._norms = np.ones((2, slots, positions + 1), np.float32)

    def begin(self, search: Search) -> None:
        """Keep what a search needs, none of whose selections has been made."""
        home, params, width = search.slots[0], search.params, len(search.slots)
        mode, withholding = search.modes
        forced = -1 if params.forced_eos_id is None else params.forced_eos_id
        least, adjusts = params.min_new_tokens, search.adjusts
        self._kept[:, home] = (search.given, search.limit, least, withholding, forced, search.start, adjusts)
        for slot in search.slots:
            self._rows[:, slot] = (slot, 0, search.kept, params.no_repeat_ngram_size, mode, -1, home)
            self._penalties[slot] = params.repetition_penalty
        early = EARLY if search.beams.early_stopping is True else 0
        self._groups[:, home] = (0, 0, width, search.kept, 0, 0, early, home)
        self._norms[:, home, : search.limit + 1] = search.norms()
        self._columns.waiting[home] = search.start - 1

    def selected(self, home: int) -> int:
        """Return how many selections a search has made."""
        return int(self._columns.waiting[home] + 1 - self._kept[_KEPT.index("start"), home])

    def made(self, batch: Batch) -> None:
        """Note that a selection was made."""
        self._columns.waiting[batch.slots] += 1

    def selection(self, batch: Batch) -> Selection | None:
        """Return the next selection of these searches: a row for each row of candidates, and one for each search.

        None when one is not a search that has come to the position of its next selection, and may make one.
        """
        homes, lengths = batch
        given, limit, least, withholding, forced, start, adjusts = self._kept[:, homes]
        after = lengths + 1 - given  # ids that count, with the one to be selected
        if not ((self._columns.waiting[homes] == lengths - 1) & (after <= limit)).all():
            return None
        groups = self._groups[:, homes]
        beams = counts = groups[_BEAMS].astype(np.int64)
        members = slots = np.fromiter(chain.from_iterable(self._columns.rows(homes.tolist())), np.int64)
        member = first = beams.cumsum() - beams
        fresh = lengths == start
        if fresh.any():  # before the first selection, all beams are the same
            counts = np.where(fresh, 1, beams)
            first = counts.cumsum() - counts
            slots = members[np.arange(counts.sum()) + (member - first).repeat(counts)]
        rows = self._rows[:, slots]
        rows[_LENGTH] = lengths.repeat(counts)
        groups[_ROW], groups[_MEMBER], groups[_FRESH], groups[_AT] = first, member, fresh, lengths
        last, withheld = after == limit, after <= least
        if last.any():
            groups[_BITS] |= np.where(last, AT_LIMIT, 0)
            rows[_FORCED] = np.where(last, forced, -1).repeat(counts)
        if withheld.any():
            np.copyto(rows[_MODE], withholding.repeat(counts), where=withheld.repeat(counts), casting="unsafe")
        columns: dict[str, NDArray[Any]] = {
            "row_counts": rows.T.reshape(-1),
            "penalties": self._penalties[slots],
            "group_counts": groups.T.reshape(-1),
            "settings": self._norms[:, homes, after].T.reshape(-1),
            "members": members,
        }
        return Selection(counts, columns, len(members), bool(adjusts.any()))
