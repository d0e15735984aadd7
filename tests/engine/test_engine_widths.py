# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lanes by width: a search takes one for each beam, all at once and until its end, and waits until they are free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from metrale.engine import Engine, Request, RequestHandle
from metrale.engine.worker import NO_MEMORY
from metrale.errors import InvalidInput
from metrale.model import BeamParams
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo, RunSought
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.searches import Sought, seek
from tests.engine.serving import LIMITS, POSITION_BYTES, ask, serving, stopped

pytestmark = [host_only, pytest.mark.usefixtures("by_rows")]

SHORT = {"max_new_tokens": 3}


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=6, **LIMITS)


@contextmanager
def watched(model: NllbModel) -> Iterator[list[int]]:
    """Collect the rows of each step that decodes."""
    rows: list[int] = []
    real = model.mixed_forward_batch_fed

    def forward(sources: Any, seqs: Any, *rest: Any) -> Any:
        rows.append(sum(len(model._table.members(seq)) for seq in seqs))
        return real(sources, seqs, *rest)

    with mock.patch.object(model, "mixed_forward_batch_fed", forward):
        yield rows


def in_order_of_end(handles: list[RequestHandle]) -> list[int]:
    """Return the places of requests that have ended, the first to end first."""
    ends = [handle.finished_at for handle in handles]
    return sorted(range(len(ends)), key=lambda index: ends[index] or 0.0)


# what is too wide


@pytest.mark.parametrize(("slots", "lanes", "most"), [(6, None, 6), (6, 4, 4), (3, None, 3), (6, 1, 1)])
def test_a_search_wider_than_the_engine_is_refused(
    make_tiny: MakeModel, sought: RunSought, slots: int, lanes: int | None, most: int
) -> None:
    with serving(make_tiny(max_batch=slots, **LIMITS), max_lanes=lanes) as engine:
        with pytest.raises(InvalidInput, match=rf"beams\.num_beams: expected at most {most}, a lane for each"):
            engine.submit(seek(beams=most + 1))
        assert engine.stats().submitted == 0
        if most > 1:
            sought(seek(beams=most)).check(engine.submit(seek(beams=most)))
        else:
            assert engine.submit(seek(beams=1)).result(PATIENCE).finish_reason == "length"


def test_a_model_without_beams(model: NllbModel, solo: RunSolo) -> None:
    capacity = replace(model.capacity(), max_beams=0)
    with mock.patch.object(model, "capacity", return_value=capacity), serving(model) as engine:
        with pytest.raises(InvalidInput, match=r"beams\.num_beams"):
            engine.submit(seek(beams=2))
        solo(ask()).check(engine.submit(replace(ask(), beams=BeamParams(1))))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 25}, "max_new_tokens"),
        ({"max_new_tokens": 22, "prefix_tokens": (5, 6)}, "max_new_tokens with the language and prefix_tokens"),
        ({"max_new_tokens": None, "prefix_tokens": [5] * 23}, "max_new_tokens with the language and prefix_tokens"),
        ({"prefix_tokens": (5, 97)}, "prefix_tokens"),
    ],
)
@pytest.mark.parametrize("beams", [1, 2])
def test_what_the_model_cannot_serve_is_refused_by_name(
    model: NllbModel, beams: int, options: dict[str, Any], name: str
) -> None:
    with serving(model) as engine:
        with pytest.raises(InvalidInput) as caught:
            engine.submit(seek(beams=beams, **options))
        assert caught.value.argument == name
        fits = engine.submit(seek(beams=beams, prefix_tokens=(5, 6), max_new_tokens=21))
        assert fits.result(PATIENCE).finish_reason == "length"


# who takes how many


@pytest.mark.parametrize("lanes", [3, 5])
def test_there_are_never_more_rows_than_lanes(
    model: NllbModel, sought: RunSought, pool: list[Solo], lanes: int
) -> None:
    """Although the model has slots for more."""
    jobs: list[Solo | Sought] = [sought(seek(5 + i, beams=2 + i % 2, max_new_tokens=5 + i)) for i in range(6)]
    jobs = [one for pair in zip(jobs, pool[:6], strict=True) for one in pair]
    with watched(model) as rows, serving(model, max_lanes=lanes, prefill_interval=1) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in jobs]:
            one.check(handle)
    assert max(rows) == lanes


