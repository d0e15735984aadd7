# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelLifecycle: slots, sequences, KV blocks, and the model's own end."""

# ruff: noqa: B027 - defaults that do nothing are part of the interface

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO, Final

from metrale.model.refusal import refusal
from metrale.model.types import Capacity, SequenceState

UNLOCKED: Final = nullcontext()
"""The context of a model that does not serialise its callers. It may be entered any number of times."""


class ModelLifecycle(ABC):
    """Everything about a sequence except its forward passes.

    A sequence holds one slot from ``alloc_sequence`` to ``free_sequence``. To keep the live slots contiguous when a
    sequence in the middle retires, a caller first takes the slot from it and then moves a survivor there:
    ``slot = retired.slot_idx``, ``detach_slot_for_reuse(retired)``, ``compact_sequence(survivor, slot)``. Freeing the
    detached sequence afterwards does nothing.
    """

    def teardown(self) -> None:
        """Give back all device memory of the model. No call on the model may follow. Default: nothing."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread's call is served; the same thread may nest it.

        Threads that share a model hold it from a step to the last read of the rows that the step wrote, because another
        thread's step writes the same rows. Default: a context that does nothing, for models used by one thread.
        """
        return UNLOCKED

    @abstractmethod
    def bind_gpu_to_thread(self) -> None:
        """Make the model's device current on the calling thread; due once on each thread that calls the model."""

    @abstractmethod
    def alloc_sequence(self) -> SequenceState:
        """Claim a slot and KV for the longest sequence that the model serves, and return the new, empty state.

        Raises
        ------
        metrale.errors.NoFreeSlot
            When every slot is taken.
        gpu_runtime.errors.OutOfMemory
            When the slot's KV does not fit; the model stays usable.
        """

    def alloc_sequence_for(self, budget_tokens: int) -> SequenceState:
        """Claim a slot for a sequence that will not grow past ``budget_tokens`` tokens.

        A model may reserve less KV for it. Default: ``alloc_sequence``. Raises what that raises.
        """
        return self.alloc_sequence()

    @abstractmethod
    def cache_sequence(self, seq: SequenceState) -> None:
        """Offer the KV of a finished sequence for reuse by prompts with the same beginning. A model may decline."""

    @abstractmethod
    def free_sequence(self, seq: SequenceState) -> None:
        """Give back the slot and the KV of ``seq``. A detached sequence owns none, and nothing happens."""

    @abstractmethod
    def compact_sequence(self, seq: SequenceState, new_slot: int) -> None:
        """Move ``seq`` with all its state to ``new_slot`` and set ``seq.slot_idx``; see the class for the protocol."""

    @abstractmethod
    def detach_slot_for_reuse(self, seq: SequenceState) -> None:
        """Make a retired sequence give up its slot, for a survivor to move into: ``seq.slot_idx`` becomes DETACHED.

        Whatever else would release the slot for ``seq`` is disarmed with it.
        """

    def save_sequence_state(self, seq: SequenceState, writer: BinaryIO) -> None:
        """Write the device state of ``seq`` to ``writer``, so that its slot can serve others meanwhile.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "save_sequence_state")

    def restore_sequence_state(self, seq: SequenceState, num_blocks: int, reader: BinaryIO) -> None:
        """Read back into ``seq``, freshly allocated, what ``save_sequence_state`` wrote.

        Parameters
        ----------
        num_blocks : int
            KV blocks that the saved sequence held; 0 for a model without a paged cache.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "restore_sequence_state")

    def capacity(self) -> Capacity:
        """Return what the model can serve at once.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "capacity")

    def device_bytes(self) -> int | None:
        """Return the bytes of device memory that are allocated. Default: None, not known."""
        return None

    def kv_usage(self) -> tuple[int, int] | None:
        """Return the KV cache's bytes as (taken by live sequences, all). Default: None, not known."""
        return None

    def num_free_blocks(self) -> int:
        """Return how many blocks of a paged KV cache are free. Default: 0."""
        return 0

    def num_total_blocks(self) -> int:
        """Return how many blocks a paged KV cache has. Default: 0, no paged cache."""
        return 0

    def kv_block_bytes(self) -> int:
        """Return the size in bytes of one block of a paged KV cache. Default: 0, no paged cache."""
        return 0

    def reclaim_prefix_blocks(self, n: int) -> int:
        """Take up to ``n`` blocks back from cached prefixes and return how many it were. Default: 0."""
        return 0

    def poll_innerq(self) -> None:
        """Let a running quantisation calibration look whether it can finish. Default: nothing."""

    def high_speed_swap_dims(self) -> Mapping[str, int] | None:
        """Return the dimensions that a KV swap to fast storage is planned from. Default: None, no such swap."""
        return None
