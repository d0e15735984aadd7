# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on sequences: slots, KV, and sequences as bytes."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

from metrale.checks import integer
from metrale.errors import InvalidInput, SequenceError
from metrale.model import Capacity, SequenceState
from metrale.nllb.admission import FRAME_LEN, PREFIX_LEN
from metrale.nllb.core import NllbCore
from metrale.nllb.slots import Batch
from metrale.nllb.swap import SavedSequence


class LifecycleCalls(NllbCore):
    """`metrale.model.ModelLifecycle`, apart from the model's own end."""

    def alloc_sequence(self) -> SequenceState:
        return self.alloc_sequence_for(self.shape.limits.positions)

    def alloc_sequence_for(self, budget_tokens: int) -> SequenceState:
        """Claim a slot, and KV for ``budget_tokens`` tokens in all.

        A sequence's tokens are its source (with language and EOS) and what its decoder consumes (with the start token
        and the language); more than the model's limits allow is cut to them.
        """
        least = FRAME_LEN + PREFIX_LEN
        budget = integer("budget_tokens", budget_tokens, least)
        with self._lock:
            self._check_open()
            return self._table.alloc(min(budget, self.shape.limits.positions))

    def cache_sequence(self, seq: SequenceState) -> None:
        """Do nothing: a translation's prefix is never met again."""

    def free_sequence(self, seq: SequenceState) -> None:
        with self._lock:
            if self._teardown is not None and self._table.owns(seq):
                self._feed.forget(seq)
                self._beams.forget(seq)
                self._table.free(seq)

    def compact_sequence(self, seq: SequenceState, new_slot: int) -> None:
        """Move ``seq`` to ``new_slot``. Its KV stays in place, found by the new slot from here on.

        Raises
        ------
        SequenceError
            When ``seq`` is not live, has several beams or is searched, or when another live sequence holds
            ``new_slot``: free or detach that first.
        InvalidInput
            When there is no such slot.
        """
        with self._lock:
            self._check_open()
            slot = self._table.vacant(seq, new_slot)
            self._beams.refuse("compact_sequence", Batch.of([seq]))
            if slot != seq.slot_idx:
                self._feed.move(seq, slot)
                self._table.move(seq, slot)

    def detach_slot_for_reuse(self, seq: SequenceState) -> None:
        """Release what ``seq`` holds, as `free_sequence` does.

        Raises
        ------
        SequenceError
            When ``seq`` holds a slot of another model: detaching it here would lose that slot.
        """
        with self._lock:
            if self._teardown is not None and not self._table.owns(seq) and not seq.is_detached:
                raise SequenceError(f"detach_slot_for_reuse: slot {seq.slot_idx} is not held for seq by this model")
            self.free_sequence(seq)
            seq.slot_idx = SequenceState.DETACHED

    def save_sequence_state(self, seq: SequenceState, writer: BinaryIO) -> None:
        """Write what ``seq`` is, and its keys and values, to ``writer``; waits for the work that fills them.

        Raises
        ------
        SequenceError
            When ``seq`` is not live, has not been prefilled, comes from `alloc_beams`, or has tokens that are not known
            yet (those of fed steps that have not been appended).
        """
        with self._lock:
            self._check_open()
            span = self._admission.prefilled("save_sequence_state", seq)
            if span.beam_positions:
                raise SequenceError(f"save_sequence_state: the sequence in slot {seq.slot_idx} has beams")
            if len(seq.tokens) != seq.seq_len:
                raise SequenceError(f"save_sequence_state: not all tokens of slot {seq.slot_idx}'s sequence are known")
            kv = np.empty((span.source_len + seq.seq_len) * self.shape.position_bytes, dtype=np.uint8)
            self._passes.await_span(span, 0)
            self.gpu.copy_d2h_on_stream(span.ptr, kv)
            languages = seq.src_lang_id, seq.tgt_lang_id
            adapter = self._adapters.digest(span.adapter)
            saved = SavedSequence(list(seq.tokens), seq.prompt_len, *languages, span.source_len, adapter, kv.tobytes())
        saved.write(self.shape, writer)

    def restore_sequence_state(self, seq: SequenceState, num_blocks: int, reader: BinaryIO) -> None:
        """Read back what `save_sequence_state` wrote, of this model or another of the same layout.

        The copy to the device is enqueued, and the next forward comes after it. How ids are chosen is not part of the
        state: `begin_sampling` sets it again. Nor is the adapter, but for what tells it apart: the slot where it is
        resident, now and here, is ``seq.adapter_slot``.

        Raises
        ------
        InvalidInput
            When ``num_blocks`` is not 0, the bytes are damaged or of another layout, or ``seq.adapter_slot`` has
            another adapter than the one that the keys and values were made with. ``seq`` is as it was.
        SequenceError
            When ``seq`` is not live, not fresh, or too small for the state.
        """
        integer("num_blocks", num_blocks, 0, 0, "0, as the KV is not paged")
        with self._lock:
            self._check_open()
            self._table.span(seq)
            saved = SavedSequence.read(self.shape, reader)  # first: the reader may be somebody's code
            span = self._table.span(seq)
            if seq.seq_len or span.beam_positions:
                raise SequenceError(f"restore_sequence_state: the sequence in slot {seq.slot_idx} is in use already")
            needed = saved.source_len + len(saved.tokens)
            if needed > span.positions:
                raise SequenceError(
                    f"restore_sequence_state: the state has {needed} tokens, and the sequence in slot {seq.slot_idx} "
                    f"was allocated for {span.positions}"
                )
            if self._adapters.digest(seq.adapter_slot) != saved.adapter:
                what = "the slot of the adapter that made the state" if saved.adapter else "-1, as no adapter made it"
                raise InvalidInput("adapter_slot", what, seq.adapter_slot)
            self._passes.fill(span, saved.kv, 0)
            span.source_len, span.adapter = saved.source_len, seq.adapter_slot
            self._columns.filled(span)
            seq.tokens, seq.seq_len, seq.prompt_len = saved.tokens, len(saved.tokens), saved.prompt_len
            seq.src_lang_id, seq.tgt_lang_id = saved.src_lang_id, saved.tgt_lang_id

    def capacity(self) -> Capacity:
        limits = self.shape.limits
        return Capacity(
            max_sequences=limits.max_batch,
            max_prompt_tokens=limits.max_source_len - FRAME_LEN,
            max_new_tokens=limits.max_new_tokens,
            prompt_overhead=FRAME_LEN,
            kv_positions=self._pool.capacity,
            eos_ids=frozenset(self.config.generation.eos_token_id),
            needs_src_lang=self.languages.source is None,
            needs_tgt_lang=self.languages.target is None,
            max_beams=self.shape.most_beams,
        )

    def device_bytes(self) -> int:
        return 0 if self._teardown is None else self.gpu.live_bytes()

    def kv_usage(self) -> tuple[int, int]:
        with self._lock:
            return self._pool.used * self.shape.position_bytes, self._pool.capacity * self.shape.position_bytes

    def num_free_blocks(self) -> int:
        """Return 2**20: the KV is not paged, so there are no blocks to run out of."""
        return 1 << 20
