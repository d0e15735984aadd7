# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelSsmState: recurrent state, which shortening a sequence does not rewind."""

# ruff: noqa: B027 - defaults that do nothing are part of the interface

from __future__ import annotations

from abc import ABC, abstractmethod

from metrale.model.types import SequenceState


class ModelSsmState(ABC):
    """Checkpoints of recurrent (SSM) state around speculative verifies and decode rollbacks.

    A model without recurrent layers implements the two abstract methods as no-ops and keeps the defaults.
    """

    @abstractmethod
    def checkpoint_ssm_states(self, seq: SequenceState) -> None:
        """Remember the recurrent state of ``seq`` as it is now."""

    @abstractmethod
    def rollback_ssm_states(self, seq: SequenceState, num_accepted: int) -> None:
        """Return the recurrent state of ``seq`` to where ``num_accepted`` tokens of the last verify stood."""

    def has_ssm_layers(self) -> bool:
        """Return whether some layer carries recurrent state. Default: False."""
        return False

    def decode_rollback_unsupported(self) -> bool:
        """Return whether some layer's state can be rewound neither by length nor by snapshot. Default: False.

        Where it is True, a scheduler must not take decoded tokens back.
        """
        return False

    def decode_rollback_ring_slots(self) -> int:
        """Return how many decode snapshots each sequence can hold. Default: 0, none."""
        return 0

    def save_decode_ssm_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        """Save the recurrent state of ``seq`` in its snapshot ``ring_slot``. Default: nothing."""

    def restore_decode_ssm_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        """Bring back the recurrent state of ``seq`` from its snapshot ``ring_slot``. Default: nothing."""

    def decode_marconi_checkpoint(self, seq: SequenceState) -> None:
        """Save recurrent state at a block boundary, for later prompts that begin with ``seq``. Default: nothing."""

    def start_checkpoint_async(self, seq: SequenceState) -> None:
        """Begin ``checkpoint_ssm_states`` beside other work; ``sync_secondary`` ends it.

        Default: ``checkpoint_ssm_states``, at once.
        """
        self.checkpoint_ssm_states(seq)

    def start_rollback_and_checkpoint_async(self, seq: SequenceState, num_accepted: int) -> None:
        """Begin a rollback to ``num_accepted`` tokens and a checkpoint of that; ``sync_secondary`` ends it.

        Default: ``rollback_ssm_states``, then ``checkpoint_ssm_states``, at once.
        """
        self.rollback_ssm_states(seq, num_accepted)
        self.checkpoint_ssm_states(seq)

    def sync_secondary(self) -> None:
        """Wait on the host for the secondary stream, where the ``start_..._async`` calls work. Default: nothing."""

    def commit_accepted_prefix(self, seq: SequenceState, num_accepted: int, k: int) -> None:
        """Make the state after ``num_accepted`` of the last verify's ``k`` rows the live state of ``seq``.

        The work goes to the secondary stream. Default: nothing.
        """

    def ssm_snapshot_occupancy(self) -> tuple[int, int] | None:
        """Return the snapshot pool's slots as (used, total). Default: None, no pool."""
        return None
