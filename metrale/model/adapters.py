# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelAdapters: LoRA adapters in a pool of slots."""

from __future__ import annotations

import os
from collections.abc import Mapping

from metrale.model.refusal import refusal


class ModelAdapters:
    """Resident adapters, referenced by slot. A model without adapters keeps the defaults.

    ``SequenceState.adapter_slot`` chooses a sequence's adapter: a slot, or -1 for the base model. Calls that load or
    activate an adapter need the model to themselves.
    """

    def set_active_lora(self, name: str) -> None:
        """Make the resident adapter ``name`` the active one, which ``acquire_adapter_slot(-1)`` resolves to.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "set_active_lora")

    def adapter_id_for(self, slot: int) -> int:
        """Return the number under which prefixes computed with ``slot`` are cached. Default: 0, the base model's."""
        return 0

    def acquire_adapter_slot(self, slot: int) -> int:
        """Take a reference to an adapter for the time of one sequence, at its prefill.

        Parameters
        ----------
        slot : int
            A slot, or -1 for the active adapter.

        Returns
        -------
        int
            The slot that ``release_adapter_slot`` must get, or -1 when no reference was taken (the default).
        """
        return -1

    def release_adapter_slot(self, resolved: int) -> None:
        """Give back the reference that ``acquire_adapter_slot`` returned as ``resolved``. Default: nothing."""

    def swap_lora_from_disk(self, dir: str | os.PathLike[str], name: str, slot: int) -> None:
        """Load the adapter in folder ``dir`` into pool slot ``slot``, under ``name``, in place of what is there.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "swap_lora_from_disk")

    def promote_lora_from_disk(self, dir: str | os.PathLike[str], name: str) -> tuple[int, str | None]:
        """Load the adapter in folder ``dir`` into a slot of the model's choice, and make it the active one.

        Returns
        -------
        tuple[int, str | None]
            The slot, free before or else the least recently used one without references, and the name of the adapter
            that had to leave it.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "promote_lora_from_disk")

    def promote_lora_from_peer(
        self, addr: str, id: str, name: str, peft: Mapping[str, object]
    ) -> tuple[int, str | None]:
        """Do as ``promote_lora_from_disk`` with weights that another server holds.

        Parameters
        ----------
        addr, id : str
            The server, and the adapter's name there.
        name : str
            The adapter's name here.
        peft : Mapping[str, object]
            The adapter's configuration: rank, alpha, scaling.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "promote_lora_from_peer")
