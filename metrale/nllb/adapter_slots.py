# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which adapter is in which slot, who uses it, and which one leaves when a new one needs the room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from metrale.checks import integer
from metrale.errors import InvalidInput, SequenceError, told
from metrale.nllb.sequences import SequenceTable


@dataclass(slots=True)
class Resident:
    """An adapter in a slot.

    Attributes
    ----------
    name : str
    number : int
        Another one at each load, from 1.
    digest : str
        Tells adapters apart by what they compute, in any process.
    references : int
        Taken and not given back.
    used : int
        When it was last asked for: the larger, the later.
    """

    name: str
    number: int
    digest: str
    used: int
    references: int = 0


class AdapterSlots:
    """The host's side of the pool. It moves no data.

    Parameters
    ----------
    slots : int
    table : SequenceTable
        The live sequences, of which those with an adapter's keys and values keep it where it is.
    """

    def __init__(self, slots: int, table: SequenceTable) -> None:
        self._table = table
        self._residents: list[Resident | None] = [None] * slots
        self._active: str | None = None
        self._loads = 0
        self._clock = 0

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._residents)

    # what is there

    def names(self) -> dict[str, int]:
        """Return the slot of each resident adapter by its name, in order of the slots."""
        return {one.name: slot for slot, one in enumerate(self._residents) if one is not None}

    def resident(self, slot: object) -> Resident:
        """Return the adapter in a slot.

        Raises
        ------
        InvalidInput
            When there is none, or no such slot; it names those that there are.
        """
        expected = f"-1, or the slot of a resident adapter ({self._shown() or 'there is none'})"
        if not self._residents:
            expected = "-1, as the model was loaded without room for adapters (max_adapters)"
        found = self._residents[integer("adapter_slot", slot, 0, len(self) - 1, expected)] if len(self) else None
        if found is None:
            raise InvalidInput("adapter_slot", expected, slot)
        return found

    def _shown(self) -> str:
        return ", ".join(f"{slot}: {name!r}" for name, slot in self.names().items())

    def check(self, slot: object) -> None:
        """Refuse a sequence's ``adapter_slot`` that is neither -1 nor resident; note that it was asked for."""
        if integer("adapter_slot", slot, -1, expected="-1, or the slot of a resident adapter") != -1:
            self._touch(self.resident(slot))

    def note_used(self, slots: Sequence[int]) -> None:
        """Note that rows asked for the adapters in these slots, in this order; each is -1 or resident."""
        for slot in reversed(dict.fromkeys(reversed(slots))):  # the last time that each was asked for
            one = self._residents[slot] if slot >= 0 else None
            if one is not None:
                self._touch(one)

    def digest(self, slot: int) -> str | None:
        """Return the digest of the adapter in a slot; None for -1, the base model."""
        return None if slot == -1 else self.resident(slot).digest

    # the active one

    def activate(self, name: str) -> None:
        """Make a resident adapter the active one. `InvalidInput` when it is not resident."""
        slot = self.names().get(name) if isinstance(name, str) else None
        if slot is None:
            raise InvalidInput(
                "name", f"the name of a resident adapter ({self._shown() or 'there is none'})", told(name)
            )
        self._touch(self.resident(slot))
        self._active = name

    def acquire(self, slot: object) -> int:
        """Take a reference to the adapter in a slot, for -1 to the active one; return its slot, or -1 for none."""
        if slot == -1:
            slot = self.names().get(self._active or "", -1)
            if slot == -1:
                return -1
        one = self.resident(slot)
        one.references += 1
        self._touch(one)
        return self._residents.index(one)

    def release(self, slot: object) -> None:
        """Give back a reference that `acquire` returned; nothing for -1.

        Raises
        ------
        SequenceError
            When none is taken.
        """
        if slot == -1:
            return
        one = self.resident(slot)
        if not one.references:
            raise SequenceError(f"release_adapter_slot: no reference to adapter {one.name!r} in slot {slot} is taken")
        one.references -= 1
        self._touch(one)

    # who leaves

    def _holders(self, slot: int) -> str:
        """Say who uses a slot's adapter; nothing when nobody does."""
        one = self._residents[slot]
        if one is None:
            return ""
        parts = [f"{one.references} references"] if one.references else []
        if users := self._table.with_adapter(slot):
            parts.append(f"the sequences in slots {', '.join(map(str, users))}")
        return f"slot {slot} ({one.name!r}): {' and '.join(parts)}" if parts else ""

    def replaceable(self, call: str, slot: object, name: str) -> int:
        """Return ``slot``, which an adapter called ``name`` may be loaded into; an error names ``call``.

        Raises
        ------
        InvalidInput
            When there is no such slot, or another one holds an adapter of this name.
        SequenceError
            When the adapter that is there is in use.
        """
        found = integer("slot", slot, 0, len(self) - 1, f"an adapter slot in [0, {len(self)})")
        self._check_name(name, but=found)
        if holders := self._holders(found):
            raise SequenceError(f"{call}: the adapter that would be replaced is in use by {holders}")
        return found

    def room(self, call: str, name: str) -> int:
        """Return the slot for a new adapter: a free one, or else that of the least recently used one not in use.

        Raises
        ------
        InvalidInput
            When an adapter of this name is resident.
        SequenceError
            When all slots are in use; it says by whom.
        """
        self._check_name(name)
        for slot, one in enumerate(self._residents):
            if one is None:
                return slot
        holders = [self._holders(slot) for slot in range(len(self))]
        idle: Iterable[tuple[int, int]] = (
            (one.used, slot) for slot, one in enumerate(self._residents) if one is not None and not holders[slot]
        )
        _, found = min(idle, default=(0, -1))
        if found < 0:
            raise SequenceError(f"{call}: all {len(self)} adapter slots are in use: {'; '.join(holders)}")
        return found

    def _check_name(self, name: str, but: int = -1) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidInput("name", "a name for the adapter", name)
        slot = self.names().get(name, but)
        if slot != but:
            raise InvalidInput("name", "one that no resident adapter has", f"{name!r}, which is in slot {slot}")

    def vacate(self, slot: int, successor: str) -> str | None:
        """Empty a slot for an adapter called ``successor``, and return the name of the one that was there.

        The active adapter stays active only through a load of the same name.
        """
        one, self._residents[slot] = self._residents[slot], None
        if one is None:
            return None
        if one.name == self._active != successor:
            self._active = None
        return one.name

    def hold(self, slot: int, name: str, digest: str) -> None:
        """Note what an empty slot holds now."""
        self._loads += 1
        self._residents[slot] = one = Resident(name, self._loads, digest, 0)
        self._touch(one)

    def _touch(self, one: Resident) -> None:
        self._clock += 1
        one.used = self._clock
