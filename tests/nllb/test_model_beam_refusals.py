# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the single calls of a beam search refuse, and that a refusal changes nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gpu_runtime.pointer import DevicePtr
from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.model import BEAM_DONE_FLAG, BeamParams, FeedSource, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import Case, arena, block, prefilled, results, sampled, saved, state
from tests.nllb.searching import BEAMS, ENDS, SELECTED, begun, fed, finish, select, selected, step, waiting

OTHER = Case([30, 31], 82, 83, [])


@dataclass(frozen=True)
class Try:
    """What a call is made with: a model, a sequence for beams with its row, an ordinary one, and where results go."""

    model: NllbModel
    seq: SequenceState
    row: DevicePtr
    other: SequenceState
    dst: Any
    event: int

    def select(self, rows: list[Any] | None = None, seqs: list[Any] | None = None, **to: Any) -> None:
        rows, seqs = [self.row] if rows is None else rows, [self.seq] if seqs is None else seqs
        dst, event = to.get("dst", self.dst[: len(seqs)]), to.get("event", self.event)
        self.model.select_beams_to_feed(rows, seqs, dst, event)

    def feed(self, *sources: Any, seqs: list[SequenceState] | None = None) -> None:
        self.model.decode_batch_fed(list(sources) or [SELECTED], seqs or [self.seq])

    def begin(self, beams: Any = BEAMS, params: Any = None, **changes: Any) -> None:
        self.model.begin_beams(self.seq, beams, params or replace(ENDS, **changes))

    def adapted(self) -> Try:
        self.seq.adapter_slot = 0
        return self

    def at(self, index: int) -> DevicePtr:
        return self.model.logits_buffer_ptr().offset(index * self.model.logits_row_bytes())


SELECTIONS: dict[str, tuple[Any, str, Callable[[Try], Any]]] = {
    "before begin": (waiting, "has no search", lambda t: t.select()),
    "twice": (selected, "goes on at position 3, and its seq_len is 2", lambda t: t.select()),
    "of an ordinary one": (fed, "has no search", lambda t: t.select([t.row, t.row], [t.seq, t.other])),
    "of none": (fed, "seqs: length", lambda t: t.select([], [])),
    "of one twice": (fed, "one of them twice", lambda t: t.select([t.row] * 2, [t.seq] * 2)),
    "without rows": (fed, "rows: expected one row for each of 1", lambda t: t.select([])),
    "with a row too many": (fed, "rows: expected one row for each of 1", lambda t: t.select([t.row] * 2)),
    "at no row's address": (fed, "address of a logits row", lambda t: t.select([t.row + 4])),
    "at None": (fed, "address of a logits row", lambda t: t.select([None])),
    "past the arena": (fed, "1 to 2 rows from row 6", lambda t: t.select([t.at(6)])),
    "with room for two": (fed, "dst", lambda t: t.select(dst=t.dst)),
    "into floats": (fed, "dst", lambda t: t.select(dst=np.empty(1, np.float32))),
    "into nothing": (fed, "dst", lambda t: t.select(dst=None)),
    "without an event": (fed, "event", lambda t: t.select(event=None)),
}

STEPS: dict[str, tuple[Any, str, Callable[[Try], Any]]] = {
    "before begin": (waiting, "has chosen an id", lambda t: t.feed()),
    "before a selection": (begun, "no ids were selected for position 2", lambda t: t.feed()),
    "without a selection": (fed, "no ids were selected for position 3", lambda t: t.feed()),
    "of another source": (selected, r"sources\[0\]: expected FeedSource", lambda t: t.feed(FeedSource(5))),
    "of no source": (selected, r"sources\[1\]", lambda t: t.feed(FeedSource(9), None, seqs=[t.other, t.seq])),
    "of the host's id": (selected, "decode: .* slot 0 is searched", lambda t: t.model.decode(9, t.seq)),
    "of the host's ids": (selected, "is searched", lambda t: t.model.decode_batch([9, 9], [t.other, t.seq])),
    "mixed, of the host's id": (selected, "is searched", lambda t: t.model.mixed_forward_batch([9], [t.seq], [])),
    "with its own prefill": (
        selected,
        "one of them twice",
        lambda t: t.model.mixed_forward_batch_fed([SELECTED], [t.seq], [PrefillSlice.whole([5], t.seq)]),
    ),
    "with another adapter": (selected, "adapter_slot", lambda t: t.adapted().feed()),
}

