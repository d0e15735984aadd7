# SPDX-License-Identifier: MIT OR Apache-2.0
"""When the engine itself cannot go on, everybody is told, and its thread ends in peace."""

from __future__ import annotations

import logging
from unittest import mock

import pytest

from gpu_runtime.errors import DeviceError
from metrale.engine import Engine, EngineClosed, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only, open_host
from tests.conftest import MakeModel
from tests.engine.patience import PATIENCE, Gate
from tests.engine.serving import LIMITS, FailOnce, ask, held, serving, stopped

pytestmark = host_only


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_batch=2, **LIMITS)


def results_of(handles: list[RequestHandle]) -> list[tuple[str, str | None]]:
    results = [handle.result(PATIENCE) for handle in handles]
    return [(result.finish_reason, result.error) for result in results]


def check_dead(engine: Engine) -> None:
    """Whoever comes later is refused, and closing does not hang."""
    engine._thread.join(PATIENCE)
    assert not engine._thread.is_alive()
    with pytest.raises(EngineClosed):
        engine.submit(ask())
    assert engine.stats().submitted == sum(engine.stats().finished.values())
    engine.close()


@pytest.mark.parametrize("method", ["_sweep", "_give_room_to_grow", "_admit", "_read"])
def test_a_fault_of_its_own(model: NllbModel, caplog: pytest.LogCaptureFixture, method: str) -> None:
    """Those who run, wait or are moved out end with "error", which says what happened; the log has all of it."""
    with caplog.at_level(logging.ERROR), serving(model, max_lanes=1) as engine, Gate(at=2) as first, Gate() as second:
        handles = [engine.submit(ask(on_token=first))]
        first.reach()
        handles += [engine.submit(ask(priority=1, on_token=second)), engine.submit(ask())]
        first.open()
        second.reach()
        patch = mock.patch.object(engine._worker, method, mock.Mock(side_effect=ZeroDivisionError("mine")))
        patch.start()
        second.open()
        assert results_of(handles) == [("error", "the engine stopped: ZeroDivisionError: mine")] * 3
        check_dead(engine)
        patch.stop()
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_a_device_that_cannot_be_bound(model: NllbModel) -> None:
    with mock.patch.object(model, "bind_gpu_to_thread", mock.Mock(side_effect=DeviceError("no context"))):
        engine = Engine(model)
        check_dead(engine)


def test_sequences_that_cannot_be_freed(model: NllbModel, caplog: pytest.LogCaptureFixture) -> None:
    """The first fault ends the engine; the same fault in the clearing up does not keep anybody from being told."""
    engine = Engine(model)
    with stopped(engine):
        handles = [engine.submit(ask(max_new_tokens=3)) for _ in range(5)]
        patch = mock.patch.object(model, "free_sequence", mock.Mock(side_effect=DeviceError("no")))
        patch.start()
    for reason, error in results_of(handles):
        assert (reason, error) == ("error", "the engine stopped: DeviceError: no")
    engine._thread.join(PATIENCE)
    assert not engine._thread.is_alive()
    patch.stop()
    assert "the engine stops: a fault of its own" in caplog.messages


def test_a_model_that_is_closed_underneath(model: NllbModel, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that was submitted is lost sight of, and the thread goes on, to say the same to who comes later."""
    with Engine(model, lag=2) as engine:
        with Gate(at=2) as gate:
            handles = [engine.submit(ask(on_token=gate if index == 1 else None)) for index in range(5)]
            gate.reach()
            model.close()
        for reason, error in results_of(handles[2:]):
            assert (reason, error) == ("error", "SequenceError: the model is closed")
        assert engine.submit(ask()).result(PATIENCE).error == "SequenceError: the model is closed"
    assert caplog.messages == []


def test_a_backend_that_is_closed_underneath(make_tiny: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    """The engine has nothing left to give back, says so in the log, and ends."""
    gpu = open_host()
    model = make_tiny(gpu, max_batch=2, **LIMITS)
    engine = Engine(model)
    handle = engine.submit(ask())
    handle.result(PATIENCE)
    model.close()
    with mock.patch.object(gpu, "_closed", True):
        running = engine.submit(ask())
        assert running.result(PATIENCE).finish_reason == "error"
        engine.close()
        engine._thread.join(PATIENCE)
        assert not engine._thread.is_alive()
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the engine could not give back what it had of the model"
    ]


def test_nothing_can_be_had_for_an_engine(model: NllbModel) -> None:
    """Each thing that it takes from the model fails in turn; it leaves nothing behind."""
    before = held(model)
    for method, at in (("create_stream", 1), ("alloc_host_pinned", 1), ("alloc_host_pinned", 3), ("create_event", 2)):
        fail = FailOnce(getattr(model, method), at, "no more")
        with mock.patch.object(model, method, fail), pytest.raises(DeviceError, match="no more"):
            Engine(model, lag=1)
        assert held(model) == before
