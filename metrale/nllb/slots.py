# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a decode step must know of each slot, in columns that change when a slot's sequence does.

A step of many sequences gathers its rows from them at once, by the slots of its sequences, and asks no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from metrale.model import SequenceState
from metrale.nllb.fed import (
    ADAPTERS,
    ANCESTRY,
    BEAM_POSITIONS,
    CELLS,
    COUNTS,
    CROSS_LENGTHS,
    IDS,
    POSITIONS,
    SELF_LENGTHS,
    SPANS,
    Fed,
)
from metrale.nllb.kv import Span
from metrale.nllb.limits import ModelShape

Numbers = NDArray[np.int64]

NOTHING: Final = -2
ANYWHERE: Final = -1
"""Of `SlotColumns.waiting`."""


class Batch(NamedTuple):
    """Live sequences, all of them different, as a call names them.

    Attributes
    ----------
    slots : ndarray
        int64: the slot that each is known by.
    lengths : ndarray
        int64: the ``seq_len`` of each.
    """

    slots: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, seqs: Sequence[SequenceState]) -> Batch:
        """Return the batch of sequences that have been checked. TypeError when the length of one is no integer."""
        count = len(seqs)
        slots = np.fromiter([seq.slot_idx for seq in seqs], np.int64, count)
        return cls(slots, np.fromiter([index(seq.seq_len) for seq in seqs], np.int64, count))


class Step(NamedTuple):
    """What a decode step feeds: for each row, int64, its slot, the position of its id, and where that comes from.

    Attributes
    ----------
    slots, positions : ndarray
    ids : ndarray
        The id itself, where the cell is -1.
    cells : ndarray
        Where the device finds it.
    all_waited : bool
        Whether every id is the one that waits in the cell of its row's slot.
    """

    slots: Numbers
    positions: Numbers
    ids: Numbers
    cells: Numbers
    all_waited: bool = False


class SlotColumns:
    """The columns. A sequence of several beams is known by the first of its slots; each beam's row is of its own slot.

    Parameters
    ----------
    shape : ModelShape
    spare : DevicePtr
        KV positions for the rows that fill up a step, one for each.

    Attributes
    ----------
    room : ndarray
        int64: how many decoder positions the sequence known by a slot has, or each of its beams; 0 when it has no
        keys and values.
    adapters, ancestry : ndarray
        int32: the adapter that a slot's keys and values were made with, or -1; the slot itself while its sequence is
        searched with beams, else -1.
    fresh : ndarray
        bool: whether no decode step has come after the prefill, or the copy, that filled the sequence known by a slot.
    waiting : ndarray
        int64: the position at which the id in a slot's cell may be fed; `ANYWHERE` when none is prescribed, `NOTHING`
        when no id is there.
    cells : ndarray
        int64: the cell of each slot.
    """

    def __init__(self, shape: ModelShape, spare: DevicePtr | None) -> None:
        slots = shape.limits.max_batch
        count = slots + shape.spare_rows
        self._shape = shape
        self._spares = np.arange(slots, count)
        self.room: Numbers = np.zeros(slots, np.int64)
        self.fresh = np.zeros(slots, np.bool_)
        self.waiting: Numbers = np.full(slots, NOTHING)
        self.cells: Numbers = np.arange(slots) + shape.logits_rows
        self._spans = np.zeros((len(SPANS), count), np.uint64)
        self._counts = np.zeros((len(COUNTS), count), np.int32)
        self.adapters, self.ancestry = self._counts[ADAPTERS], self._counts[ANCESTRY]
        self._counts[[CELLS, ADAPTERS, ANCESTRY]] = -1
        self._counts[[SELF_LENGTHS, CROSS_LENGTHS]] = 1  # a spare row attends to the position that it writes
        self._rows: list[tuple[int, ...]] = [(slot,) for slot in range(slots)]  # of the sequence known by a slot
        self._searches = 0
        for number, row in enumerate(self._spares.tolist()):  # each writes KV of its own
            assert spare is not None
            self._spans[:, row] = spare.offset(number * shape.position_bytes)

    # what becomes of slots

    def held(self, span: Span) -> None:
        """Follow the allocation of a sequence with this span."""
        for slot in span.slots:
            self.room[slot], self.fresh[slot], self.waiting[slot] = 0, False, NOTHING

    def filled(self, span: Span) -> None:
        """Follow a change of what is in a span: ``source_len`` and ``adapter``."""
        home, own = span.slots[0], span.target()
        self.room[home] = min(self._shape.limits.target_positions, span.target_room) if span.source_len else 0
        for beam, slot in enumerate(span.slots):
            self._spans[:, slot] = own, span.target(beam), int(span.ptr)
            self._counts[[CROSS_LENGTHS, BEAM_POSITIONS, ADAPTERS], slot] = (
                span.source_len,
                span.beam_positions,
                span.adapter,
            )

    def moved(self, old: int, new: int) -> None:
        """Follow a sequence of one slot to another."""
        for columns in (self._spans, self._counts, self.room, self.fresh, self.waiting):
            columns[..., new] = columns[..., old]

    def search(self, slots: tuple[int, ...]) -> None:
        """Let a sequence have a row for each of its beams, one in each of its slots."""
        self.ancestry[list(slots)] = slots
        self._rows[slots[0]] = slots
        self._searches += 1

    def end_search(self, slots: tuple[int, ...]) -> None:
        """Let it have one row again."""
        self.ancestry[list(slots)] = -1
        self._rows[slots[0]], self.waiting[slots[0]] = slots[:1], NOTHING
        self._searches -= 1

    # steps

    def searched(self, batch: Batch) -> bool:
        """Return whether a sequence of a batch is searched with beams."""
        return self._searches > 0 and bool(self.ancestry[batch.slots].max() >= 0)

    def rows(self, homes: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the slots of the rows that sequences known by ``homes`` have in a step."""
        rows = self._rows
        return [rows[home] for home in homes]

    def waiting_at(self, batch: Batch) -> NDArray[np.bool_]:
        """Return for which sequences an id waits that may be fed at their next positions."""
        waiting = self.waiting[batch.slots]
        found: NDArray[np.bool_] = waiting == ANYWHERE
        return found | (waiting == batch.lengths) if self._searches else found

    def step(self, batch: Batch) -> Step:
        """Return the step in which every sequence takes the ids that wait in the cells of its rows."""
        slots, positions = batch
        if self.searched(batch):
            rows = self.rows(slots.tolist())
            widths = [len(one) for one in rows]
            slots, positions = np.fromiter(chain.from_iterable(rows), np.int64, sum(widths)), positions.repeat(widths)
        return Step(slots, positions, np.zeros_like(slots), self.cells[slots], all_waited=True)

    def fed(self, step: Step) -> Fed:
        """Return the rows of a step, filled up with spare ones as its size asks for."""
        slots, positions, ids, cells, _ = step
        lanes = len(slots)
        spare = self._shape.step_rows(lanes) - lanes
        if spare:
            nothing = np.zeros(spare, np.int64)
            slots = np.concatenate((slots, self._spares[:spare]))
            positions, ids = np.concatenate((positions, nothing)), np.concatenate((ids, nothing))
            cells = np.concatenate((cells, nothing - 1))
        counts = self._counts[:, slots]
        counts[IDS], counts[CELLS], counts[POSITIONS] = ids, cells, positions
        counts[SELF_LENGTHS] = positions + 1
        return Fed(self._spans[:, slots], counts, lanes)