RANGE = "max_new_tokens: expected an int from 2 to 8"
BEGINNINGS: dict[str, tuple[Any, str, Callable[[Try], Any]]] = {
    "of an ordinary one": (fed, "not one of alloc_beams", lambda t: t.model.begin_beams(t.other, BEAMS, ENDS)),
    "on the way": (fed, "tokens .* are not known", lambda t: t.begin()),
    "with other beams": (begun, "num_beams: expected 3", lambda t: t.begin(BeamParams(4))),
    "without a limit": (begun, "max_new_tokens", lambda t: t.begin(max_new_tokens=None)),
    "with too little KV": (begun, "has 6 decoder positions .* needs 7", lambda t: t.begin(max_new_tokens=7)),
    "past the limits": (begun, RANGE, lambda t: t.begin(max_new_tokens=9)),
    "for nothing new": (begun, RANGE, lambda t: t.begin(max_new_tokens=1)),
    "at a temperature": (begun, "temperature", lambda t: t.begin(temperature=1.0)),
    "with too many ends": (begun, "eos_ids: expected at most 84", lambda t: t.begin(eos_ids=tuple(range(85)))),
    "with an unknown id": (begun, r"suppress_tokens\[0\]", lambda t: t.begin(suppress_tokens=(97,))),
    "with scores of 0": (begun, "length_penalty", lambda t: t.begin(replace(BEAMS, length_penalty=99.0))),
    "with infinite scores": (begun, "length_penalty", lambda t: t.begin(replace(BEAMS, length_penalty=-99.0))),
    "with numbers past all bounds": (begun, "length_penalty", lambda t: t.begin(BeamParams(3, 9999.0))),
    "with no BeamParams": (begun, "beams: expected a BeamParams", lambda t: t.begin(ENDS)),
    "with no SamplingParams": (begun, "params: expected a SamplingParams", lambda t: t.begin(BEAMS, BEAMS)),
}

OTHERS: dict[str, tuple[Any, str, Callable[[Try], Any]]] = {
    "sampling": (selected, "begin_sampling: .* is searched", lambda t: t.model.begin_sampling(t.seq, ENDS)),
    "a sample": (selected, "sample_batch_to_feed: .* is searched", lambda t: sampled(t.model, t.row, [t.seq])),
    "results before begin": (waiting, "has no search", lambda t: t.model.take_beams(t.seq)),
    "results before a selection": (begun, "nothing was selected", lambda t: t.model.take_beams(t.seq)),
    "results of an ordinary one": (fed, "has no search", lambda t: t.model.take_beams(t.other)),
    "saving": (fed, "save_sequence_state: .* has beams", lambda t: saved(t.model, t.seq)),
    "restoring": (
        waiting,
        "in use",
        lambda t: t.model.restore_sequence_state(t.seq, 0, io.BytesIO(saved(t.model, t.other))),
    ),
    "moving": (selected, "has several beams", lambda t: t.model.compact_sequence(t.seq, 3)),
    "moving to a beam's slot": (selected, "slot 2 is held", lambda t: t.model.compact_sequence(t.other, 2)),
}

TABLES = {"selection": SELECTIONS, "step": STEPS, "beginning": BEGINNINGS, "call": OTHERS}


@pytest.fixture(scope="module")
def expected() -> dict[Any, Any]:
    """What comes of sequences when nothing wrong is asked for, by backend and by how they were begun."""
    return {}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, rows in TABLES.items() for name in rows])
