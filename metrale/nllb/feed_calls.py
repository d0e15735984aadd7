# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on the token feed: steps whose ids are chosen and taken in on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checks import integer
from metrale.errors import SequenceError
from metrale.model import FeedSource, MixedBatchResult, PrefillSlice, RowMask, SamplingParams, SequenceState
from metrale.nllb.decoder import Feed
from metrale.nllb.forward_calls import ForwardCalls


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
            feeds, owners = self._fed(sources, seqs)
            return self._passes.decode(feeds, stream, self._feed.fed_history(feeds, owners))

    def mixed_forward_batch_fed(
        self,
        sources: Sequence[FeedSource],
        decode_seqs: Sequence[SequenceState],
        prefill_streams: Sequence[PrefillSlice],
        stream: StreamLike = 0,
    ) -> MixedBatchResult:
        with self._lock:
            self._check_open()
            feeds: list[Feed] = []
            owners: list[SequenceState] = []
            if len(sources) or len(decode_seqs):
                self._check_lanes("sources", len(sources), decode_seqs)
                feeds, owners = self._fed(sources, decode_seqs)
            return self._mixed(feeds, owners, prefill_streams, len(feeds), 0, stream)

    def _fed(
        self, sources: Sequence[FeedSource], seqs: Sequence[SequenceState]
    ) -> tuple[list[Feed], list[SequenceState]]:
        """Return what each row of a fed step feeds, and the sequence that it belongs to."""
        spans = self._admission.decodable(seqs)
        feeds: list[Feed] = []
        owners: list[SequenceState] = []
        for index, (source, seq, span) in enumerate(zip(sources, seqs, spans, strict=True)):
            if self._beams.searches(seq):
                beams = self._beams.feeds(source, seq, span, f"sources[{index}]")
                feeds += beams
                owners += [seq] * len(beams)
            else:
                cell = self._feed.cell(source, seq, index)
                feeds.append(Feed((source.token or 0,), seq.seq_len, span, cell))
                owners.append(seq)
        return feeds, owners

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
            self._beams.refuse("begin_sampling", seq)
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
    ) -> None:
        with self._lock:
            self._check_open()
            integer("seqs: length", len(seqs), 1)
            self._admission.check_prefilled("sample_batch_to_feed", seqs)
            for seq in seqs:
                self._beams.refuse("sample_batch_to_feed", seq)
            self._admission.check_distinct(seqs, "seqs")
            self._feed.sample(logits, seqs, dst, event, stream, logprobs)

    def reserve_decode_block(self, seq: SequenceState) -> int:
        """Return 0: a sequence has the KV of all its positions from the start."""
        self._table.span(seq)
        return 0

    def release_decode_blocks(self, seq: SequenceState, n: int) -> None:
        """Check the arguments, and do nothing: no blocks are ever reserved."""
        self._table.span(seq)
        integer("n", n, 0)
