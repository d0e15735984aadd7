# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on beam searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.errors import DeviceError
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checks import integer, listed
from metrale.errors import SequenceError
from metrale.model import BeamParams, BeamReq, Hypothesis, SamplingParams, SequenceState
from metrale.nllb.admission import FRAME_LEN, PREFIX_LEN
from metrale.nllb.beam_batch import BeamBatch
from metrale.nllb.checks import token_id, token_ids
from metrale.nllb.feed_calls import FeedCalls


class BeamCalls(FeedCalls):
    """`metrale.model.ModelBeams`, and the whole searches of `metrale.model.ModelForward`."""

    def supports_beam(self) -> bool:
        return True

    def alloc_beams(self, num_beams: int, source_tokens: int, target_tokens: int) -> SequenceState:
        """Claim a slot for each beam, and KV for one source and a target for each beam.

        What the model's limits do not allow is cut to them.
        """
        limits = self.shape.limits
        beams = integer("num_beams", num_beams, 1, self.shape.most_beams)
        source = min(integer("source_tokens", source_tokens, FRAME_LEN), limits.max_source_len)
        target = min(integer("target_tokens", target_tokens, PREFIX_LEN), limits.target_positions)
        with self._lock:
            self._check_open()
            return self._table.alloc(source + beams * target, slots=beams, beam_positions=target)

    def begin_beams(
        self, seq: SequenceState, beams: BeamParams, params: SamplingParams, stream: StreamLike = 0
    ) -> None:
        with self._lock:
            self._check_open()
            span = self._admission.prefilled("begin_beams", seq)
            if not span.beam_positions:
                raise SequenceError(f"begin_beams: the sequence in slot {seq.slot_idx} is not one of alloc_beams")
            if len(seq.tokens) != seq.seq_len:
                raise SequenceError(f"begin_beams: the tokens of the sequence in slot {seq.slot_idx} are not known")
            room = self._admission.target_positions(span)
            self._beams.begin(seq, span.slots, room, beams, params, stream)

    def select_beams_to_feed(
        self,
        rows: Sequence[DevicePtr],
        seqs: Sequence[SequenceState],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
    ) -> None:
        with self._lock:
            self._check_open()
            integer("seqs: length", len(seqs), 1)
            batch = self._admission.all_prefilled("select_beams_to_feed", seqs)
            self._beams.select(rows, seqs, batch, dst, event, stream)

    def take_beams(self, seq: SequenceState) -> list[Hypothesis]:
        with self._lock:
            self._check_open()
            self._table.span(seq)
            return self._beams.take(seq)

    def generate_beams(self, reqs: Sequence[BeamReq]) -> list[list[Hypothesis]]:
        """Run a whole search for each request, as many at a time as there is room for; return what each found.

        The lock is held for one step at a time, so other callers are served in between.

        Returns
        -------
        list of list of Hypothesis
            The best first, at most ``num_return_sequences``; fewer when the search found no more. With one beam, the
            greedy result, whose score is NaN.

        Raises
        ------
        InvalidInput
            When a request is wrong, or too large for the model; nothing has been run. Also when a request ends without
            a result because every id is forbidden, or ``length_penalty`` takes every score below -1e9; then the others
            have been run, and their results are lost.
        NoFreeSlot, OutOfMemory
            When other callers hold what a request needs, and it is the first.
        NonFiniteLogits
            When a request's logits hold a NaN or an infinity; ``rows`` are the requests' places. The others have been
            run, and their results are lost.
        """
        self._check_open()
        wanted = listed("reqs", reqs, "a sequence of BeamReq")
        try:
            return BeamBatch(self, wanted, self.languages.target, self._check_request).run()
        except DeviceError:
            self._check_open()  # a backend that is the model's own ended with it
            raise

    def _check_request(self, req: BeamReq, beams: BeamParams, params: SamplingParams) -> None:
        """Refuse what a forward or the beginning of a choice would refuse when others are under way."""
        vocab = self.shape.vocab
        for name in ("prompt_tokens", "prefix_tokens"):
            token_ids(name, getattr(req, name), vocab)
        for name in ("src_lang_id", "tgt_lang_id"):
            token_id(name, getattr(req, name), vocab)
        if beams.num_beams > 1:
            self._beams.check(beams, params)
        else:
            self._rules.check(params)
        with self._lock:
            self._check_open()
            self._adapters.check(req.adapter_slot)

    def generate_beam_batch(self, reqs: Sequence[BeamReq]) -> list[list[int]]:
        return [found[0].ids for found in self.generate_beams(reqs)]
