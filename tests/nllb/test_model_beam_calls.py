# SPDX-License-Identifier: MIT OR Apache-2.0
"""The single calls of a beam search: what they refuse, that a refusal changes nothing, and what goes on beside one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.pointer import DevicePtr
from metrale.errors import InvalidInput, NoFreeSlot, SequenceError
from metrale.model import BeamParams, Hypothesis, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.nllb.by_rows import device_by_rows
from tests.nllb.decoding import Case, begin, prefilled, results, sampled, saved
from tests.nllb.searching import (
    BEAMS,
    ENDS,
    SELECTED,
    begun,
    fed,
    finish,
    nothing_left,
    search,
    select,
    selected,
    step,
    waiting,
)

ONE = Case([30, 31], 82, 83, [])


def row_at(model: NllbModel, index: int) -> DevicePtr:
    return model.logits_buffer_ptr().offset(index * model.logits_row_bytes())


@pytest.mark.parametrize("retire", ["free_sequence", "detach_slot_for_reuse"])
def test_a_search_that_was_given_up(tiny: NllbModel, retire: str) -> None:
    """Its slots and its KV are free at once; it can do nothing any more; whoever comes next finds nothing of it."""
    expected = finish(tiny, *(first := search(tiny, source=(40, 41))))
    tiny.free_sequence(first[0])
    with nothing_left(tiny):
        seq, row = fed(tiny)
        getattr(tiny, retire)(seq)
        assert seq.is_detached
        with results(tiny, 1) as (dst, event):
            for call in (
                lambda: tiny.select_beams_to_feed([row], [seq], dst, event),
                lambda: tiny.decode_batch_fed([SELECTED], [seq]),
                lambda: tiny.take_beams(seq),
                lambda: tiny.begin_beams(seq, BEAMS, ENDS),
            ):
                with pytest.raises(SequenceError, match="live sequence"):
                    call()
        fresh, row = search(tiny, source=(40, 41))
        assert fresh.slot_idx == 0
        with pytest.raises(SequenceError, match="nothing was selected"):
            tiny.take_beams(fresh)
        assert finish(tiny, fresh, row) == expected
        tiny.free_sequence(fresh)


def test_the_slot_of_a_search_that_was_given_up_is_any_slot(tiny: NllbModel) -> None:
    """Also for a sequence that is brought back, and so never prefilled there."""
    away = prefilled(tiny, ONE)
    data = saved(tiny, away)
    tiny.free_sequence(away)
    searched, _ = fed(tiny)
    tiny.free_sequence(searched)
    seq = tiny.alloc_sequence()
    assert seq.slot_idx == 0
    tiny.restore_sequence_state(seq, 0, io.BytesIO(data))
    with pytest.raises(SequenceError, match="in use already"):
        tiny.restore_sequence_state(tiny.alloc_beams(2, 4, 3), 0, io.BytesIO(data))
    tiny.decode(9, seq)
    tiny.begin_sampling(seq, SamplingParams())
    tiny.compact_sequence(seq, 3)
    assert seq.tokens == [2, 83, 9]


@pytest.mark.parametrize("make", [begun, selected, fed])
def test_a_sequence_is_searched_again_after_another_prefill(tiny: NllbModel, make: Any) -> None:
    first, row = search(tiny)
    expected = finish(tiny, first, row)
    tiny.free_sequence(first)
    seq, _ = make(tiny)
    row = tiny.prefill([5, 6, 7], seq)
    with pytest.raises(SequenceError, match="has no search"):
        select(tiny, [row], [seq])
    tiny.begin_beams(seq, replace(BEAMS, length_penalty=0.0), replace(ENDS, suppress_tokens=(9, 10)))
    tiny.begin_beams(seq, BEAMS, ENDS)  # the last word counts
    assert finish(tiny, seq, row) == expected
    tiny.prefill([5, 6, 7], seq)
    tiny.decode(9, seq)  # and it may go on as an ordinary one, on its first beam's positions
    assert seq.tokens == [2, 81, 9]


def test_what_was_chosen_before_does_not_count(tiny: NllbModel) -> None:
    """A sequence whose ids were sampled, with a history, begins a search with beams."""
    expected = finish(tiny, *(first := search(tiny)))
    tiny.free_sequence(first[0])
    seq, row = waiting(tiny)
    tiny.begin_sampling(seq, SamplingParams(repetition_penalty=1.7, suppress_tokens=tuple(range(50)), seed=3))
    sampled(tiny, row, [seq])
    tiny.begin_beams(seq, BEAMS, ENDS)
    with tiny.gpu.launch_trace() as trace:
        assert finish(tiny, seq, row) == expected
    assert "d2d" not in {record.name for record in trace}  # no step keeps its history


def test_a_search_may_begin_after_some_steps(tiny: NllbModel) -> None:
    """What was decoded before it is where its beams begin, and counts."""
    seq, row = waiting(tiny)
    for token in (20, 21):
        row = tiny.decode(token, seq)
    tiny.begin_beams(seq, replace(BEAMS, num_return_sequences=3), ENDS)
    found = finish(tiny, seq, row)
    assert [one.ids[:3] for one in found] == [[81, 20, 21]] * 3
    assert all(one.logprobs[:3] == [0, 0, 0] for one in found)
    assert max(len(one.ids) for one in found) <= 6
    assert all(one.score == pytest.approx(sum(one.logprobs) / len(one.ids), rel=1e-6) for one in found)


def test_a_search_of_one_beam_is_not_moved(tiny: NllbModel) -> None:
    """What the device keeps of it is in its slot."""
    first = prefilled(tiny, ONE)
    seq, row = search(tiny, BeamParams(1), ENDS)
    expected = finish(tiny, seq, row)
    tiny.free_sequence(seq)
    seq, row = search(tiny, BeamParams(1), ENDS)
    tiny.free_sequence(first)
    with pytest.raises(SequenceError, match="searched with beams"):
        tiny.compact_sequence(seq, 0)
    assert finish(tiny, seq, row) == expected
    tiny.prefill([5, 6, 7], seq)
    tiny.compact_sequence(seq, 0)  # without a search it may move
    tiny.begin_beams(seq, BeamParams(1), ENDS)
    assert finish(tiny, seq, tiny.logits_buffer_ptr().offset(5 * tiny.logits_row_bytes())) == expected


def test_slots_and_kv_of_beams(tiny: NllbModel) -> None:
    """The lowest free slots, also apart; all or none of them."""
    ordinary = [begin(tiny, ONE) for _ in range(3)]
    tiny.free_sequence(ordinary.pop(1))
    seq = tiny.alloc_beams(2, 4, 3)
    assert seq.slot_idx == 1
    with nothing_left(tiny), pytest.raises(NoFreeSlot):
        tiny.alloc_beams(1, 4, 3)
    used = tiny.kv_usage()[0]
    tiny.free_sequence(seq)
    assert used - tiny.kv_usage()[0] == (4 + 2 * 3) * 3 * 2 * 32 * 4
    for wrong in ((0, 4, 3), (5, 4, 3), (2, 1, 3), (2, 4, 1), (True, 4, 3), (2.0, 4, 3)):
        with nothing_left(tiny), pytest.raises(InvalidInput):
            tiny.alloc_beams(*wrong)
    tiny.free_sequence(ordinary.pop())
    with nothing_left(tiny), pytest.raises(NoFreeSlot, match="4 beams need as many slots, and 3 of 4 are free"):
        tiny.alloc_beams(4, 4, 3)
    with nothing_left(tiny):
        wide = tiny.alloc_beams(3, 100, 100)  # cut to the limits
        wide.src_lang_id, wide.tgt_lang_id = 80, 81
        tiny.prefill([5] * 10, wide)
        tiny.begin_beams(wide, BEAMS, replace(ENDS, max_new_tokens=8))
        tiny.free_sequence(wide)


def test_prefixes_and_sources_that_a_search_has_no_kv_for(tiny: NllbModel) -> None:
    seq = tiny.alloc_beams(2, 5, 4)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    with pytest.raises(InvalidInput, match="at most 3 ids"):
        tiny.prefill([5] * 4, seq)
    seq.prefix_tokens = (9, 10, 11)
    with pytest.raises(InvalidInput, match="prefix_tokens: expected at most 2 ids, as alloc_beams was told"):
        tiny.prefill([5], seq)
    seq.prefix_tokens = (9, 10)
    tiny.prefill([5] * 3, seq)
    with pytest.raises(SequenceError, match="4 decoder positions for each beam, and its search needs 5"):
        tiny.begin_beams(seq, BeamParams(2), replace(ENDS, max_new_tokens=2))
    tiny.begin_beams(seq, BeamParams(2), replace(ENDS, max_new_tokens=1))


def test_beams_and_others_in_one_mixed_step(tiny_folder: Path) -> None:
    """A search, sequences that sample beside it, and their prefills: each is what it is alone."""
    limits: dict[str, Any] = {"max_batch": 7, "max_source_len": 12, "max_new_tokens": 8}
    with device_by_rows(check=True) as gpu, metrale.load(tiny_folder, gpu, "float32", **limits) as model:
        mix(model)


def mix(model: NllbModel) -> None:
    beams = replace(BEAMS, num_return_sequences=3)
    draw = SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=5)
    cases = [ONE, Case([40] * 3, 84, 85, [])]

    def lone() -> tuple[list[Hypothesis], list[list[int]]]:
        seq, row = search(model, beams)
        hypotheses = finish(model, seq, row)
        model.free_sequence(seq)
        return hypotheses, [sample_alone(model, case, draw, 5) for case in cases]

    expected = lone()
    seq, row = search(model, beams)
    select(model, [row], [seq])
    others: list[SequenceState] = []
    ids: list[list[int]] = [[], []]
    done: list[Hypothesis] = []
    for turn in range(8):
        fresh = [begin(model, cases[turn])] if turn < 2 else []
        live = [] if done else [seq]
        feeding = [other for other in others if len(ids[others.index(other)]) < 5]
        decoded = [*live, *feeding] if turn % 2 else [*feeding, *live]
        if not decoded and not fresh:
            break
        slices = [PrefillSlice.whole(case.tokens, one) for case, one in zip(cases[turn:], fresh, strict=False)]
        result = model.mixed_forward_batch_fed([SELECTED] * len(decoded), decoded, slices)
        at = {}
        place = 0
        for one in decoded:
            at[id(one)] = row_at(model, place)
            place += 3 if one is seq else 1
            one.seq_len += 1
        for one, ptr in zip(fresh, result.prefill_logits, strict=True):
            assert ptr == row_at(model, place)
            at[id(one)] = ptr
            model.begin_sampling(one, draw)
        others += fresh
        if live and select(model, [at[id(seq)]], [seq])[0] & 1:
            done = model.take_beams(seq)
        for one in [*feeding, *fresh]:
            ids[others.index(one)] += sampled(model, at[id(one)], [one]).ids
    assert (done, ids) == expected


def sample_alone(model: NllbModel, case: Case, params: SamplingParams, count: int) -> list[int]:
    seq = begin(model, case)
    row = model.prefill(case.tokens, seq)
    model.begin_sampling(seq, params)
    ids = sampled(model, row, [seq]).ids
    while len(ids) < count:
        ids += sampled(model, step(model, [seq]), [seq]).ids
    model.free_sequence(seq)
    return ids


@host_only
def test_two_searches_choose_in_one_launch_or_apart(tiny: NllbModel) -> None:
    """Rows that follow one another are one run; others are runs of their own, and find the same."""
    found = []
    for turned in (False, True):
        pair = [search(tiny, BeamParams(2), source=source) for source in ((5, 6), (40,))]
        seqs, rows, runs = [seq for seq, _ in pair], [row for _, row in pair], []
        flags = [0, 0]
        while not all(flags):
            order = [1, 0] if turned else [0, 1]
            with tiny.gpu.launch_trace() as trace:
                chosen = select(tiny, [rows[at] for at in order], [seqs[at] for at in order])
            flags = [chosen[at] for at in order]
            runs.append([record.grid[0] for record in trace if record.name == "beam_candidates_f32"])
            assert sum(record.name == "beam_select_f32" for record in trace) == 1
            if not all(flags):
                base = step(tiny, seqs)
                rows = [base, base.offset(2 * tiny.logits_row_bytes())]
        assert runs[0] == [1, 1]  # the prefills' rows are the slots'
        assert runs[1:] == [[2, 2] if turned else [4]] * (len(runs) - 1)
        found.append([tiny.take_beams(seq) for seq in seqs])
        for seq in seqs:
            tiny.free_sequence(seq)
    assert found[0] == found[1]
    assert len(runs) > 2
