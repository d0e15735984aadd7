# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine on devices that run its work in other orders: whatever streams and events allow, the ids are the same.

The host of every day runs work as it is enqueued, so that an event which nobody waits for, or a buffer that is used
again too early, would never show. These run it as late as they may, or in any order that a seed chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from metrale.engine import Engine, RequestHandle, admission
from metrale.model import SamplingParams
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.draws import draws
from tests.engine.conftest import RunSolo, RunSought
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.searches import Sought, seek
from tests.engine.serving import EOS, LIMITS, POSITION_BYTES, ask, serving, stopped

pytestmark = host_only

ORDERS: tuple[dict[str, Any], ...] = ({"order": "deferred"}, *({"order": "adversarial", "seed": n} for n in range(6)))
BATCH = 4


@pytest.fixture(scope="module")
def jobs(solo: RunSolo) -> list[Solo]:
    """Requests of many lengths, every third one sampled."""
    drawn = [
        ask(
            *range(5 + i, 5 + i + i * 5 % 7),
            max_new_tokens=(3, 18, 8, 2, 12)[i % 5],
            sampling=SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=i)
            if i % 3 == 2
            else SamplingParams(),
        )
        for i in range(20)
    ]
    return [one for one in map(solo, drawn) if one.clear][:16]


@pytest.fixture(autouse=True)
def stingy() -> Iterator[None]:
    """Let sequences that do not get all they may need get little."""
    with mock.patch.object(admission, "_SPARE", 2):
        yield


class Waves:
    """Submits some requests, and as they end, on the engine's thread, the next ones: two for each.

    All that happens follows from the engine's steps, so a run with the same seed is the same run.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Solo | Sought]) -> None:
        self._engine = engine
        self._rest = list(enumerate(jobs))
        self._handles: dict[int, RequestHandle] = {}
        with stopped(engine):
            self._submit(3)

    def _submit(self, count: int) -> None:
        for _ in range(min(count, len(self._rest))):
            number, job = self._rest[0]
            self._handles[number] = handle = self._engine.submit(job.request)
            del self._rest[0]
            handle.add_done_callback(lambda _: self._submit(2))

    def check(self, jobs: Sequence[Solo | Sought]) -> None:
        until(lambda: not self._rest)
        for number, job in enumerate(jobs):
            job.check(self._handles[number])


@pytest.mark.parametrize("lag", draws([0, 3, 1], 2))
@pytest.mark.parametrize("order", draws(ORDERS, 3), ids=lambda order: "-".join(map(str, order.values())))
def test_ids_in_any_order(make_tiny: MakeModel, jobs: list[Solo], order: dict[str, Any], lag: int) -> None:
    """Requests join while others decode, leave the KV and come back, and buffers, slots and KV are used again."""
    model = make_tiny(open_host(**order), max_batch=BATCH, kv_bytes=48 * POSITION_BYTES, **LIMITS)
    with serving(model, lag=lag, prefill_interval=2, max_prefill_tokens=8) as engine:
        waves = Waves(engine, jobs)
        waves.check(jobs)
        stats = engine.stats()
    assert stats.mixed_steps > 3
    assert stats.preemptions > 1


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("order", draws(ORDERS[:4], 2), ids=lambda order: "-".join(map(str, order.values())))
@pytest.mark.usefixtures("by_rows")
def test_searches_in_any_order(
    make_tiny: MakeModel, jobs: list[Solo], sought: RunSought, order: dict[str, Any], lag: int
) -> None:
    """Their slots, KV and histories are used again by others, while steps of theirs are still in flight."""
    searches = [sought(seek(5 + i, eos_ids=EOS, beams=2 + i % 3, max_new_tokens=(16, 5, 9)[i % 3])) for i in range(6)]
    mixed = [one for pair in zip(searches, jobs, strict=False) for one in pair]
    model = make_tiny(open_host(**order), max_batch=6, kv_bytes=90 * POSITION_BYTES, **LIMITS)
    with serving(model, lag=lag, prefill_interval=1) as engine:
        waves = Waves(engine, mixed)
        waves.check(mixed)
        assert engine.stats().mixed_steps > 3


@pytest.mark.parametrize("order", ORDERS[:4], ids=lambda order: "-".join(map(str, order.values())))
def test_what_ends_early_leaves_nothing_to_others(
    make_tiny: MakeModel, jobs: list[Solo], solo: RunSolo, order: dict[str, Any]
) -> None:
    """Requests are cancelled with steps in flight, and others take their slots and their KV at once."""
    model = make_tiny(open_host(**order), max_batch=BATCH, **LIMITS)
    with serving(model, lag=3, prefill_interval=1) as engine:
        handles: dict[int, RequestHandle] = {}

        def cancel(number: int, at: int) -> Any:
            tokens: list[int] = []

            def on_token(token: int) -> None:
                tokens.append(token)
                if len(tokens) == at:
                    handles[number].cancel()

            return on_token

        with stopped(engine):
            for number in range(8):
                request = ask(20 + number, max_new_tokens=20, on_token=cancel(number, 2 + number % 3))
                handles[number] = engine.submit(request)
            others = [(one, engine.submit(one.request)) for one in jobs[:8]]
        for one, handle in others:
            one.check(handle)
        for number, handle in handles.items():
            result = handle.result(PATIENCE)
            assert result.finish_reason == "cancelled"
            alone = solo(ask(20 + number, max_new_tokens=20)).ids
            assert result.ids == alone[: len(result.ids)]
            assert len(result.ids) >= 2 + number % 3


@pytest.mark.parametrize("order", ORDERS[:4], ids=lambda order: "-".join(map(str, order.values())))
def test_closing_with_steps_in_flight(make_tiny: MakeModel, order: dict[str, Any]) -> None:
    """Nobody reads them any more, and their buffers and stream are given back."""
    model = make_tiny(open_host(**order), max_batch=BATCH, **LIMITS)
    with serving(model, lag=3) as engine, Gate(at=3) as gate:
        handle = engine.submit(ask(max_new_tokens=20, on_token=gate))
        gate.reach()
        engine._worker.stop(drain=False)
        gate.open()
        assert handle.result(PATIENCE).finish_reason == "cancelled"
