# SPDX-License-Identifier: MIT OR Apache-2.0
"""One case after another: checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from gpu_runtime import GpuBackend
from gpu_runtime.errors import GpuRuntimeError
from metrale.bench import beams, decode, engine_busy, serving
from metrale.bench.breakdown import recording
from metrale.bench.cases import Case
from metrale.bench.check import Judge
from metrale.bench.floors import Rates, floor_us
from metrale.bench.profile import layers, lines, profile, unseen
from metrale.bench.protocol import Lengths, measure_ms, spread
from metrale.bench.report import NOT_MEASURED, NOT_TIMED
from metrale.bench.timing import FLUSH_BYTES, Clock, Reader
from metrale.errors import MetraleError
from metrale.nllb.model import NllbModel

READER_BYTES: Final = {"cuda": 4 << 30, "host": 1 << 20}
"""What is read to keep a device busy, and its L2 empty of weights, where there is room for so much."""
_READER_SHARE: Final = 8
"""The part of the free memory that it may take."""
BUSY_RUNS: Final = 3
"""Runs of the engine at most, apart from the timed ones, in which events say how busy the device is."""
_PACK: Final = 16  # bytes that a thread reads at once


@dataclass(frozen=True)
class Bench:
    """What cases are timed with.

    Attributes
    ----------
    clock : Clock
    reader : Reader
    busy : Busy
        Made of both.
    rates : Rates
        Of the floors.
    runs : int
        Timed calls of each case.
    profiles : bool
        Whether the launches of a step are timed as well.
    trace : callable or None
        What is told of each of them then, as `metrale.bench.profile.lines` has it.
    """

    clock: Clock
    reader: Reader
    busy: decode.Busy
    rates: Rates
    runs: int
    profiles: bool = False
    trace: Callable[[Mapping[str, Any]], None] | None = None


@contextmanager
def instruments(gpu: GpuBackend) -> Iterator[tuple[Clock, Reader]]:
    """Give a clock and a reader of a device, which are gone after the context."""
    clock = Clock(gpu)
    size = min(READER_BYTES[gpu.kind()], gpu.free_memory() // _READER_SHARE) // _PACK * _PACK
    try:
        with Reader(gpu, size) as reader:
            yield clock, reader
    finally:
        clock.close()


def stays_in_l2(weight_bytes: int) -> bool:
    """Return whether weights are so small that a step may find them in the L2, where the step before left them."""
    return weight_bytes < FLUSH_BYTES


def measure(model: NllbModel, case: Case, dtype: str, judge: Judge, bench: Bench) -> tuple[dict[str, Any], list[str]]:
    """Check and time one case.

    Returns
    -------
    dict
        The case, its ``check``, and its figures; those of `NOT_TIMED` when the check failed, or anything else.
    list of str
        What went wrong.
    """
    entry: dict[str, Any] = {
        "batch": case.batch,
        "beams": case.beams,
        "source_tokens": case.lengths.source,
        "new_tokens": case.lengths.new,
        "check": {"passed": False},
        **NOT_TIMED,
        **NOT_MEASURED,
        "peers": {},
    }
    try:
        entry["check"] = judge(case.batch, case.lengths.source)
        if entry["check"]["passed"]:
            entry["check"] |= (_check_ids if case.beams == 1 else _check_search)(model, case, dtype)
        if not entry["check"]["passed"]:
            return entry, [f"the results are wrong, so nothing was timed: {entry['check']}"]
        entry |= (_greedy if case.beams == 1 else _searched)(model, case, bench)
        entry |= _ratios(entry)
    except (MetraleError, GpuRuntimeError, RuntimeError) as error:
        return {**entry, **NOT_TIMED, **NOT_MEASURED}, [f"{type(error).__name__}: {error}"[:2000]]
    return entry, _profile(model, case, bench, entry) if bench.profiles else []


def _profile(model: NllbModel, case: Case, bench: Bench, entry: dict[str, Any]) -> list[str]:
    """Put the layers of a step into a case that is timed, and tell of its launches; return what went wrong."""
    try:
        pieces = profile(model, case, bench.clock, bench.reader, bench.runs)
        entry["layers"] = layers(pieces, bench.rates)
        if bench.trace is not None:
            for line in lines(pieces, case, bench.rates):
                bench.trace(line)
    except (MetraleError, GpuRuntimeError, RuntimeError) as error:
        return [f"the launches of a step were not timed: {type(error).__name__}: {error}"[:2000]]
    missing = unseen(pieces)
    return [f"{missing} launches of a step are of no op, and in no part of it"] if missing else []


def _check_ids(model: NllbModel, case: Case, dtype: str) -> dict[str, Any]:
    """Say whether steps that the device feeds choose the ids that the host would feed, all of them."""
    hosted = decode.generate(model, case.batch, case.lengths.new, case.lengths)["ids"]
    _, fed = serving.generate(model, case.batch, case.lengths.new, case.lengths)
    return {"same_ids_fed": fed == hosted, "passed": fed == hosted}


def _check_search(model: NllbModel, case: Case, dtype: str) -> dict[str, Any]:
    """Say whether the log-probabilities that a search gives its ids are those of the ids fed alone, one by one."""
    _, best = beams.generate(model, case.batch, case.beams, case.lengths.new, case.lengths)
    found = beams.check(model, best[0], dtype, case.lengths)
    return {"search": found, "passed": found["passed"]}


def _greedy(model: NllbModel, case: Case, bench: Bench) -> dict[str, Any]:
    """Time the engine, and one step of it; all ids must be chosen as `_check_ids` found them."""
    size, lengths = case.batch, case.lengths
    times = serving.engine_times(model, size, bench.runs, lengths)
    alone = device_figures(model, size, bench, lengths) if model.gpu.limits().runs_ahead else {}
    floor = _floor_ms(bench, lambda: step_floor_us(model, case, bench.rates), case)
    busy = engine_busy.measure(model, size, min(bench.runs, BUSY_RUNS), lengths)
    return {**times, **alone, "floor_ms": floor, "engine_busy": busy}


def device_figures(model: NllbModel, size: int, bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """Time a step of the engine on the device alone, and how long the host takes to enqueue one.

    Nothing is returned when so few tokens are put out that there is no step half way.
    """
    if not lengths.device_steps(bench.runs):
        return {}
    host = serving.host_ms(model, size, lengths)
    alone = serving.device_ms(model, size, bench.clock, bench.busy, max(host), bench.runs, lengths)
    return {"host_enqueue_ms": spread(host), "device_step_ms": spread(alone)}


def _searched(model: NllbModel, case: Case, bench: Bench) -> dict[str, Any]:
    """Time whole searches, and one step of them."""
    size, width, lengths = case.batch, case.beams, case.lengths
    times = measure_ms(lambda new: beams.generate(model, size, width, new, lengths)[0], size, bench.runs, lengths.new)
    alone: dict[str, Any] = {}
    if model.gpu.limits().runs_ahead:
        found = beams.step_times(model, size, width, bench.clock, bench.busy, bench.runs, lengths)
        if found:
            alone = {"host_enqueue_ms": found["host_enqueue_ms"], "device_step_ms": found["step_device_ms"]}
    return {**times, **alone, "floor_ms": _floor_ms(bench, lambda: search_floor_us(model, case, bench.rates), case)}


def _floor_ms(bench: Bench, floor: Callable[[], float], case: Case) -> float | None:
    return round(floor() / 1e3, 6) if case.lengths.device_steps(1) else None


def step_floor_us(model: NllbModel, case: Case, rates: Rates) -> float:
    """Return the floor of a greedy step half way, the choice included."""
    with decode.Batch(model, case.batch, case.lengths) as batch:
        tokens = batch.go_half_way(batch.choose(batch.prefill()))
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
    return floor_us(step.calls, rates)


def search_floor_us(model: NllbModel, case: Case, rates: Rates) -> float:
    """Return the floor of a step of a search half way: the pass of every beam, and the selection."""
    with beams.Searches(model, case.batch, case.beams, case.lengths) as searches:
        searches.begin()
        for _ in range(case.lengths.half_way):
            searches.step()
        with recording(model.gpu) as step:  # apart: the selection changes the ancestry that the pass read
            searches.decode()
        with recording(model.gpu) as selection:
            searches.select()
    return floor_us(step.calls, rates) + floor_us(selection.calls, rates)


def _ratios(entry: dict[str, Any]) -> dict[str, float | None]:
    floor, step, device = entry["floor_ms"], entry["step_ms"], entry["device_step_ms"]
    return {
        "ratio_to_floor": round(step["median"] / floor, 2) if floor and step else None,
        "device_ratio_to_floor": round(device["median"] / floor, 2) if floor and device else None,
    }
