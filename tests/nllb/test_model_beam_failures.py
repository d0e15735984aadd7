# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device fails at any one call of a beam search: nothing is held afterwards, and what is asked again succeeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import CALLS, FailCall
from gpu_runtime.limits import Limits
from gpu_runtime.pointer import DevicePtr
from metrale import BeamReq
from metrale.errors import SequenceError
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, prefilled, results
from tests.nllb.searching import BEAMS, ENDS, finish, nothing_left, select, step, waiting
from tests.nllb.test_model_resources import Counting

REQS = [  # the first two end before their limits, with a step of theirs in flight
    BeamReq([5, 6, 7], 80, 81, num_beams=3, max_new=7, no_repeat_ngram_size=1, eos_ids=range(84)),
    BeamReq([9], 82, 83, num_beams=1, max_new=5, suppress_tokens=(4,), eos_ids=range(97)),
    BeamReq([30, 31], 84, 85, num_beams=2, max_new=3, prefix_tokens=(11,)),
]


class Faulty(Counting):
    """Counts what is live, and fails a call when it is told to."""

    def __init__(self) -> None:
        self.fault = FailCall(CALLS, nth=None)
        super().__init__(faults=(self.fault,))

    def limits(self) -> Limits:
        return replace(super().limits(), runs_ahead=True)  # so that two steps are in flight, with a buffer each


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()


@pytest.fixture
def model(faulty: Faulty, make_tiny: MakeModel) -> NllbModel:
    return make_tiny(faulty, max_batch=5)


@host_only
def test_every_call_of_whole_searches(model: NllbModel, faulty: Faulty) -> None:
    """A neighbour that is not part of them goes on with the same bits."""
    neighbour = prefilled(model, Case([40, 41], 86, 87, []))
    fault, live = faulty.fault, set(faulty.live)
    expected = [[one.ids for one in found] for found in model.generate_beams(REQS)]
    row = model.copy_logits_to_host(model.decode(20, neighbour)).tobytes()
    calls = fault.seen
    assert repr(model.generate_beams(REQS))
    calls = fault.seen - calls
    assert calls > 300
    for number in [*range(0, calls, 7), calls - 2, calls - 1]:
        fault.arm(number)
        with nothing_left(model), pytest.raises(DeviceError, match="was to fail"):
            model.generate_beams(REQS)
        assert faulty.live == live
    assert [[one.ids for one in found] for found in model.generate_beams(REQS)] == expected
    neighbour.tokens.pop()
    neighbour.seq_len -= 1
    assert model.copy_logits_to_host(model.decode(20, neighbour)).tobytes() == row


@host_only
@pytest.mark.parametrize(
    ("call", "number"),
    [(call, number) for call in ("alloc_host_pinned", "create_event") for number in range(2)] + [("create_stream", 0)],
)
def test_what_a_call_cannot_have(
    model: NllbModel, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Page-locked memory, an event, a stream: what it has got so far goes back."""
    live, given = set(faulty.live), getattr(faulty, call)
    left = [None] * number

    def fail(*args: int) -> object:
        if not left:
            raise DeviceError("was to fail")
        left.pop()
        return given(*args)

    monkeypatch.setattr(faulty, call, fail)
    with nothing_left(model), pytest.raises(DeviceError, match="was to fail"):
        model.generate_beams(REQS)
    assert faulty.live == live


@host_only
def test_every_call_of_a_selection(model: NllbModel, faulty: Faulty) -> None:
    """Until it is made, it can be asked for again; one whose result got lost is made, and not made twice."""
    fault = faulty.fault

    def start() -> tuple[list[DevicePtr], SequenceState]:
        seq, row = waiting(model)
        model.begin_beams(seq, BEAMS, ENDS)
        select(model, [row], [seq])
        return [step(model, [seq])], seq

    rows, seq = start()
    expected = finish(model, seq, rows[0])
    model.free_sequence(seq)
    outcomes = []
    for number in range(8):
        rows, seq = start()
        fault.arm(number)
        with results(model, 1) as (dst, event):
            try:
                model.select_beams_to_feed(rows, [seq], dst, event)
            except DeviceError:
                try:
                    model.select_beams_to_feed(rows, [seq], dst, event)
                    outcomes.append("again")
                except SequenceError:
                    outcomes.append("made")
            else:
                outcomes.append("well")
        fault.arm(None)
        assert finish(model, seq, step(model, [seq])) == expected
        model.free_sequence(seq)
    # the table's copy, both kernels; then the results' copy, its event, and the turn's
    assert outcomes == ["again"] * 3 + ["made"] * 3 + ["well"] * 2


@host_only
def test_every_call_of_a_beginning(model: NllbModel, faulty: Faulty) -> None:
    """Half a search is none: it must begin anew, also when there was one before."""
    seq, row = waiting(model)
    model.begin_beams(seq, BEAMS, ENDS)
    expected = finish(model, seq, row)
    for number in range(2):
        row = model.prefill([5, 6, 7], seq)
        model.begin_beams(seq, BEAMS, ENDS)
        faulty.fault.arm(number)
        with pytest.raises(DeviceError, match="was to fail"):
            model.begin_beams(seq, BEAMS, ENDS)
        with pytest.raises(SequenceError, match="has no search"):
            select(model, [row], [seq])
        model.begin_beams(seq, BEAMS, ENDS)
        assert finish(model, seq, row) == expected


def test_a_sequence_that_is_begun_elsewhere(tiny: NllbModel, make_tiny: MakeModel) -> None:
    """A sequence of another model is none of this one's."""
    other = make_tiny()
    seq, row = waiting(other)
    with pytest.raises(SequenceError, match="live sequence of this model"):
        tiny.begin_beams(seq, BEAMS, ENDS)
    mine = begin(tiny, Case([5], 80, 81, []))
    assert mine.slot_idx == seq.slot_idx
    with pytest.raises(SequenceError, match="live sequence of this model"):
        select(tiny, [row], [seq])
