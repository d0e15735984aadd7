# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests with adapters: each gets its own, which stays where it is until the request has ended, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest

from gpu_runtime.errors import DeviceError
from gpu_runtime.host import HostBackend
from metrale.engine import Engine, Request
from metrale.errors import InvalidInput, SequenceError
from metrale.nllb.model import NllbModel
from tests.backends import open_host
from tests.engine.oracle import Solo, run_solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, POSITION_BYTES, ask, serving, stopped
from tests.nllb.adapters import Shelf

RunSolo = Callable[[Request], Solo]

LANES = {"max_batch": 4, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def model(shelf: Shelf) -> Iterator[NllbModel]:
    """A model with three adapters."""
    with open_host() as gpu, shelf.load(gpu, "abc", **{**LIMITS, **LANES}) as made:
        yield made
        assert_nobody_uses(made, shelf)


@pytest.fixture(scope="module")
def solo(shelf: Shelf) -> Iterator[RunSolo]:
    """A function that says what a request comes to alone, with the adapters of `model`."""
    with HostBackend() as gpu, shelf.load(gpu, "abc", **{**LIMITS, **LANES, "max_batch": 1}) as made:
        yield lambda request: run_solo(made, request)


def assert_nobody_uses(model: NllbModel, shelf: Shelf) -> None:
    """Every slot can be loaded into."""
    for name, slot in model.adapters().items():
        model.swap_lora_from_disk(shelf[name], name, slot)


def in_use(model: NllbModel, shelf: Shelf, slot: int) -> str:
    """Return who uses a slot's adapter, as the refusal says; nothing when nobody does."""
    name = next(name for name, at in model.adapters().items() if at == slot)
    try:
        model.swap_lora_from_disk(shelf[name], name, slot)
    except SequenceError as error:
        return str(error)
    return ""


def clear_requests(solo: RunSolo, count: int) -> list[Solo]:
    """Return requests with adapters and none in turn, that come to the same in any company."""
    drawn = [solo(ask(5 + index, 6, adapter_slot=index % 4 - 1, max_new_tokens=6 + index)) for index in range(12)]
    found = [one for one in drawn if one.clear][:count]
    assert len(found) == count
    assert len({one.request.adapter_slot for one in found}) > 2
    return found


def test_requests_with_different_adapters_run_together(model: NllbModel, solo: RunSolo) -> None:
    requests = clear_requests(solo, 8)
    with serving(model) as engine:
        for one, handle in [(one, engine.submit(one.request)) for one in requests]:
            one.check(handle)


def test_what_is_active_is_no_matter(model: NllbModel, solo: RunSolo) -> None:
    """A request without an adapter gets the base model."""
    model.set_active_lora("b")
    request = ask(5, 6)
    with serving(model) as engine:
        solo(request).check(engine.submit(request))


# at submission


@pytest.mark.parametrize("slot", [3, 1000])
def test_an_adapter_that_is_not_there_is_refused_at_once(model: NllbModel, slot: int) -> None:
    with serving(model) as engine:
        for submit in (engine.submit, lambda request: asyncio.run(engine.asubmit(request))):
            with pytest.raises(InvalidInput, match=r"adapter_slot: expected -1, or .*0: 'a', 1: 'b', 2: 'c'"):
                submit(ask(adapter_slot=slot))
        assert engine.stats().submitted == 0


def test_a_model_that_has_no_adapters_at_all(shelf: Shelf) -> None:
    with HostBackend() as gpu, shelf.load(gpu, **LIMITS) as plain, serving(plain) as engine:
        with pytest.raises(InvalidInput, match="adapter_slot: expected -1, as the model was loaded without room"):
            engine.submit(ask(adapter_slot=0))
        with (  # as `metrale.model.ModelAdapters` answers
            mock.patch.object(plain, "acquire_adapter_slot", return_value=-1),
            mock.patch.object(plain, "adapter_id_for", return_value=0),
            pytest.raises(InvalidInput, match="adapter_slot: expected -1, or the slot of a resident adapter of the"),
        ):
            engine.submit(ask(adapter_slot=0))


def test_submitting_takes_no_reference(model: NllbModel, shelf: Shelf) -> None:
    with serving(model) as engine, stopped(engine):
        engine.submit(ask(adapter_slot=1))
        assert in_use(model, shelf, 0) == in_use(model, shelf, 2) == ""


@pytest.mark.parametrize("name", ["d", "b"])
def test_an_adapter_that_leaves_while_the_request_waits(
    model: NllbModel, shelf: Shelf, solo: RunSolo, name: str
) -> None:
    """Also when one of the same name takes its place: that may compute something else."""
    other = ask(5, 6, adapter_slot=0)
    with serving(model) as engine:
        with stopped(engine):
            handle, fine = engine.submit(ask(adapter_slot=1)), engine.submit(other)
            model.swap_lora_from_disk(shelf[name], name, 1)
        result = handle.result(PATIENCE)
        assert (result.finish_reason, result.ids) == ("error", [])
        assert result.error == "EngineError: the adapter in slot 1 has left it while the request waited"
        solo(other).check(fine)
        assert model.kv_usage()[0] == 0
    model.swap_lora_from_disk(shelf["b"], "b", 1)


# until the end


def test_a_running_request_keeps_its_adapter(model: NllbModel, shelf: Shelf) -> None:
    """By a reference of its own, whatever its sequence does."""
    with serving(model) as engine, Gate(at=2) as gate:
        handle = engine.submit(ask(adapter_slot=1, on_token=gate))
        gate.reach()
        assert "slot 1 ('b'): 1 references and the sequences in slots 0" in in_use(model, shelf, 1)
        assert in_use(model, shelf, 0) == ""
        gate.open()
        handle.result(PATIENCE)
        until(lambda: in_use(model, shelf, 1) == "")


class Moved:
    """A request with an adapter whose sequence is in host memory, as another of a higher priority has its lane."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.low, self.high = Gate(at=3), Gate(at=2)
        self.handle = engine.submit(replace(request, on_token=self.low))
        self.low.reach()
        self.other = engine.submit(ask(9, priority=1, on_token=self.high))
        self.low.open()
        self.high.reach()
        assert engine.stats().now.swapped_out == 1


@pytest.mark.parametrize("end", ["resumed", "cancelled", "closed", "lost"])
def test_a_request_in_host_memory_keeps_its_adapter(model: NllbModel, shelf: Shelf, solo: RunSolo, end: str) -> None:
    """Until it comes back and ends, or does not come back."""
    request = next(one for one in (ask(5 + i, 6, adapter_slot=1) for i in range(9)) if solo(one).clear)
    with serving(model, max_lanes=1) as engine:
        moved = Moved(engine, request)
        assert in_use(model, shelf, 1).endswith("slot 1 ('b'): 1 references")
        if end == "cancelled":
            moved.handle.cancel()
        failing = mock.patch.object(model, "restore_sequence_state", side_effect=DeviceError("lost"))
        if end == "lost":
            failing.start()
        if end == "closed":
            engine._worker.stop(drain=False)  # which `close` does, and waits
        moved.high.open()
        result = moved.handle.result(PATIENCE)
        if end == "lost":
            failing.stop()
            assert result.error == "DeviceError: lost"
        elif end == "resumed":
            solo(request).check_result(result)
        else:
            assert result.finish_reason == "cancelled"
        until(lambda: in_use(model, shelf, 1) == "")


def test_a_request_that_outgrows_its_kv_comes_back_with_its_adapter(shelf: Shelf, solo: RunSolo) -> None:
    requests = [one.request for one in clear_requests(solo, 6)]
    cramped = {"kv_bytes": 44 * POSITION_BYTES, "max_batch": 4}
    with (
        open_host() as gpu,
        shelf.load(gpu, "abc", **{**LIMITS, **LANES, **cramped}) as model,
        mock.patch("metrale.engine.admission._SPARE", 2),
        serving(model) as engine,
    ):
        for request, handle in [(one, engine.submit(one)) for one in requests]:
            solo(request).check(handle)
        assert engine.stats().preemptions > 0
        until(lambda: engine.stats().now.running == 0)
        assert_nobody_uses(model, shelf)


def test_a_prefill_that_fails_gives_the_adapter_back(model: NllbModel, shelf: Shelf) -> None:
    broken = mock.Mock(side_effect=DeviceError("broken"))
    with serving(model) as engine, mock.patch.object(model._passes, "_prefill", broken):
        assert engine.submit(ask(adapter_slot=2)).result(PATIENCE).finish_reason == "error"
        until(lambda: in_use(model, shelf, 2) == "")
