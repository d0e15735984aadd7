# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelVerify: several drafted tokens of a sequence checked in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gpu_runtime.streams import StreamLike
from metrale.model.refusal import refusal
from metrale.model.types import SequenceState, VerifyBatchedOpts


class ModelVerify(ABC):
    """Verify passes of speculative decoding.

    ``tokens`` is the last accepted id and the drafts after it. A pass advances the sequence by all of them and returns
    one id per position, the argmax of the logits there; the caller compares, and takes back what was not accepted.
    """

    @abstractmethod
    def decode_verify(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Run ``tokens``, any number of them, and return the argmax id at each position."""

    @abstractmethod
    def decode_verify_graphed(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Do as ``decode_verify`` for exactly 2 tokens, from a captured graph."""

    @abstractmethod
    def decode_verify_graphed_k3(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Do as ``decode_verify`` for exactly 3 tokens, from a captured graph."""

    @abstractmethod
    def decode_verify_graphed_k4(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Do as ``decode_verify`` for exactly 4 tokens, from a captured graph."""

    def can_batch_verify(self, ks: Sequence[int]) -> bool:
        """Return whether one batched verify can serve ``len(ks)`` sequences of ``ks[i]`` rows. Default: False."""
        return False

    def decode_verify_batched(
        self,
        tokens: Sequence[int],
        ks: Sequence[int],
        seqs: Sequence[SequenceState],
        stream: StreamLike = 0,
        opts: VerifyBatchedOpts | None = None,
    ) -> list[int]:
        """Verify several sequences in one pass. Call it only where ``can_batch_verify(ks)`` is True.

        Parameters
        ----------
        tokens : Sequence[int]
            The tokens of all sequences, one sequence after another: ``sum(ks)`` ids.
        ks : Sequence[int]
            How many of them each sequence has.
        opts : VerifyBatchedOpts, optional
            None is ``VerifyBatchedOpts()``.

        Returns
        -------
        list[int]
            The argmax id at each of the ``sum(ks)`` positions, in the order of ``tokens``.

        Raises
        ------
        metrale.errors.NotSupported
            By default. Verifying one by one would be no substitute: each pass would overwrite the last one's logits.
        """
        raise refusal(self, "decode_verify_batched")

    def decode_verify_graphed_kgamma(
        self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0
    ) -> list[int]:
        """Do as ``decode_verify`` for one accepted id and a drafter's whole block. Default: ``decode_verify``."""
        return self.decode_verify(tokens, seq, stream)

    def decode_verify_dflash(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Verify a block of a DFlash drafter. Default: ``decode_verify_graphed_kgamma``."""
        return self.decode_verify_graphed_kgamma(tokens, seq, stream)

    def decode_and_verify_fused(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        """Decode the accepted id and verify the block after it in one pass. Default: as ``decode_verify_dflash``."""
        return self.decode_verify_graphed_kgamma(tokens, seq, stream)

    def gdn_fold_accepted(self, slots: Sequence[int], accepted_rows: Sequence[int], k_rows: int) -> bool:
        """Commit the recurrent state that a ``write_on_accept`` verify held back.

        Parameters
        ----------
        slots, accepted_rows : Sequence[int]
            The verified sequences' slots, in the order of the batch, and how many rows of each were accepted.
        k_rows : int
            Rows that the verify ran per sequence.

        Returns
        -------
        bool
            Whether the state was committed. Default: False, nothing was.
        """
        return False