def test_whoever_stands_behind_a_search_does_not_pass_it(model: NllbModel, sought: RunSought) -> None:
    """It waits until as many lanes have drained as it is wide, and those behind wait with it."""
    with serving(model, max_lanes=4, prefill_interval=1) as engine, Gate(at=2) as gate:
        with stopped(engine):
            running = [engine.submit(ask(5 + i, max_new_tokens=6 + 5 * i)) for i in range(2)]
            running.append(engine.submit(ask(9, max_new_tokens=20, on_token=gate)))
        gate.reach()
        wide = engine.submit(seek(beams=3))
        behind = [engine.submit(ask(20 + i, **SHORT)) for i in range(6)]
        gate.open()
        sought(seek(beams=3)).check(wide)
        for handle in (*running, *behind):
            assert handle.result(PATIENCE).finish_reason == "length"
    admitted = [handle.admitted_at or 0.0 for handle in (wide, *behind)]
    assert admitted == sorted(admitted), "one lane was free all the time"
    ends = in_order_of_end([*running, wide, *behind])
    assert ends[:2] == [0, 1], "it began when two had ended"


def test_a_priority_passes_a_search_that_waits(model: NllbModel) -> None:
    with serving(model, max_lanes=4, prefill_interval=1) as engine, Gate(at=2) as gate:
        running = [engine.submit(ask(5 + i, max_new_tokens=20, on_token=gate if i == 0 else None)) for i in range(2)]
        gate.reach()
        wide, urgent = engine.submit(seek(beams=3)), engine.submit(ask(priority=1, **SHORT))
        gate.open()
        for handle in (*running, wide, urgent):
            handle.result(PATIENCE)
    assert in_order_of_end([urgent, *running, wide])[0] == 0


def test_a_search_pushes_out_as_many_as_it_needs(model: NllbModel, sought: RunSought, solo: RunSolo) -> None:
    """Of three lanes two must go: the two that stand last. They come back when it has ended."""
    low = [ask(5 + i, max_new_tokens=20) for i in range(3)]
    with serving(model, max_lanes=4, prefill_interval=1) as engine, Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(replace(one, on_token=gate if i == 0 else None)) for i, one in enumerate(low)]
        gate.reach()
        urgent = engine.submit(seek(beams=3, priority=1))
        gate.open()
        sought(seek(beams=3)).check(urgent)
        for one, handle in zip(low, handles, strict=True):
            solo(one).check(handle)
        assert engine.stats().preemptions == 2
    assert in_order_of_end([*handles, urgent])[0] in (0, 3), "the first one went on"


def test_nobody_is_pushed_out_in_vain(model: NllbModel, sought: RunSought, solo: RunSolo) -> None:
    """What a search has is not taken away, so the lane beside it would not be enough."""
    long = ask(7, max_new_tokens=24)
    with serving(model, max_lanes=4, prefill_interval=1) as engine, Gate(at=3) as gate:
        with stopped(engine):
            first = engine.submit(seek(beams=3))
            single = engine.submit(replace(long, on_token=gate))
        gate.reach()
        urgent = engine.submit(seek(6, beams=3, priority=1))
        gate.open()
        sought(seek(beams=3)).check(first)
        sought(seek(6, beams=3)).check(urgent)
        solo(long).check(single)
        assert engine.stats().preemptions == 0


def test_a_search_is_never_pushed_out(model: NllbModel, sought: RunSought, solo: RunSolo) -> None:
    """By nobody: who is more urgent waits for its end."""
    with serving(model, max_lanes=4, prefill_interval=1) as engine, Gate(at=2) as gate:
        with stopped(engine):
            search = engine.submit(seek(beams=3, priority=-3))
            short = engine.submit(ask(9, max_new_tokens=12, on_token=gate))
        gate.reach()
        urgent = [engine.submit(ask(20 + i, priority=5, max_new_tokens=14)) for i in range(2)]
        gate.open()
        sought(seek(beams=3)).check(search)
        for i, handle in enumerate(urgent):
            solo(ask(20 + i, max_new_tokens=14)).check(handle)
        assert short.result(PATIENCE).finish_reason == "length"
        assert engine.stats().preemptions == 1, "the other one gave way"
    assert in_order_of_end([search, *urgent])[0] == 0


