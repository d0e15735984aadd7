# SPDX-License-Identifier: MIT OR Apache-2.0
"""Too little KV for everybody: requests outgrow what they got, wait in host memory, come back, or cannot be served."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from gpu_runtime.errors import OutOfMemory
from metrale.engine import Engine, admission
from metrale.engine.worker import NO_MEMORY
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, POSITION_BYTES, ask, serving, stopped

pytestmark = host_only

FRAME = 2
"""Positions that a source takes beside its tokens: language and EOS."""

MakeSmall = Callable[[int], NllbModel]


@pytest.fixture
def make_small(make_tiny: MakeModel) -> MakeSmall:
    """A function that makes a model with four lanes and KV for so many positions."""
    return lambda positions: make_tiny(max_batch=4, kv_bytes=positions * POSITION_BYTES, **LIMITS)


@pytest.fixture
def stingy() -> Iterator[None]:
    """Let sequences that do not get all they may need get only what they need at once, and two positions more."""
    with mock.patch.object(admission, "_SPARE", 2):
        yield


def test_requests_outgrow_their_sequences(make_small: MakeSmall, solo: RunSolo, stingy: None) -> None:
    """The first gets the 28 positions that it may need; three others get 9 of those that are left, and grow."""
    model = make_small(28 + 3 * 9)
    requests = [ask(5 + index, 6, max_new_tokens=24) for index in range(6)]
    with serving(model) as engine:
        handles = [engine.submit(request) for request in requests]
        for request, handle in zip(requests, handles, strict=True):
            solo(request).check(handle)
        stats = engine.stats()
    assert stats.preemptions > 6
    assert stats.swapped_out_bytes == stats.swapped_in_bytes >= stats.preemptions * POSITION_BYTES * (FRAME + 2)
    assert stats.now.swapped_out == 0
    assert stats.queue_wait.count == len(requests), "coming back is not coming"


def test_whoever_outgrew_its_sequence_comes_back_at_once(make_small: MakeSmall, stingy: None) -> None:
    """Not at the step at which newcomers may join: with this interval that would be when nothing runs any more."""
    model, lengths = make_small(27 + 24), []
    with serving(model, prefill_interval=1000) as engine:
        with stopped(engine):
            first, second = (engine.submit(ask(5 + index, max_new_tokens=24)) for index in range(2))
            first.add_done_callback(lambda _: lengths.append(second.length))
        second.result(PATIENCE)
        assert engine.stats().preemptions > 0
    assert lengths[0] > 12, "the second ran beside the first"


@pytest.mark.parametrize(("positions", "lag"), [(40, 0), (40, 3), (60, 1)])
def test_any_requests_through_any_pool(
    make_small: MakeSmall, pool: list[Solo], stingy: None, positions: int, lag: int
) -> None:
    """Greedy and sampled ones, at once and with priorities."""
    model, rng = make_small(positions), random.Random(positions)
    with serving(model, lag=lag, prefill_interval=rng.randint(1, 3)) as engine:
        handles = [engine.submit(replace(one.request, priority=rng.choice((0, 0, 4)))) for one in pool]
        for one, handle in zip(pool, handles, strict=True):
            one.check(handle)
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swapped_out_bytes == stats.swapped_in_bytes > 0
    assert stats.finished["error"] == 0


def test_what_can_never_fit_ends_alone(make_small: MakeSmall, solo: RunSolo) -> None:
    """It asks for 10 + 2 positions of its source and 31 more, of 30; the others wait for nothing."""
    model = make_small(30)
    small = [ask(5 + index, max_new_tokens=6) for index in range(4)]
    with serving(model) as engine:
        handles = [engine.submit(request) for request in small[:2]]
        large = engine.submit(ask(*range(10, 20), max_new_tokens=24))
        handles += [engine.submit(request) for request in small[2:]]
        result = large.result(PATIENCE)
        for request, handle in zip(small, handles, strict=True):
            solo(request).check(handle)
    assert (result.ids, result.finish_reason, result.error) == ([], "error", NO_MEMORY)
    assert "out of memory" in NO_MEMORY


def test_what_outgrows_the_whole_pool_keeps_its_tokens(make_small: MakeSmall, solo: RunSolo, stingy: None) -> None:
    """Alone in the pool of 20 positions it gets 16 decoder positions; there is no place with more."""
    model = make_small(20)
    request = ask(5, 6, max_new_tokens=24)
    with serving(model) as engine:
        result = engine.submit(request).result(PATIENCE)
        assert (result.finish_reason, result.error) == ("error", NO_MEMORY)
        assert result.ids == solo(request).ids[: len(result.ids)]
        assert 10 < len(result.ids) <= 20 - FRAME - 2
        solo(ask(7, max_new_tokens=4)).check(engine.submit(ask(7, max_new_tokens=4)))
        stats = engine.stats()
    assert stats.preemptions > 1
    assert stats.swapped_out_bytes > stats.swapped_in_bytes > 0
    assert stats.now.swapped_out == stats.now.running == 0


def test_a_priority_pushes_out_as_many_as_it_needs(make_small: MakeSmall, solo: RunSolo) -> None:
    """Three small ones have all but 2 of 32 positions; a large one with a priority needs 30 of them."""
    model = make_small(32)
    small = [ask(5 + index, max_new_tokens=7) for index in range(3)]
    large = ask(*range(10, 14), max_new_tokens=24, priority=1)
    with serving(model, prefill_interval=1) as engine, Gate(at=4) as gate:
        with stopped(engine):
            handles = [engine.submit(replace(request, on_token=gate)) for request in small]
        gate.reach()  # the second token of the first
        urgent = engine.submit(large)
        gate.open()
        solo(large).check(urgent)
        for request, handle in zip(small, handles, strict=True):
            solo(request).check(handle)
        assert engine.stats().preemptions == 3


def test_swapped_requests_are_counted_while_they_wait(make_small: MakeSmall) -> None:
    model = make_small(100)
    with serving(model, max_lanes=1) as engine, Gate(at=2) as first, Gate() as second:
        low = engine.submit(ask(on_token=first))
        first.reach()
        engine.submit(ask(priority=1, on_token=second))
        first.open()
        second.reach()
        now = engine.stats().now
        assert (now.running, now.waiting, now.swapped_out) == (1, 0, 1)
        second.open()
        assert low.result(PATIENCE).finish_reason == "length"


# others on the same model


def test_slots_that_others_hold_are_waited_for(make_small: MakeSmall, solo: RunSolo) -> None:
    model = make_small(200)
    seqs = [model.alloc_sequence_for(10) for _ in range(4)]
    with beside(model, seqs) as engine:
        handle = engine.submit(ask())
        with pytest.raises(TimeoutError):
            handle.result(0.02)
        model.free_sequence(seqs[0])
        solo(ask()).check(handle)


def test_kv_that_others_hold_is_waited_for(make_small: MakeSmall, solo: RunSolo) -> None:
    model = make_small(40)
    seqs = [model.alloc_sequence_for(36)]
    with beside(model, seqs) as engine:
        handle = engine.submit(ask())
        with pytest.raises(TimeoutError):
            handle.result(0.02)
        model.free_sequence(seqs[0])
        solo(ask()).check(handle)


def test_a_request_that_gave_its_room_up_to_another_caller_comes_back(
    make_small: MakeSmall, solo: RunSolo, stingy: None
) -> None:
    """It outgrew the 6 positions that it got; others have all the rest then, and the engine has nothing else to do."""
    model = make_small(30)
    request, seqs = ask(5, max_new_tokens=24), [model.alloc_sequence_for(14)]

    def take_the_rest(token: int) -> None:
        if len(seqs) == 1:
            seqs.append(model.alloc_sequence_for(10))

    with beside(model, seqs) as engine:
        handle = engine.submit(replace(request, on_token=take_the_rest))
        until(lambda: engine.stats().now.swapped_out == 1)
        with pytest.raises(TimeoutError):
            handle.result(0.02)
        for seq in seqs:
            model.free_sequence(seq)
        solo(request).check(handle)


def test_room_that_comes_free_at_the_wrong_moment_is_room(make_small: MakeSmall, solo: RunSolo) -> None:
    """Another caller gives its KV back just when the engine found none, and before it looks why."""
    model = make_small(40)
    alloc, seqs = model.alloc_sequence_for, [model.alloc_sequence_for(36)]

    def alloc_and_lose_a_race(budget: int) -> SequenceState:
        try:
            return alloc(budget)
        except OutOfMemory:
            freeing = threading.Thread(target=lambda: model.free_sequence(seqs[0]))
            freeing.start()
            freeing.join(0.02)  # as far as it gets
            raise

    with beside(model, seqs) as engine, mock.patch.object(model, "alloc_sequence_for", alloc_and_lose_a_race):
        solo(ask()).check(engine.submit(ask()))


@contextmanager
def beside(model: NllbModel, seqs: list[SequenceState]) -> Iterator[Engine]:
    """Return an engine beside sequences of others, which are given back at the end; then nothing is taken."""
    with Engine(model) as engine:
        yield engine
    for seq in seqs:
        model.free_sequence(seq)
    assert model.kv_usage()[0] == 0
    assert len(model._table) == 0


def test_two_engines_and_another_caller_on_one_model(make_small: MakeSmall, pool: list[Solo]) -> None:
    """They share lanes, KV and rows, and nobody gets what is another's."""
    model, stop = make_small(120), threading.Event()
    loner = next(one for one in pool if len(one.ids) > 10 and one.request.sampling.temperature == 0)

    def translate_alone() -> int:
        """Take the model for one request after the other, from the step to the last read of its row."""
        count = 0
        while not (count and stop.is_set()):  # once at least, if need be when the engines have left
            try:
                seq = model.alloc_sequence_for(len(loner.request.prompt_tokens) + FRAME + 24)
            except OutOfMemory:  # the engines hold the rest
                time.sleep(0.001)
                continue
            with model.exclusive():
                seq.src_lang_id, seq.tgt_lang_id = loner.request.src_lang_id, loner.request.tgt_lang_id
                ids = [model.argmax_on_device(model.prefill(loner.request.prompt_tokens, seq))]
            while len(ids) < len(loner.ids):
                time.sleep(0.001)  # the lock is not fair: who takes it again at once may have it for minutes
                with model.exclusive():
                    ids.append(model.argmax_on_device(model.decode(ids[-1], seq)))
            model.free_sequence(seq)
            assert ids == loner.ids
            count += 1
        return count

    with (
        serving(model, max_lanes=1) as first,
        serving(model, max_lanes=2, lag=3) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        counting = thread.submit(translate_alone)
        try:
            handles = [(one, engine.submit(one.request)) for one in pool[:20] for engine in (first, second)]
            for one, handle in handles:
                one.check(handle)
        finally:
            stop.set()
        assert counting.result(PATIENCE) > 0


def test_a_request_that_the_whole_pool_cannot_hold_waits_for_nobody(make_small: MakeSmall) -> None:
    """Another caller holds a little of the pool for good; those behind the request are served meanwhile."""
    model = make_small(20)
    held = model.alloc_sequence_for(4)
    with serving(model) as engine:
        never = engine.submit(ask(*range(5, 15), max_new_tokens=24))  # 10 + 2 for the source, and 17 at least
        behind = [engine.submit(ask(max_new_tokens=3)) for _ in range(3)]
        assert never.result(PATIENCE).error == NO_MEMORY
        assert [one.result(PATIENCE).error for one in behind] == [None] * 3
    model.free_sequence(held)
