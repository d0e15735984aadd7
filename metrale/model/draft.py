# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelDraft: where speculative decoding gets its drafts from."""

# ruff: noqa: B027 - defaults that do nothing are part of the interface

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.model.refusal import refusal
from metrale.model.types import SequenceState


class ModelDraft(ABC):
    """Drafters (MTP heads, DFlash) and the hidden states that feed them.

    A model that drafts nothing refuses ``generate_speculative`` and ``decode_draft``, answers False, None or an empty
    list to the questions, and does nothing where hidden state would be saved or trimmed.
    """

    @abstractmethod
    def generate_speculative(self, tokens: Sequence[int], params: object, num_drafts: int) -> list[int]:
        """Generate from the prompt ``tokens`` with the model's own drafter and return the new ids.

        Parameters
        ----------
        params : object
            Sampling parameters, in the caller's form: the interface does not look into them.
        num_drafts : int
            Drafts per step.
        """

    @abstractmethod
    def has_proposer(self) -> bool:
        """Return whether the model can draft, with a drafter or by itself."""

    @abstractmethod
    def has_self_speculative(self) -> bool:
        """Return whether the model can draft by itself, through ``decode_draft``."""

    @abstractmethod
    def decode_draft(self, token: int, seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        """Run one cheap draft step of self-speculative decoding and return the address of its logits row."""

    @abstractmethod
    def save_hidden_for_mtp(self, token_idx: int, stream: StreamLike = 0) -> None:
        """Keep hidden row ``token_idx`` of the last pass as the input of the next proposal."""

    @abstractmethod
    def run_mtp_propose(self, token: int, position: int, seq: SequenceState, stream: StreamLike = 0) -> int | None:
        """Return one draft to follow ``token`` at ``position``, or None without a drafter."""

    @abstractmethod
    def run_mtp_propose_multi(
        self,
        token: int,
        position: int,
        num_drafts: int,
        seq: SequenceState,
        stream: StreamLike = 0,
        grammar_bitmask: Sequence[int] | None = None,
    ) -> list[int]:
        """Return up to ``num_drafts`` drafts, or none without a drafter.

        Parameters
        ----------
        grammar_bitmask : Sequence[int], optional
            32-bit words, one bit per id of the vocabulary; only ids whose bit is set may be drafted.
        """

    @abstractmethod
    def trim_proposer_state(self, seq: SequenceState, num_accepted: int, stream: StreamLike = 0) -> None:
        """Tell the drafter that ``num_accepted`` of its last drafts stand, so that it forgets the others."""

    def mtp_slot_draft_capacity(self, slot_idx: int) -> int:
        """Return the most drafts a step may carry for the sequence in slot ``slot_idx``. Default: no limit."""
        return sys.maxsize

    def dflash_gamma(self) -> int | None:
        """Return the block size of the DFlash drafter. Default: None, there is none."""
        return None

    def stash_verify_hidden_rows(self, rows: Sequence[int], stream: StreamLike = 0) -> None:
        """Save hidden row ``rows[i]`` of the last batched verify in stash ``i``, before a proposal overwrites it.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "stash_verify_hidden_rows")

    def stash_verify_catchup_rows(self, slot_rows: Sequence[tuple[int, int]]) -> None:
        """Save rows of the last batched verify for the drafter to catch up on, as (stash, row). Default: nothing."""

    def run_mtp_catchup_batched(
        self,
        tokens: Sequence[Sequence[int]],
        first_slot: Sequence[int],
        first_pos: Sequence[int],
        seqs: Sequence[SequenceState],
    ) -> int:
        """Feed the drafter the accepted drafts that it has not seen, and return how many rows it took. Default: 0.

        Parameters
        ----------
        tokens : Sequence[Sequence[int]]
            Accepted drafts of each sequence.
        first_slot, first_pos : Sequence[int]
            First stash and first position of each sequence's rows.
        """
        return 0

    def save_hidden_for_mtp_from_stash(self, idx: int, stream: StreamLike = 0) -> None:
        """Do as ``save_hidden_for_mtp`` with what ``stash_verify_hidden_rows`` put in stash ``idx``.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "save_hidden_for_mtp_from_stash")

    def run_mtp_propose_batched(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        stash_idx: Sequence[int],
        num_drafts: int,
        seqs: Sequence[SequenceState],
        stream: StreamLike = 0,
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Draft for several sequences at once; ``stash_idx[i]`` holds the hidden row of sequence ``i``.

        Returns
        -------
        tuple[list[list[int]], list[list[float]]] or None
            ``num_drafts`` ids per sequence and their log-probabilities (zeros when not measured). Default: None, the
            caller must propose for one sequence at a time.
        """
        return None

    def mtp_propose_batch_max(self) -> int:
        """Return how many sequences ``run_mtp_propose_batched`` takes at once. Default: 1."""
        return 1

    def save_hidden_for_catchup(self, token_idx: int, pos: int) -> None:
        """Save hidden row ``token_idx`` of a serial step at ``pos`` for the drafter. Default: nothing."""

    def save_dflash_hidden_for_propose(self, token_idx: int, stream: StreamLike = 0) -> None:
        """Capture row ``token_idx`` of the layers that the DFlash drafter reads. Default: nothing."""

    def dflash_accept_append(self, seq: SequenceState) -> None:
        """Append the captured row of one accepted draft to the drafter's context. Default: nothing."""

    def dflash_eagle_accept_append(self, seq: SequenceState) -> None:
        """Append both captured rows of a two-token verify, before the next proposal. Default: nothing."""

    def dflash_eagle_kgamma_append(self, seq: SequenceState, num_accepted: int, base_pos: int) -> None:
        """Append captured rows 0 to ``num_accepted`` at the positions from ``base_pos`` on. Default: nothing."""

    def dflash_serial_ctx_append(self, seq: SequenceState) -> None:
        """Append the captured row of a step that was decoded without speculation. Default: nothing."""

    def commit_ctx(self, seq: SequenceState, num_committed: int, base_pos: int, scratch_row: int) -> None:
        """Append ``num_committed`` captured rows, from ``scratch_row``, as positions from ``base_pos`` on.

        Default: nothing.
        """

    def dflash_capture_band(self) -> int:
        """Return how many captured rows each sequence of a batched verify has room for. Default: 0, no drafter."""
        return 0

    def read_deferred_draft_token(self) -> int:
        """Return the draft id that the last proposal left on the device. Default: 0."""
        return 0