def test_a_refusal_leaves_everything_as_it_was(
    tiny: NllbModel, expected: dict[Any, Any], table: str, name: str
) -> None:
    """Both sequences go on as on a model that was asked for nothing wrong."""
    make, match, call = TABLES[table][name]

    def ask_wrongly(seq: SequenceState, row: DevicePtr, other: SequenceState) -> None:
        before = state(seq), state(other), arena(tiny).tobytes(), block(tiny.gpu, "KV cache")
        with results(tiny, 2) as (dst, event):
            with pytest.raises((InvalidInput, SequenceError), match=match):
                call(Try(tiny, seq, row, other, dst, event))
            assert (dst == -77).all()
        assert (state(seq), state(other), arena(tiny).tobytes(), block(tiny.gpu, "KV cache")) == before
        seq.adapter_slot = -1

    key = type(tiny.gpu), make
    if key not in expected:
        expected[key] = ends(tiny, make, lambda *_: None)
    found = ends(tiny, make, ask_wrongly)
    assert found == expected[key]
    assert len(found[0]) == 1


def ends(
    model: NllbModel, make: Any, meanwhile: Callable[[SequenceState, DevicePtr, SequenceState], None]
) -> tuple[Any, Any, bytes]:
    """Return what a search that ``make`` begins ends in, and an ordinary sequence beside it."""
    seq, row = make(model)
    other = prefilled(model, OTHER)
    meanwhile(seq, row, other)
    if make is waiting:
        model.begin_beams(seq, BEAMS, ENDS)
    if make is selected:
        row = step(model, [seq])
    found = finish(model, seq, row)
    model.begin_sampling(other, SamplingParams(no_repeat_ngram_size=1))
    slot_row = model.logits_buffer_ptr().offset((4 + other.slot_idx) * model.logits_row_bytes())
    ids = sampled(model, slot_row, [other]).ids
    logits = model.copy_logits_to_host(model.decode_batch(ids, [other])).tobytes()
    for one in (seq, other):
        model.free_sequence(one)
    return found, ids, logits


def test_a_search_that_is_at_its_limit(tiny: NllbModel) -> None:
    """Its last selection ends it; one more is refused, as is a step past its KV."""
    seq, row = begun(tiny)
    for _ in range(4):
        select(tiny, [row], [seq])
        row = step(tiny, [seq])
    assert select(tiny, [row], [seq])[0] & BEAM_DONE_FLAG
    with pytest.raises(SequenceError, match="is full: it has 6 decoder positions"):
        step(tiny, [seq])
    seq.seq_len += 1
    for call in (lambda: select(tiny, [row], [seq]), lambda: step(tiny, [seq])):
        with pytest.raises(SequenceError, match="6 decoder positions"):
            call()
    seq.seq_len -= 1
    assert len(tiny.take_beams(seq)) == 1


def test_a_selection_past_the_limit_where_there_is_kv(tiny: NllbModel) -> None:
    seq, row = waiting(tiny)
    tiny.begin_beams(seq, BEAMS, replace(ENDS, max_new_tokens=2))
    assert select(tiny, [row], [seq])[0] & BEAM_DONE_FLAG
    row = step(tiny, [seq])
    with pytest.raises(SequenceError, match="slot 0 is at its limit"):
        select(tiny, [row], [seq])


def test_a_selection_is_not_captured(tiny: NllbModel) -> None:
    seq, row = begun(tiny)
    stream = tiny.create_stream()
    with results(tiny, 1) as (dst, event):
        tiny.gpu.begin_capture(stream)
        with pytest.raises(NotSupported, match="capture"):
            tiny.select_beams_to_feed([row], [seq], dst, event, stream)
        with pytest.raises(NotSupported, match="capture"):
            tiny.begin_beams(seq, BEAMS, ENDS, stream)
        tiny.gpu.end_capture(stream)
    tiny.destroy_stream(stream)
