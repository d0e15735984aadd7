# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's forward calls: check everything, enqueue, then note in the sequences what was enqueued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_runtime.backend import NULL
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checks import integer
from metrale.errors import InvalidInput
from metrale.model import MixedBatchResult, MixedForwardResult, PrefillSlice, SequenceState
from metrale.nllb.admission import Prompt
from metrale.nllb.checks import token_id, token_ids
from metrale.nllb.core import NllbCore
from metrale.nllb.slots import NOTHING, Step


class ForwardCalls(NllbCore):
    """`metrale.model.ModelForward`."""

    def prefill(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        with self._lock:
            self._check_open()
            ids = token_ids("tokens", tokens, self.shape.vocab)
            return self._prefill_one(PrefillSlice.whole(ids, seq), stream)

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
        stream: StreamLike = 0,
    ) -> DevicePtr:
        """Prefill the whole source: the encoder reads in both directions, so a part of it has no meaning.

        Raises
        ------
        InvalidInput
            Also when the chunk is not all of ``tokens``.
        """
        with self._lock:
            self._check_open()
            ids = token_ids("tokens", tokens, self.shape.vocab)
            return self._prefill_one(PrefillSlice(ids, seq, chunk_start, chunk_len, is_last_chunk), stream)

    def prefill_batch_chunk(self, streams: Sequence[PrefillSlice], stream: StreamLike = 0) -> list[DevicePtr]:
        return self.prefill_batch_chunk_rows(streams, stream, 0)

    def prefill_batch_chunk_rows(
        self, streams: Sequence[PrefillSlice], stream: StreamLike = 0, row_base: int = 0
    ) -> list[DevicePtr]:
        """Prefill several sources in one packed encoder pass; source ``i``'s logits go to row ``row_base + i``.

        Raises
        ------
        InvalidInput
            As `prefill`, for any of them; when a sequence is named twice; or when the arena has no such rows. Nothing
            is enqueued then.
        """
        with self._lock:
            self._check_open()
            return self._mixed(None, [], streams, row_base, stream, stream).prefill_logits

    def decode(self, token: int, seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        return self.decode_batch([token_id("token", token, self.shape.vocab)], [seq], stream)

    def decode_batch(self, tokens: Sequence[int], seqs: Sequence[SequenceState], stream: StreamLike = 0) -> DevicePtr:
        """Run one step for every sequence in one batch; sequence ``i``'s logits go to row ``i``.

        Raises
        ------
        InvalidInput
            When there are no sequences, more than ``max_batch``, one twice, or not as many tokens; or when a token is
            not in the vocabulary.
        SequenceError
            When a sequence is not live, has not been prefilled, or has reached its limit. Nothing is enqueued.
        """
        with self._lock:
            self._check_open()
            step = self._given("tokens", tokens, seqs)
            base = self._passes.decode(step, stream, self._feed.fed_history(step))
            self._note_decoded(step, seqs)
            return base

    def step_rows(self, lanes: int) -> int:
        return self.shape.step_rows(integer("lanes", lanes, 1, self.shape.limits.max_batch))

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
        """Decode one step of some sequences and prefill another, both on ``stream``.

        Decode lane ``i`` writes row ``i``, the prefill row ``max_batch + slot``. Raises as `decode_batch` and
        `prefill_chunk` do, before anything is enqueued; InvalidInput also when the prefilled sequence is among the
        decoded ones.
        """
        with self._lock:
            self._check_open()
            ids = token_ids("prefill_tokens", prefill_tokens, self.shape.vocab)
            one = PrefillSlice(ids, prefill_seq, prefill_chunk_start, prefill_chunk_len, prefill_is_last)
            prompt = self._admission.prompt(one, "prefill_tokens")  # first: it says whether the sequence has a slot
            step = self._given_or_none(decode_tokens, decode_seqs)
            result = self._mixed(step, decode_seqs, [one], self._slot_row(prompt.seq), stream, stream)
            self._note_decoded(step, decode_seqs)
            return MixedForwardResult(result.decode_logits, result.prefill_logits[0])

    def mixed_forward_batch(
        self,
        decode_tokens: Sequence[int],
        decode_seqs: Sequence[SequenceState],
        prefill_streams: Sequence[PrefillSlice],
        stream: StreamLike = 0,
    ) -> MixedBatchResult:
        """Decode one step of some sequences on the default stream, and prefill others on ``stream`` beside it.

        Decode lane ``i`` writes row ``i``, prefill ``i`` row ``len(decode_seqs) + i``. Later work of ``stream`` comes
        after both. Raises as `decode_batch` and `prefill_batch_chunk_rows` do, before anything is enqueued;
        InvalidInput also when a sequence is in both parts.
        """
        with self._lock:
            self._check_open()
            step = self._given_or_none(decode_tokens, decode_seqs)
            result = self._mixed(step, decode_seqs, prefill_streams, len(decode_seqs), 0, stream)
            self._note_decoded(step, decode_seqs)
            return result

    def _mixed(
        self,
        step: Step | None,
        seqs: Sequence[SequenceState],
        streams: Sequence[PrefillSlice],
        row_base: int,
        decode_stream: StreamLike,
        stream: StreamLike,
    ) -> MixedBatchResult:
        """Check the prefill part and enqueue both; either may be empty. The decode part has been checked."""
        prompts = self._prompts(streams, row_base)
        if prompts:
            together = "streams" if step is None else "seqs, streams"
            self._admission.check_distinct([*seqs, *(one.seq for one in prompts)], together)
        if step is not None:
            copies = self._feed.fed_history(step)
            result = MixedBatchResult(*self._passes.mixed(step, copies, decode_stream, prompts, row_base, stream))
        else:
            result = MixedBatchResult(NULL, self._passes.prefill(prompts, row_base, stream) if prompts else [])
        self._note_prefilled(prompts)
        return result

    def _prefill_one(self, one: PrefillSlice, stream: StreamLike) -> DevicePtr:
        prompt = self._admission.prompt(one, "tokens")
        ptrs = self._passes.prefill([prompt], self._slot_row(prompt.seq), stream)
        self._note_prefilled([prompt])
        return ptrs[0]

    def _slot_row(self, seq: SequenceState) -> int:
        """Return the row that the bare prefill of a live sequence writes, which no decode lane ever does."""
        return self.shape.limits.max_batch + seq.slot_idx

    def _prompts(self, streams: Sequence[PrefillSlice], row_base: int) -> list[Prompt]:
        """Return the checked prompts of slices whose rows begin at ``row_base``."""
        if not streams:
            return []
        rows = self._logits.arena.rows
        expected = f"a row from which {len(streams)} rows lie within the arena's {rows}"
        integer("row_base", row_base, 0, rows - len(streams), expected)
        return [self._admission.prompt(one, f"streams[{index}]") for index, one in enumerate(streams)]

    def _given_or_none(self, tokens: Sequence[int], seqs: Sequence[SequenceState]) -> Step | None:
        """Return the decode part of a mixed step, which may be none."""
        ids = token_ids("decode_tokens", tokens, self.shape.vocab)
        return self._given("decode_tokens", ids, seqs) if ids or len(seqs) else None

    def _given(self, argument: str, tokens: Sequence[int], seqs: Sequence[SequenceState]) -> Step:
        """Return a step whose ids the host knows."""
        ids = token_ids(argument, tokens, self.shape.vocab)
        self._check_lanes(argument, len(ids), seqs)
        batch = self._admission.decodable(seqs)
        self._beams.refuse("decode", batch)  # the ids of beams are on the device alone
        return Step(*batch, np.array(ids), np.full(len(ids), -1))

    def _check_lanes(self, argument: str, count: int, seqs: Sequence[SequenceState]) -> None:
        most = self.shape.limits.max_batch
        if not 1 <= len(seqs) <= most or count != len(seqs):
            got = f"{count} tokens and {len(seqs)} sequences"
            raise InvalidInput(f"{argument}, seqs", f"one token for each of 1 to {most} sequences", got)

    def _note_prefilled(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            prompt.seq.tokens = list(prompt.prefix)
            prompt.seq.seq_len = prompt.seq.prompt_len = len(prompt.prefix)
            self._feed.forget(prompt.seq)
            self._beams.forget(prompt.seq)
            self._columns.waiting[prompt.seq.slot_idx] = NOTHING

    @staticmethod
    def _note_decoded(step: Step | None, seqs: Sequence[SequenceState]) -> None:
        ids = [] if step is None else step.ids.tolist()
        for token, seq in zip(ids, seqs, strict=True):
            seq.tokens.append(token)
            seq.seq_len += 1
