# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam searches by the model's single calls: what `generate_beams` finds must be what these find."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale import BeamReq, Hypothesis
from metrale.errors import NoFreeSlot
from metrale.model import (
    BEAM_DONE_FLAG,
    BeamParams,
    FeedSource,
    PrefillSlice,
    SamplingParams,
    SequenceState,
)
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import results, sampled

SELECTED = FeedSource(sampled=True)
BEAMS = BeamParams(3)
ENDS = SamplingParams(eos_ids=(2,), max_new_tokens=6)


def opened(model: NllbModel, req: BeamReq) -> SequenceState:
    """Return a new sequence with what a request needs; one beam is an ordinary sequence."""
    given = len(req.prefix_tokens)
    source, target = len(req.prompt_tokens) + 2, max(req.max_new + (given + 1 if given else 0), 2)
    if req.num_beams == 1:
        seq = model.alloc_sequence_for(source + target)
    else:
        seq = model.alloc_beams(req.num_beams, source, target)
    seq.src_lang_id, seq.tgt_lang_id = req.src_lang_id, req.tgt_lang_id
    seq.adapter_slot, seq.prefix_tokens = req.adapter_slot, tuple(req.prefix_tokens)
    return seq


def prefilled_for(model: NllbModel, req: BeamReq) -> tuple[SequenceState, DevicePtr]:
    """Return a new sequence that has taken in a request's source, and its row of logits."""
    seq = opened(model, req)
    return seq, model.prefill(list(req.prompt_tokens), seq)


def search(
    model: NllbModel, beams: BeamParams = BEAMS, params: SamplingParams = ENDS, *, source: Sequence[int] = (5, 6, 7)
) -> tuple[SequenceState, DevicePtr]:
    """Return a new sequence whose search has begun, and its row of logits."""
    limit = params.max_new_tokens
    assert limit is not None
    seq = model.alloc_beams(beams.num_beams, len(source) + 2, limit)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    row = model.prefill(list(source), seq)
    model.begin_beams(seq, beams, params)
    return seq, row


def select(
    model: NllbModel, rows: Sequence[DevicePtr], seqs: Sequence[SequenceState], stream: StreamLike = 0
) -> list[int]:
    """Make one selection for each search, wait, and return what became of them."""
    with results(model, len(seqs)) as (dst, event):
        model.select_beams_to_feed(rows, seqs, dst, event, stream)
        model.event_synchronize(event)
        flags: list[int] = dst.tolist()
    return flags


def step(model: NllbModel, seqs: Sequence[SequenceState], stream: StreamLike = 0) -> DevicePtr:
    """Feed what was chosen to all sequences, and count it."""
    base = model.decode_batch_fed([SELECTED] * len(seqs), seqs, stream)
    for seq in seqs:
        seq.seq_len += 1
    return base


def finish(model: NllbModel, seq: SequenceState, row: DevicePtr) -> list[Hypothesis]:
    """Go on with a search that has the model for itself to its end; return what it found. The sequence lives on."""
    while not select(model, [row], [seq])[0] & BEAM_DONE_FLAG:
        row = step(model, [seq])
    return model.take_beams(seq)


def alone(model: NllbModel, req: BeamReq) -> list[Hypothesis]:
    """Return what a request finds on a model that nobody else uses."""
    params = req.sampling_params(tuple(sorted(model.capacity().eos_ids)))
    if req.max_new == 1 and not len(req.prefix_tokens):
        return [Hypothesis([req.tgt_lang_id], math.nan if req.num_beams == 1 else 0.0, [0.0])]
    seq, row = prefilled_for(model, req)
    if req.num_beams == 1:
        found = [_greedy(model, req, params, seq, row)]
    else:
        model.begin_beams(seq, req.beam_params(), params)
        found = finish(model, seq, row)
    model.free_sequence(seq)
    return found


def _greedy(model: NllbModel, req: BeamReq, params: SamplingParams, seq: SequenceState, row: DevicePtr) -> Hypothesis:
    ids = list(seq.tokens[1:])
    logprobs = [0.0] * len(ids)
    most = req.max_new + (len(ids) if len(req.prefix_tokens) else 0)
    model.begin_sampling(seq, params)
    while True:
        choice = sampled(model, row, [seq], logprobs=True)
        assert choice.flags == [0]
        ids += choice.ids
        logprobs += choice.logprobs.tolist()
        if ids[-1] in params.eos_ids or len(ids) == most:
            return Hypothesis(ids, math.nan, logprobs)
        row = step(model, [seq])


def rows_after(model: NllbModel, base: DevicePtr, widths: Sequence[int]) -> list[DevicePtr]:
    """Return where each sequence's rows begin, of a step whose sequences have so many."""
    starts = np.cumsum([0, *widths[:-1]]).tolist()
    return [base.offset(start * model.logits_row_bytes()) for start in starts]


def whole(req: BeamReq, seq: SequenceState) -> PrefillSlice:
    return PrefillSlice.whole(tuple(req.prompt_tokens), seq)


def same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> bool:
    """Return whether hypotheses are equal to the bit; a greedy one's score is NaN."""
    return [_bits(one) for one in found] == [_bits(one) for one in expected]


def _bits(one: Hypothesis) -> tuple[Any, ...]:
    return one.ids, np.float64(one.score).tobytes(), one.logprobs


@contextmanager
def nothing_left(model: NllbModel) -> Iterator[None]:
    """Check that everything of the model that was free before is free afterwards."""

    def held() -> tuple[Any, ...]:
        slots: list[SequenceState] = []
        try:
            while True:
                slots.append(model.alloc_sequence_for(4))
        except (NoFreeSlot, OutOfMemory):
            free = len(slots)
        finally:
            for seq in slots:
                model.free_sequence(seq)
        return model.kv_usage()[0], free, model.device_bytes()

    before = held()
    yield
    assert held() == before


# sequences on the way, each with its row of logits


def waiting(model: NllbModel) -> tuple[SequenceState, DevicePtr]:
    """One for beams that has been prefilled, and that is all."""
    seq = model.alloc_beams(BEAMS.num_beams, 5, 6)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    return seq, model.prefill([5, 6, 7], seq)


def begun(model: NllbModel) -> tuple[SequenceState, DevicePtr]:
    """One whose search has begun."""
    return search(model)


def selected(model: NllbModel) -> tuple[SequenceState, DevicePtr]:
    """One for which ids were selected."""
    seq, row = search(model)
    select(model, [row], [seq])
    return seq, row


def fed(model: NllbModel) -> tuple[SequenceState, DevicePtr]:
    """One whose beams were fed."""
    seq, _ = selected(model)
    return seq, step(model, [seq])
