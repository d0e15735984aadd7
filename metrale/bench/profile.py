# SPDX-License-Identifier: MIT OR Apache-2.0
"""One step half way, launch by launch: where each belongs, what it moves, and how long it takes.

A greedy step is the engine's: the device feeds it, and the choice is part of it. A step of a search is the pass of
every beam, and the selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_runtime import LaunchRecord
from metrale.bench import beams, serving
from metrale.bench.breakdown import Recorded, Timed, joined, recording, summary, time_launches
from metrale.bench.cases import Case
from metrale.bench.floors import Call, Rates, cost
from metrale.bench.parts import Place, places
from metrale.bench.timing import Clock, Reader
from metrale.nllb.model import NllbModel

REPEATS: Final = 15
"""Replays of each kind of launch on a GPU. On the host, where one takes longer, there are as many as timed calls."""

_MOVED: Final[Mapping[str, tuple[int, int]]] = {"copy": (1, 1), "memset": (0, 1)}
"""How often what is neither a kernel nor a product reads and writes its bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Launches that are recorded and timed together: a pass and the choice after it, or one of the two."""

    recorded: Recorded
    timed: Timed
    places: Sequence[Place]


def profile(model: NllbModel, case: Case, clock: Clock, reader: Reader, runs: int) -> list[Piece]:
    """Record a step half way and time its launches, as `time_launches` does; of too few tokens there is none.

    On the host no cache is emptied, and the times are those of its clock.
    """
    if not case.lengths.device_steps(1):
        return []
    ahead = model.gpu.limits().runs_ahead

    def timed(recorded: Recorded) -> Piece:
        times = time_launches(clock, reader if ahead else None, recorded.calls, REPEATS if ahead else runs)
        return Piece(recorded, times, places(model.device_weights, recorded.calls))

    if case.beams > 1:
        with beams.Searches(model, case.batch, case.beams, case.lengths) as searches:
            searches.begin()
            for _ in range(case.lengths.half_way):
                searches.step()
            with recording(model.gpu) as step:  # timed before the selection changes the ancestry that the pass read
                searches.decode()
            first = timed(step)
            with recording(model.gpu) as selection:
                searches.select()
            return [first, timed(selection)]
    with serving.FedBatch(model, case.batch, case.lengths) as batch:
        batch.prefill()
        batch.sample()
        for _ in range(case.lengths.half_way):
            batch.feed()
            batch.read()
        batch.read()
        with recording(model.gpu) as step:
            batch.feed()
        return [timed(step)]


def layers(pieces: Sequence[Piece], rates: Rates) -> dict[str, Any] | None:
    """Return where the time of a step goes, as `metrale.bench.breakdown.summary` has it; None for no step."""
    return joined(*(summary(one.timed, one.places, rates) for one in pieces)) if pieces else None


def unseen(pieces: Sequence[Piece]) -> int:
    """Return how many kernels and products of a step are launches of no op, so that nothing is known of them."""
    return sum(one.recorded.unseen() for one in pieces)


def lines(pieces: Sequence[Piece], case: Case, rates: Rates) -> Iterator[dict[str, Any]]:
    """Yield what a step enqueues, in order, as objects for JSON; docs/bench.md lists the keys."""
    about = {
        "batch": case.batch,
        "beams": case.beams,
        "source_tokens": case.lengths.source,
        "new_tokens": case.lengths.new,
    }
    index = 0
    for piece in pieces:
        number = {first: call for call, first in enumerate(piece.recorded.first)}
        for at, record in enumerate(piece.recorded.trace):
            if record.kind != "wait":
                known = _launch(piece, number[at], rates) if at in number else _other(record)
                yield {**about, "index": index, **_enqueued(record), **known}
                index += 1


def _enqueued(record: LaunchRecord) -> dict[str, Any]:
    """Return what the backend saw."""
    is_kernel = record.kind == "kernel"
    return {
        "kind": record.kind,
        "name": record.name,
        "grid": list(record.grid) if is_kernel else None,
        "block": list(record.block) if is_kernel else None,
        "shared_bytes": record.shared_bytes if is_kernel else None,
    }


def _launch(piece: Piece, number: int, rates: Rates) -> dict[str, Any]:
    """Return what is known of the launch of an op."""
    call: Call = piece.timed.calls[number]
    moved = cost(call)
    return {
        "op": call.spec.name,
        "label": call.label,
        "library": call.spec.library,
        "layer": piece.places[number].layer,
        "part": piece.places[number].part,
        "read_bytes": moved.read,
        "written_bytes": moved.written,
        "flop": moved.flop,
        "floor_us": round(moved.floor_us(rates), 4),
        "us": round(piece.timed.us[number], 3),
    }


def _other(record: LaunchRecord) -> dict[str, Any]:
    """Return the same keys for a copy or a memset, which is not timed, or for a launch of no op."""
    found: dict[str, Any] = dict.fromkeys(("op", "label", "library", "layer", "part"))
    reads, writes = _MOVED.get(record.kind, (None, None))
    return found | {
        "read_bytes": None if reads is None else reads * record.nbytes,
        "written_bytes": None if writes is None else writes * record.nbytes,
        **dict.fromkeys(("flop", "floor_us", "us")),
    }
