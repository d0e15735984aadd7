# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which sequence holds which slots and which span of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np

from metrale.checks import integer
from metrale.errors import InvalidInput, NoFreeSlot, SequenceError
from metrale.model import SequenceState
from metrale.nllb.kv import KvPool, Span
from metrale.nllb.slots import Batch, SlotColumns


class SequenceTable:
    """The live sequences. A slot belongs to one `SequenceState` object, so a stale one cannot free its successor.

    Parameters
    ----------
    pool : KvPool
    slots : int
        Sequences that may be live at once.
    columns : SlotColumns
        They follow what happens here.
    """

    def __init__(self, pool: KvPool, slots: int, columns: SlotColumns) -> None:
        self._pool = pool
        self._slots = slots
        self._columns = columns
        self._live: dict[int, tuple[SequenceState, Span]] = {}

    def __len__(self) -> int:
        """Return how many slots are taken."""
        return len(self._live)

    def alloc(self, positions: int, *, slots: int = 1, beam_positions: int = 0) -> SequenceState:
        """Claim the lowest free slots and a span of ``positions``; the sequence is known by the first of its slots.

        Raises
        ------
        NoFreeSlot
            When there are not so many slots.
        OutOfMemory
            When the pool has no such span; no slot is claimed.
        """
        free = [slot for slot in range(self._slots) if slot not in self._live][:slots]
        if len(free) < slots:
            if slots == 1:
                raise NoFreeSlot(f"alloc_sequence: all {self._slots} slots are taken; free a sequence first")
            raise NoFreeSlot(
                f"alloc_beams: {slots} beams need as many slots, and {len(free)} of {self._slots} are free"
            )
        span = self._pool.take(positions)
        span.slots, span.beam_positions = tuple(free), beam_positions
        seq = SequenceState(free[0])
        for slot in free:
            self._live[slot] = (seq, span)
        self._columns.held(span)
        return seq

    def members(self, seq: SequenceState) -> tuple[int, ...]:
        """Return the slots of a live sequence, one for each of its beams. Raises as `span`."""
        return self.span(seq).slots

    def owns(self, seq: SequenceState) -> bool:
        """Return whether ``seq`` holds its slot. `InvalidInput` when it is no `SequenceState`."""
        if not isinstance(seq, SequenceState):
            raise InvalidInput("seq", "a SequenceState", seq)
        return self.live(seq) is not None

    def batch(self, seqs: Sequence[SequenceState]) -> Batch | None:
        """Return live sequences as a batch; None when one is not live or there twice, or its length is no plain int."""
        live, count = self._live, len(seqs)
        try:
            slots = [seq.slot_idx for seq in seqs]
            if len({*slots}) < count or not all(map(is_, [live[slot][0] for slot in slots], seqs)):
                return None
            lengths = [seq.seq_len for seq in seqs]
            if {*map(type, lengths)} != {int}:  # NumPy would make integers of "2" and 2.5
                return None
            return Batch(np.fromiter(slots, np.int64, count), np.fromiter(lengths, np.int64, count))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return None

    def live(self, seq: SequenceState) -> Span | None:
        """Return the span of a live sequence, and None for what `span` refuses."""
        if not isinstance(seq, SequenceState):
            return None
        entry = self._live.get(seq.slot_idx)
        return entry[1] if entry is not None and entry[0] is seq else None

    def span(self, seq: SequenceState) -> Span:
        """Return the span of a live sequence.

        Raises
        ------
        SequenceError
            When ``seq`` was freed or detached, or is not of this model.
        """
        if not self.owns(seq):
            what = "it was detached" if seq.is_detached else f"it does not hold slot {seq.slot_idx}"
            raise SequenceError(f"seq: expected a live sequence of this model, but {what} (freed before?)")
        return self._live[seq.slot_idx][1]

    def with_adapter(self, adapter: int) -> list[int]:
        """Return the slots of the live sequences whose keys and values were made with the adapter in a slot."""
        return [slot for slot, (_, span) in self._live.items() if span.adapter == adapter]

    def free(self, seq: SequenceState) -> None:
        """Release the slot and the span of ``seq``, which is detached from then on; nothing when it holds none."""
        if self.owns(seq):
            _, span = self._live[seq.slot_idx]
            for slot in span.slots:
                del self._live[slot]
            self._pool.give_back(span)
            seq.slot_idx = SequenceState.DETACHED

    def vacant(self, seq: SequenceState, slot: int) -> int:
        """Return ``slot``, which ``seq`` may move to: its own, or one that nobody holds.

        Raises
        ------
        SequenceError
            When ``seq`` is not live or has several beams, or a live sequence holds ``slot``.
        InvalidInput
            When there is no such slot.
        """
        if len(self.span(seq).slots) > 1:
            raise SequenceError(f"compact_sequence: the sequence in slot {seq.slot_idx} has several beams")
        slot = integer("new_slot", slot, 0, self._slots - 1, f"a slot in [0, {self._slots})")
        if slot in self._live and slot != seq.slot_idx:
            raise SequenceError(f"compact_sequence: slot {slot} is held by a live sequence; free or detach that first")
        return slot

    def move(self, seq: SequenceState, slot: int) -> None:
        """Let ``seq`` hold ``slot``, which is `vacant`, instead of its own. The span stays where it is."""
        self._live[slot] = entry = self._live.pop(seq.slot_idx)
        entry[1].slots = (slot,)
        self._columns.moved(seq.slot_idx, slot)
        seq.slot_idx = slot
