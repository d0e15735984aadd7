# SPDX-License-Identifier: MIT OR Apache-2.0
"""The columns that steps gather from, in step with the sequences whatever becomes of them; batches that are refused."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale.errors import InvalidInput
from metrale.model import BEAM_DONE_FLAG, GREEDY, BeamParams, FeedSource, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.fed import ADAPTERS, ANCESTRY, BEAM_POSITIONS, COUNTS, CROSS_LENGTHS, SPANS
from metrale.nllb.model import NllbModel
from metrale.nllb.slots import ANYWHERE, NOTHING
from metrale.nllb.workspace import DECODER_COLUMNS, Table, table_layout
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.draws import draws
from tests.nllb.decoding import Case, prefilled, sampled, state
from tests.nllb.searching import finish, search, select, step

SLOTS = 6
CASE = Case([5, 6, 7], 80, 81, [])
SAMPLED = FeedSource(sampled=True)
WARM = SamplingParams(temperature=0.8, repetition_penalty=1.2)
ENDS = SamplingParams(eos_ids=(2,), max_new_tokens=6)


def check_columns(model: NllbModel) -> None:
    """Compare the columns with the live sequences and their spans, which are asked one by one."""
    columns, live, searches = model._columns, model._table._live, 0
    for slot in range(model.shape.limits.max_batch):
        if slot not in live:
            assert columns.ancestry[slot] == -1
            assert columns.rows([slot]) == [(slot,)]
            assert model._feed._asks[slot] == 1, "nothing is left of whoever was there"
            continue
        seq, span = live[slot]
        is_searched, home = model._beams.searches(seq), seq.slot_idx
        assert columns.ancestry[slot] == (slot if is_searched else -1)
        assert span.slots == model._table.members(seq)
        if slot == home:
            searches += is_searched
            assert columns.rows([slot]) == [span.slots if is_searched else (slot,)]
            assert columns.room[slot] == (min(span.target_room, 9) if span.source_len else 0)
        if span.source_len:
            spans = (span.target(), span.target(span.slots.index(slot)), int(span.ptr))
            assert columns._spans[:, slot].tolist() == list(spans)
            counts = columns._counts[[CROSS_LENGTHS, BEAM_POSITIONS, ADAPTERS, ANCESTRY], slot].tolist()
            assert counts == [span.source_len, span.beam_positions, span.adapter, slot if is_searched else -1]
    assert columns._searches == searches


class Life:
    """Sequences to which anything happens, one thing after the other."""

    def __init__(self, model: NllbModel, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.seqs: list[SequenceState] = []

    def _room(self) -> int:
        return SLOTS - len(self.model._table)

    def _some(self, searched: bool) -> list[SequenceState]:
        some = [
            seq
            for seq in self.seqs
            if self.model._beams.searches(seq) == searched and seq.seq_len < self.model._columns.room[seq.slot_idx]
        ]
        return self.random.sample(some, self.random.randint(0, len(some)))

    def row(self, seq: SequenceState) -> Any:
        base = self.model.logits_buffer_ptr()
        return base.offset((SLOTS + seq.slot_idx) * self.model.logits_row_bytes())

    def begin(self) -> None:
        with suppress(OutOfMemory):  # what is free may lie in pieces, between searches of several widths
            self._begin()

    def _begin(self) -> None:
        if self._room():
            self.seqs.append(prefilled(self.model, CASE))
            if self.random.random() < 0.5:
                self.model.begin_sampling(self.seqs[-1], WARM)
            sampled(self.model, self.row(self.seqs[-1]), self.seqs[-1:])

    def begin_beams(self) -> None:
        with suppress(OutOfMemory):
            self._begin_beams()

    def _begin_beams(self) -> None:
        width = self.random.randint(2, 3)
        if self._room() >= width:
            seq, row = search(self.model, BeamParams(width), ENDS)
            self.seqs.append(seq)
            if self.random.random() < 0.8:
                select(self.model, [row], [seq])

    def free(self) -> None:
        if self.seqs:
            self.model.free_sequence(self.seqs.pop(self.random.randrange(len(self.seqs))))

    def again(self) -> None:
        if self.seqs:
            self.model.prefill([9, 10], self.random.choice(self.seqs))

    def move(self) -> None:
        movable = [one for one in self.seqs if len(self.model._table.members(one)) == 1]
        vacant = [slot for slot in range(SLOTS) if slot not in self.model._table._live]
        if movable and vacant:
            self.model.compact_sequence(self.random.choice(movable), self.random.choice(vacant))

    def swap(self) -> None:
        plain = [
            one for one in self.seqs if len(self.model._table.members(one)) == 1 and one.seq_len == len(one.tokens)
        ]
        if plain:
            old, data = self.random.choice(plain), io.BytesIO()
            self.model.save_sequence_state(old, data)
            self.model.free_sequence(old)
            self.seqs.remove(old)
            self.seqs.append(self.model.alloc_sequence())
            check_columns(self.model)
            self.model.restore_sequence_state(self.seqs[-1], 0, io.BytesIO(data.getvalue()))

    def step(self) -> None:
        """Feed what waits, and choose what comes after it."""
        some = [seq for seq in self._some(False) if self.model._columns.waiting[seq.slot_idx] == ANYWHERE]
        if some:
            sampled(self.model, step(self.model, some), some)

    def step_beams(self) -> None:
        waiting = self.model._columns.waiting
        some = [seq for seq in self._some(True) if waiting[seq.slot_idx] == seq.seq_len < 6]
        if some:
            base, rows, row = step(self.model, some), [], 0
            for seq in some:
                rows.append(base.offset(row * self.model.logits_row_bytes()))
                row += len(self.model._table.members(seq))
            select(self.model, rows, some)


@host_only
@pytest.mark.parametrize("seed", draws(range(20), 5))
def test_columns_follow_whatever_becomes_of_sequences(make_tiny: MakeModel, seed: int) -> None:
    model = make_tiny(max_batch=SLOTS)
    life = Life(model, seed)
    acts = (life.begin, life.begin_beams, life.begin_beams, life.free, life.again, life.move, life.swap)
    for _ in range(60):
        life.random.choice((*acts, life.step, life.step_beams))()
        check_columns(model)
    while life.seqs:
        life.free()
        check_columns(model)


def test_a_slot_that_is_held_anew_knows_nothing_of_its_former_sequence(tiny: NllbModel) -> None:
    old = prefilled(tiny, CASE)
    tiny.begin_sampling(old, WARM)
    sampled(tiny, tiny.logits_buffer_ptr(), [old])
    assert tiny._columns.waiting[0] == ANYWHERE
    tiny.free_sequence(old)
    seq = tiny.alloc_sequence()
    assert (seq.slot_idx, tiny._columns.waiting[0], tiny._columns.room[0]) == (0, NOTHING, 0)
    seq.seq_len = 3
    with pytest.raises(Exception, match="the sequence in slot 0 has not been prefilled"):
        tiny.decode_batch_fed([SAMPLED], [seq])


def test_what_is_known_of_a_slot_goes_with_its_sequence(tiny: NllbModel) -> None:
    seq = prefilled(tiny, CASE)
    tiny.begin_sampling(seq, WARM)
    sampled(tiny, tiny.logits_buffer_ptr(), [seq])
    columns, feed = tiny._columns, tiny._feed
    feed._seeds[0], feed._late[0] = 11, (1, 2, 3, 4, 5)
    kept: list[np.ndarray] = [feed._counts[:, 1:7], feed._late, feed._settings, feed._seeds]
    before = [values[0].tolist() for values in kept]
    tiny.compact_sequence(seq, 3)
    assert [values[3].tolist() for values in kept] == before
    assert (columns.fresh[3], columns.waiting[3], columns.room[3]) == (True, ANYWHERE, 9)
    step(tiny, [seq])
    assert not columns.fresh[3], "a step has come after its prefill"
    assert feed._counts[3, [0, 7]].tolist() == [3, columns.cells[3]]
    assert feed._asks[0] == 1, "nothing is left where it was"


@pytest.mark.parametrize("width", [1, 2])
def test_what_one_of_a_batch_asks_for_concerns_it_alone(tiny: NllbModel, width: int) -> None:
    """Most steps pass over what nobody asks for; where one does, the others get what they get alone."""
    asked = [
        GREEDY,
        SamplingParams(max_new_tokens=4, forced_eos_id=9),
        SamplingParams(min_new_tokens=6, eos_ids=(*range(2, 97, 2),)),
    ]
    asked += [SamplingParams(suppress_tokens=(*range(0, 97, 2),)), SamplingParams(bad_words=((3, 4), (5,)))]
    alone = [_chosen(tiny, [one])[0] for one in asked]
    assert _chosen(tiny, asked[:width] + asked[3:]) == alone[:width] + alone[3:]
    assert _chosen(tiny, asked[1:]) == alone[1:]
    assert alone[1][2] == 9 != alone[0][2]
    assert all(token % 2 for token in (*alone[2][:4], *alone[3]))


def _chosen(model: NllbModel, asked: list[SamplingParams]) -> list[list[int]]:
    """Return the ids that sequences choose together in some steps."""
    seqs = [prefilled(model, CASE) for _ in asked]
    base = model.prefill_batch_chunk([PrefillSlice.whole(CASE.tokens, seq) for seq in seqs])[0]
    for seq, params in zip(seqs, asked, strict=True):
        if params != GREEDY:
            model.begin_sampling(seq, params)
    first = sampled(model, base, seqs).ids
    found = [first, *(sampled(model, step(model, seqs), seqs).ids for _ in range(5))]
    for seq in seqs:
        model.free_sequence(seq)
    return [list(ids) for ids in zip(*found, strict=True)]


def test_searches_at_different_places_concern_each_other_in_nothing(make_tiny: MakeModel) -> None:
    """One begins when another is at its limit and a third withholds EOS; all in one selection."""
    model = make_tiny(max_batch=8)
    asked = [
        (BeamParams(2, 0.5), SamplingParams(eos_ids=(2,), max_new_tokens=4, forced_eos_id=9)),
        (BeamParams(3, -1.0), SamplingParams(eos_ids=(*range(2, 97, 2),), max_new_tokens=8, min_new_tokens=5)),
        (
            BeamParams(3, 2.0, True),
            SamplingParams(eos_ids=(2, 4), max_new_tokens=7, repetition_penalty=1.5, forced_eos_id=11),
        ),
    ]
    alone = []
    for beams, params in asked:
        seq, row = search(model, beams, params)
        alone.append(finish(model, seq, row))
        model.free_sequence(seq)
    live: list[SequenceState] = []
    found = {}
    for turn in range(12):
        base: DevicePtr = step(model, live) if live else model.logits_buffer_ptr()
        rows: list[DevicePtr] = []
        place = 0
        for seq in live:
            rows.append(base.offset(place * model.logits_row_bytes()))
            place += len(model._table.members(seq))
        if turn in (0, 1, 2):
            seq, at = search(model, *asked[turn])
            live, rows = [seq, *live], [at, *rows]
        flags = select(model, rows, live) if live else []
        for seq, flag in zip(list(live), flags, strict=True):
            if flag & BEAM_DONE_FLAG:
                found[seq.slot_idx] = model.take_beams(seq)
                live.remove(seq)
    for slot, one in zip(sorted(found), alone, strict=True):
        assert [each.ids for each in found[slot]] == [each.ids for each in one]
        assert [each.score for each in found[slot]] == pytest.approx([each.score for each in one], rel=1e-5)


@host_only
def test_rows_that_go_on_from_others_are_looked_at_as_well(tiny: NllbModel) -> None:
    (one, row), (other, _) = (search(tiny, BeamParams(2), ENDS) for _ in range(2))
    arena, row_bytes = tiny._logits.arena, tiny.logits_row_bytes()
    last = arena.row(arena.rows - 1)
    for rows in ([last, last.offset(row_bytes)], [row, float(row + row_bytes)], [row, row.offset(1)]):
        with pytest.raises(InvalidInput) as refused:
            select(tiny, rows, [one, other])  # type: ignore[arg-type]
        assert refused.value.argument == "ptr"


def test_nothing_waits_for_a_sequence_whose_search_has_ended(tiny: NllbModel) -> None:
    """As it does when the device fails to begin another."""
    seq, row = search(tiny, BeamParams(2), ENDS)
    select(tiny, [row], [seq])
    tiny._beams.forget(seq)
    check_columns(tiny)
    with pytest.raises(InvalidInput, match="has chosen an id"):
        tiny.decode_batch_fed([SAMPLED], [seq])


def wrong_slot(model: NllbModel, seq: SequenceState) -> None:
    seq.slot_idx = 3


def not_live(model: NllbModel, seq: SequenceState) -> None:
    model.free_sequence(seq)


def empty(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len = 0


def full(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len = 9


def past_its_end(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len = 10


def past_all_numbers(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len = 1 << 70


def no_number(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len = str(seq.seq_len)  # type: ignore[assignment]


def no_integer(model: NllbModel, seq: SequenceState) -> None:
    seq.seq_len += 0.5  # type: ignore[assignment]


def another_adapter(model: NllbModel, seq: SequenceState) -> None:
    seq.adapter_slot = 0


def no_adapter(model: NllbModel, seq: SequenceState) -> None:
    seq.adapter_slot = "none"  # type: ignore[assignment]


def nothing_chosen(model: NllbModel, seq: SequenceState) -> None:
    model.prefill([9, 10], seq)


Fault = Callable[[NllbModel, SequenceState], None]
LENGTHS: list[Fault] = [empty, full, past_its_end, past_all_numbers, no_number, no_integer]
FAULTS: list[Fault] = [wrong_slot, not_live, *LENGTHS, another_adapter, no_adapter]


@pytest.mark.parametrize("fault", [*FAULTS, nothing_chosen])
@pytest.mark.parametrize("place", [0, 2])
def test_one_of_a_batch_is_refused_as_it_is_alone(tiny: NllbModel, fault: Fault, place: int) -> None:
    """All are looked at together, and the error is that of the one at fault; the others are as they were."""
    seqs = [prefilled(tiny, CASE) for _ in range(3)]
    sampled(tiny, tiny.logits_buffer_ptr(), seqs)
    fault(tiny, seqs[place])
    if fault is nothing_chosen:
        with pytest.raises(Exception, match=r"sources\[\d\]: .*sample_batch_to_feed has chosen an id") as alone:
            tiny.decode_batch_fed([SAMPLED], [seqs[place]])
    else:
        with pytest.raises(Exception) as alone:  # noqa: PT011 - what it is belongs to other tests
            tiny.decode_batch_fed([SAMPLED], [seqs[place]])
    before, columns = [state(seq) for seq in seqs], tiny._columns._counts.copy()
    with pytest.raises(type(alone.value)) as together:
        tiny.decode_batch_fed([SAMPLED] * 3, seqs)
    assert str(together.value) == str(alone.value).replace("sources[0]", f"sources[{place}]")
    assert [state(seq) for seq in seqs] == before
    assert (tiny._columns._counts == columns).all()


@pytest.mark.parametrize("fault", [no_number, no_integer])
def test_a_length_that_is_no_integer_is_not_made_one(tiny: NllbModel, fault: Fault) -> None:
    """Whatever a sequence is named for, and whether by itself or by half a number; nothing is enqueued or noted."""
    seq = prefilled(tiny, CASE)
    found, _ = search(tiny)
    fault(tiny, seq)
    fault(tiny, found)
    row = tiny.logits_buffer_ptr()
    calls: list[Callable[[], Any]] = [
        lambda: tiny.decode_batch([9], [seq]),
        lambda: tiny.mixed_forward_batch([9], [seq], []),
        lambda: tiny.decode_batch_fed([FeedSource(token=9)], [seq]),
        lambda: sampled(tiny, row, [seq]),
        lambda: select(tiny, [row], [found]),
    ]
    before = state(seq), state(found)
    for call in calls:
        with tiny.gpu.launch_trace() as trace, pytest.raises(TypeError):
            call()
        assert not trace
    assert (state(seq), state(found)) == before


def test_numbers_of_numpy_are_numbers(tiny: NllbModel) -> None:
    """What is no plain int goes the long way, and comes to the same."""
    seqs = [prefilled(tiny, CASE) for _ in range(2)]
    sampled(tiny, tiny.logits_buffer_ptr(), seqs)
    for seq in seqs:
        seq.seq_len = np.int32(seq.seq_len)  # type: ignore[assignment]
        seq.adapter_slot = np.int64(-1)  # type: ignore[assignment]
    tiny.decode_batch_fed((SAMPLED, FeedSource(token=9)), tuple(seqs))


def test_blocks_are_the_columns() -> None:
    """A block is written as its columns one by one would be."""
    with open_host() as gpu:
        size = table_layout(DECODER_COLUMNS, 5).nbytes
        base = gpu.alloc(size)
        table = Table(gpu, base, DECODER_COLUMNS, 5)
        values = np.arange(len(DECODER_COLUMNS) * 3).reshape(-1, 3)
        found = []
        for by_block in (False, True):
            gpu.memset(base, 0, size)
            if by_block:
                table.upload_blocks(0, values[: len(SPANS)], values[len(SPANS) :])
            else:
                table.upload(0, **dict(zip((*SPANS, *COUNTS), values, strict=True)))
            gpu.synchronize(0)
            for name, at in table.places.items():
                column = np.empty(3, np.uint64 if name in SPANS else np.int32)
                gpu.copy_d2h(at, column)
                found.append(column.tolist())
        assert found == [*values.tolist(), *values.tolist()]
        table.free()
        gpu.free(base)
