# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelForward: prefill, decode, steps that mix both, beam search, and what a scheduler must know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checks import listed
from metrale.model.beam_types import BeamReq, Hypothesis
from metrale.model.refusal import refusal
from metrale.model.streams import ModelStreams
from metrale.model.types import MixedBatchResult, MixedForwardResult, PrefillSlice, SequenceState


class ModelForward(ModelStreams, ABC):
    """The forward passes of a model.

    A forward returns the address of the logits that the caller samples from, as described by ``ModelLogits``. Decode
    lane ``i`` writes row ``i`` of the logits arena. A model may return before the device is done; ``stream`` carries
    the work. Arguments are checked before anything is enqueued, and a call that raises leaves its sequences as they
    were.
    """

    def supports_beam(self) -> bool:
        """Return whether ``generate_beam_batch`` works. Default: False."""
        return False

    def generate_beam_batch(self, reqs: Sequence[BeamReq]) -> list[list[int]]:
        """Run a whole beam search for each request, independently of the others, and wait for the results.

        Returns
        -------
        list[list[int]]
            The winning ids of each request, from the language token to EOS (which is missing when ``max_new`` came
            first).

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "generate_beam_batch")

    def generate_beams(self, reqs: Sequence[BeamReq]) -> list[list[Hypothesis]]:
        """Do as ``generate_beam_batch``, and return the ``num_return_sequences`` best hypotheses with their scores.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "generate_beams")

    @abstractmethod
    def prefill(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        """Take in the whole prompt and return the address of the logits for the token after it.

        Parameters
        ----------
        tokens : Sequence[int]
            The prompt's ids.
        seq : SequenceState
            A fresh sequence; its languages and adapter are read, its ``tokens``, ``seq_len`` and ``prompt_len`` set.

        Raises
        ------
        metrale.errors.InvalidInput
            When an id is outside the vocabulary or the prompt is too long.
        metrale.errors.SequenceError
            When ``seq`` is not a live sequence of this model.
        """

    @abstractmethod
    def prefill_chunk(
        self,
        tokens: Sequence[int],
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
        stream: StreamLike = 0,
    ) -> DevicePtr:
        """Take in ``chunk_len`` tokens of the prompt ``tokens``, from ``chunk_start`` on.

        Returns
        -------
        DevicePtr
            The logits after the prompt's end when ``is_last_chunk``, else NULL.

        Raises
        ------
        metrale.errors.InvalidInput, metrale.errors.SequenceError
            As ``prefill``; InvalidInput also for a chunk that the model does not split prompts into.
        """

    @abstractmethod
    def decode(self, token: int, seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        """Feed ``token`` to the sequence and return the address of the logits for the next one, row 0.

        ``token`` joins ``seq.tokens`` and ``seq.seq_len`` grows by one.

        Raises
        ------
        metrale.errors.InvalidInput, metrale.errors.SequenceError
            For a wrong id; for a sequence that is not live, not prefilled, or full.
        """

    @abstractmethod
    def decode_batch(self, tokens: Sequence[int], seqs: Sequence[SequenceState], stream: StreamLike = 0) -> DevicePtr:
        """Do as ``decode`` for several sequences in one step: ``seqs[i]`` gets ``tokens[i]`` and writes row ``i``.

        Returns
        -------
        DevicePtr
            The address of row 0.

        Raises
        ------
        metrale.errors.InvalidInput, metrale.errors.SequenceError
            As ``decode``; InvalidInput also for no sequences, for too many, and when the lengths differ.
        """

    def mixed_forward(
        self,
        decode_tokens: Sequence[int],
        decode_seqs: Sequence[SequenceState],
        prefill_tokens: Sequence[int],
        prefill_seq: SequenceState,
        prefill_chunk_start: int,
        prefill_chunk_len: int,
        prefill_is_last: bool,
        stream: StreamLike = 0,
    ) -> MixedForwardResult:
        """Decode some sequences by one step and prefill a chunk of another.

        Default: ``decode_batch``, left out (with NULL as its result) when there are no decode tokens, then
        ``prefill_chunk``. When the second raises, the first has happened.
        """
        decode_logits = DevicePtr.NULL
        if len(decode_tokens) > 0:
            decode_logits = self.decode_batch(decode_tokens, decode_seqs, stream)
        prefill_logits = self.prefill_chunk(
            prefill_tokens, prefill_seq, prefill_chunk_start, prefill_chunk_len, prefill_is_last, stream
        )
        return MixedForwardResult(decode_logits, prefill_logits)

    def prefill_batch_chunk(self, streams: Sequence[PrefillSlice], stream: StreamLike = 0) -> list[DevicePtr]:
        """Prefill one chunk for each of ``streams``; those that end their prompt write row ``i`` of the arena.

        Returns
        -------
        list[DevicePtr]
            Per slice, in order: its logits when its chunk is the last, else NULL.

        Notes
        -----
        Default: ``prefill_chunk`` for one slice after another. When one raises, those before it have happened.
        """
        return [
            self.prefill_chunk(s.prompt_tokens, s.seq, s.chunk_start, s.chunk_len, s.is_last_chunk, stream)
            for s in streams
        ]

    def prefill_batch_chunk_rows(
        self, streams: Sequence[PrefillSlice], stream: StreamLike = 0, row_base: int = 0
    ) -> list[DevicePtr]:
        """Do as ``prefill_batch_chunk``, with slice ``i`` writing row ``row_base + i``.

        In a mixed step the decode rows are sampled after the prefill has run, so the prefill must stay clear of them:
        it would otherwise hand one request's logits to another. Default: ``prefill_batch_chunk``, which suits a model
        whose prefills never write decode rows; ``row_base`` is not used.
        """
        return self.prefill_batch_chunk(streams, stream)

    def mixed_forward_batch(
        self,
        decode_tokens: Sequence[int],
        decode_seqs: Sequence[SequenceState],
        prefill_streams: Sequence[PrefillSlice],
        stream: StreamLike = 0,
    ) -> MixedBatchResult:
        """Decode some sequences by one step and prefill a chunk of several others.

        Default: ``decode_batch`` and a ``synchronize`` of the default stream, both left out (with NULL as the result)
        when there are no decode tokens, then ``prefill_batch_chunk_rows`` with the rows after the decode rows. When
        the last raises, the step before it has happened.
        """
        decode_logits = DevicePtr.NULL
        if len(decode_tokens) > 0:
            decode_logits = self.decode_batch(decode_tokens, decode_seqs, stream)
            # Decode may work on the default stream and share its scratch memory with the prefill on `stream`.
            self.synchronize(self.default_stream())
        prefill_logits = self.prefill_batch_chunk_rows(prefill_streams, stream, len(decode_tokens))
        return MixedBatchResult(decode_logits, prefill_logits)

    def step_rows(self, lanes: int) -> int:
        """Return how many rows a decode step of ``lanes`` sequences computes. Default: as many, it is not padded."""
        return lanes

    def normalize_ssm_states(self, seq: SequenceState, stream: StreamLike = 0) -> None:
        """Rescale the recurrent state of ``seq`` between two chunks of its prompt. Default: nothing."""

    def prefill_twophase(
        self, tokens: Sequence[int], seq: SequenceState, chunk_size: int, stream: StreamLike = 0
    ) -> DevicePtr:
        """Take in the whole prompt in one call, which a model may cut into chunks of ``chunk_size`` tokens.

        Returns what ``prefill`` returns. Default: ``prefill_chunk`` with all of it in one chunk.
        """
        tokens = listed("tokens", tokens, "a sequence of ids")
        return self.prefill_chunk(tokens, seq, 0, len(tokens), True, stream)

    def is_mla(self) -> bool:
        """Return whether a prompt must come in one chunk for the attention's sake. Default: False."""
        return False

    def hc_mult(self) -> int:
        """Return the number of residual streams under hyper-connections. Default: 0, there are none."""
        return 0

    def kv_block_size(self) -> int | None:
        """Return the tokens in a block of a paged KV cache. Default: None, no paged cache."""
        return None

    def prefill_tail_split(self, tokens: Sequence[int]) -> int | None:
        """Return the token at which a chunk of the prompt should end for a state snapshot. Default: None, anywhere."""
        return None