# KV


def small(make_tiny: MakeModel, positions: int) -> NllbModel:
    return make_tiny(max_batch=6, kv_bytes=positions * POSITION_BYTES, **LIMITS)


KV = 5 + 3 * 12
"""Positions of `seek`: its source with language and EOS, and three targets."""


def test_a_search_waits_for_kv(make_tiny: MakeModel, sought: RunSought) -> None:
    """Lanes there are, and room for one search at a time."""
    model = small(make_tiny, KV + 10)
    requests = [seek(5, 6, 7 + i) for i in range(4)]
    with watched(model) as rows, serving(model) as engine:
        for one, handle in [(one, engine.submit(one)) for one in requests]:
            sought(one).check(handle)
        assert engine.stats().preemptions == 0
    assert max(rows) == 3


def test_a_search_pushes_others_out_of_the_kv(make_tiny: MakeModel, sought: RunSought, solo: RunSolo) -> None:
    """Four lanes are free, but the pool has room for two of three."""
    model, low = small(make_tiny, KV + 20), [ask(5 + i) for i in range(2)]
    with serving(model, prefill_interval=1) as engine, Gate(at=3) as gate:
        with stopped(engine):
            handles = [engine.submit(replace(one, on_token=gate if i == 0 else None)) for i, one in enumerate(low)]
        gate.reach()
        urgent = engine.submit(seek(priority=1))
        gate.open()
        sought(seek()).check(urgent)
        for one, handle in zip(low, handles, strict=True):
            solo(one).check(handle)
        assert engine.stats().preemptions == 1


@pytest.mark.parametrize("spare", [0, -1])
def test_a_search_that_the_whole_pool_cannot_hold(
    make_tiny: MakeModel, sought: RunSought, solo: RunSolo, spare: int
) -> None:
    """It ends alone; one that just fits does not."""
    with serving(small(make_tiny, KV + spare)) as engine:
        before, wide, after = engine.submit(ask(9)), engine.submit(seek()), engine.submit(ask(8))
        if spare:
            assert wide.result(PATIENCE).error == NO_MEMORY
            assert wide.result().hypotheses is None
        else:
            sought(seek()).check(wide)
        solo(ask(9)).check(before)
        solo(ask(8)).check(after)


def test_a_search_that_the_whole_pool_cannot_hold_waits_for_nobody(make_tiny: MakeModel) -> None:
    """Another caller holds a little of the pool for good."""
    model = small(make_tiny, KV - 1)
    held = model.alloc_sequence_for(4)
    with serving(model) as engine:
        assert engine.submit(seek()).result(PATIENCE).error == NO_MEMORY
    model.free_sequence(held)


def test_slots_that_others_hold_are_waited_for(model: NllbModel, sought: RunSought) -> None:
    seqs = [model.alloc_sequence_for(10) for _ in range(4)]
    with Engine(model) as engine:
        handle = engine.submit(seek(beams=3))
        with pytest.raises(TimeoutError):
            handle.result(0.02)
        model.free_sequence(seqs[2])
        sought(seek(beams=3)).check(handle)
        for seq in seqs:
            model.free_sequence(seq)
        until(lambda: len(model._table) == 0)


def test_a_sequence_that_moves_keeps_its_prefix(make_tiny: MakeModel, solo: RunSolo) -> None:
    """To host memory and back, as it outgrows its KV, with and without what looks at its history."""
    jobs: list[Request] = []
    for index in range(24):
        options = (ask().sampling, replace(ask().sampling, repetition_penalty=1.4, min_new_tokens=8, temperature=1.0))
        request = ask(
            5 + index,
            prefix_tokens=range(30, 31 + index % 4),
            sampling=replace(options[index % 2], forced_eos_id=2, seed=index),
            max_new_tokens=16,
            eos_ids=(7, 14, 21),
        )
        if solo(request).clear:
            jobs.append(request)
    assert len(jobs) > 12
    model = small(make_tiny, 56)
    with mock.patch("metrale.engine.admission._SPARE", 2), serving(model, prefill_interval=1) as engine:
        for one, handle in [(one, engine.submit(one)) for one in jobs]:
            solo(one).check(handle)
        assert engine.stats().preemptions > 4
