# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on the token feed: steps whose ids are chosen and taken in on the device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checks import integer
from metrale.errors import SequenceError
from metrale.model import FeedSource, MixedBatchResult, PrefillSlice, RowMask, SamplingParams, SequenceState
from metrale.nllb.forward_calls import ForwardCalls
from metrale.nllb.slots import Batch, Step

_IS_SAMPLED: Final = attrgetter("sampled")


class FeedCalls(ForwardCalls):
    """`metrale.model.ModelDeviceFeed`, apart from streams and events."""

    def supports_device_token_feed(self) -> bool:
        return True

    def decode_batch_fed(
        self, sources: Sequence[FeedSource], seqs: Sequence[SequenceState], stream: StreamLike = 0
    ) -> DevicePtr:
        """Run one step whose sequences take their ids from ``sources``. Raises as `decode_batch` does.

        InvalidInput also when no id has been chosen for a source. Rows are in the order of the sequences, each of which
        has one, or one for each beam when it is searched with beams.
        """
        with self._lock:
            self._check_open()
            self._check_lanes("sources", len(sources), seqs)
            step = self._fed(sources, seqs)
            return self._passes.decode(step, stream, self._feed.fed_history(step))

    def mixed_forward_batch_fed(
        self,
        sources: Sequence[FeedSource],
        decode_seqs: Sequence[SequenceState],
        prefill_streams: Sequence[PrefillSlice],
        stream: StreamLike = 0,
    ) -> MixedBatchResult:
        with self._lock:
            self._check_open()
            step = None
            if len(sources) or len(decode_seqs):
                self._check_lanes("sources", len(sources), decode_seqs)
                step = self._fed(sources, decode_seqs)
            rows = 0 if step is None else len(step.slots)
            return self._mixed(step, decode_seqs, prefill_streams, rows, 0, stream)

    def _fed(self, sources: Sequence[FeedSource], seqs: Sequence[SequenceState]) -> Step:
        """Return a step whose ids come from ``sources``: from the cells of all rows, as a rule."""
        batch = self._admission.decodable(seqs)
        is_plain = {*map(type, sources)} == {FeedSource} and all(map(_IS_SAMPLED, sources))
        if is_plain and self._columns.waiting_at(batch).all():
            return self._columns.step(batch)
        rows: list[tuple[int, int, int, int]] = []
        for index, (source, seq) in enumerate(zip(sources, seqs, strict=True)):
            argument = f"sources[{index}]"
            if self._beams.searches(seq):
                self._beams.check_fed(source, seq, argument)
                slots = self._table.members(seq)
                rows += [(slot, seq.seq_len, 0, int(self._columns.cells[slot])) for slot in slots]
            else:
                cell = self._feed.cell(source, seq, argument)
                rows.append((seq.slot_idx, seq.seq_len, source.token or 0, cell))
        return Step(*np.array(rows).T)

    def argmax_batch_to_feed(
        self,
        logits: DevicePtr,
        masks: Sequence[RowMask],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
    ) -> None:
        with self._lock:
            self._check_open()
            integer("masks: length", len(masks), 1)
            self._feed.argmax(logits, masks, dst, event, stream)

    def begin_sampling(self, seq: SequenceState, params: SamplingParams, stream: StreamLike = 0) -> None:
        with self._lock:
            self._check_open()
            self._admission.prefilled("begin_sampling", seq)
            if len(seq.tokens) != seq.seq_len:
                raise SequenceError(f"begin_sampling: the tokens of the sequence in slot {seq.slot_idx} are not known")
            self._beams.refuse("begin_sampling", Batch.of([seq]))
            self._feed.begin(seq, params, stream)

    def sample_batch_to_feed(
        self,
        logits: DevicePtr,
        seqs: Sequence[SequenceState],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
        *,
        logprobs: bool = False,
        untouched: bool = False,
    ) -> None:
        with self._lock:
            self._check_open()
            integer("seqs: length", len(seqs), 1)
            batch = self._admission.all_prefilled("sample_batch_to_feed", seqs)
            self._beams.refuse("sample_batch_to_feed", batch)
            self._feed.sample(logits, seqs, batch, dst, event, stream, logprobs, untouched)

    def reserve_decode_block(self, seq: SequenceState) -> int:
        """Return 0: a sequence has the KV of all its positions from the start."""
        self._table.span(seq)
        return 0

    def release_decode_blocks(self, seq: SequenceState, n: int) -> None:
        """Check the arguments, and do nothing: no blocks are ever reserved."""
        self._table.span(seq)
        integer("n", n, 0)
