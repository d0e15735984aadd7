# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on LoRA adapters: which are resident, who uses them, and loading them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from metrale.model import refusal
from metrale.nllb.core import NllbCore
from metrale.nllb.lora import AdapterImage, read_adapter


class AdapterCalls(NllbCore):
    """`metrale.model.ModelAdapters`.

    An adapter is in use while a reference to it is taken, or a live sequence has keys and values that were made with
    it. Its slot is not given to another one then.
    """

    def adapters(self) -> Mapping[str, int]:
        """Return the slot of each resident adapter by its name."""
        with self._lock:
            self._check_open()
            return self._adapters.names()

    def set_active_lora(self, name: str) -> None:
        """Make a resident adapter the active one.

        Raises
        ------
        InvalidInput
            When no adapter of this name is resident.
        NotSupported
            When the model was loaded without room for adapters.
        """
        with self._lock:
            self._check_room("set_active_lora")
            self._adapters.activate(name)

    def adapter_id_for(self, slot: int) -> int:
        """Return a number that no other load has: 1 and up, and 0 for -1, the base model.

        Raises
        ------
        InvalidInput
            When no adapter is in the slot.
        """
        with self._lock:
            self._check_open()
            return 0 if slot == -1 else self._adapters.resident(slot).number

    def acquire_adapter_slot(self, slot: int) -> int:
        """Take a reference. For -1 it is one to the active adapter, or none (-1) when there is no active one.

        Raises
        ------
        InvalidInput
            When no adapter is in the slot.
        """
        with self._lock:
            self._check_open()
            return self._adapters.acquire(slot)

    def release_adapter_slot(self, resolved: int) -> None:
        """Give a reference back; nothing for -1.

        Raises
        ------
        SequenceError
            When none is taken.
        InvalidInput
            When no adapter is in the slot.
        """
        with self._lock:
            if self._teardown is not None:
                self._adapters.release(resolved)

    def swap_lora_from_disk(self, dir: str | os.PathLike[str], name: str, slot: int) -> None:
        """Load an adapter into a slot. It is active afterwards only if one of the same name was, in that slot.

        Everything is read and checked before the device is asked for anything, so that a refused load leaves the slot
        as it was; one that fails on the device leaves it empty. Others may use the model while the folder is read.

        Raises
        ------
        CheckpointError
            When the folder cannot be loaded (`metrale.nllb.lora.read_adapter`).
        InvalidInput
            When there is no such slot, or another slot holds an adapter of this name.
        SequenceError
            When the adapter in the slot is in use; it says by whom.
        NotSupported
            When the model was loaded without room for adapters.
        """
        call = "swap_lora_from_disk"
        with self._lock:
            self._check_room(call)
            self._adapters.replaceable(call, slot, name)  # what is in vain is not read
        image = read_adapter(dir, self.shape)
        with self._lock:
            self._check_room(call)
            self._fill(self._adapters.replaceable(call, slot, name), name, image)

    def promote_lora_from_disk(self, dir: str | os.PathLike[str], name: str) -> tuple[int, str | None]:
        """Load an adapter into a free slot, or else that of the least recently used one not in use; make it active.

        What fails leaves everything as `swap_lora_from_disk` says.

        Returns
        -------
        tuple[int, str | None]
            The slot, and the name of the adapter that left it.

        Raises
        ------
        CheckpointError
            When the folder cannot be loaded.
        InvalidInput
            When an adapter of this name is resident: activate it, or replace it by `swap_lora_from_disk`.
        SequenceError
            When all slots are in use; it says by whom.
        NotSupported
            When the model was loaded without room for adapters.
        """
        call = "promote_lora_from_disk"
        with self._lock:
            self._check_room(call)
            self._adapters.room(call, name)
        image = read_adapter(dir, self.shape)
        with self._lock:
            self._check_room(call)
            slot = self._adapters.room(call, name)
            evicted = self._fill(slot, name, image)
            self._adapters.activate(name)
        return slot, evicted

    def promote_lora_from_peer(
        self, addr: str, id: str, name: str, peft: Mapping[str, object]
    ) -> tuple[int, str | None]:
        raise refusal(self, "promote_lora_from_peer", "it loads adapters from folders alone")

    def _check_room(self, method: str) -> None:
        self._check_open()
        if not len(self._adapters):
            raise refusal(self, method, "it was loaded without room for adapters (max_adapters)")

    def _fill(self, slot: int, name: str, image: AdapterImage) -> str | None:
        """Load an image into a slot that nobody uses; return the name of what was there.

        Sequences of the former adapter may be freed while steps of theirs are still in flight, so the copies come after
        both forward turns. They are done on return, before any later forward is enqueued.
        """
        with self._adapter_memory.staging(image) as staging:
            staging.follow(self._passes.decoding)
            staging.follow(self._passes.prefilling)
            evicted = self._adapters.vacate(slot, name)  # empty, should the device fail half way
            self._adapter_memory.write(slot, image, staging)
        self._adapters.hold(slot, name, image.digest)
        return evicted
