# SPDX-License-Identifier: MIT OR Apache-2.0
"""What searches ask of a device: which copies they make, what the host waits for; and that no KV is ever copied."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from gpu_runtime.handles import LaunchRecord
from gpu_runtime.host import HostBackend
from metrale import BeamReq
from metrale.nllb.model import NllbModel
from metrale.ops.beam_layout import pool_width
from tests.backends import host_only
from tests.nllb.by_rows import Like
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, prefilled
from tests.nllb.searching import BEAMS, ENDS, search, select, step

REQS = [
    BeamReq([5, 6, 7], 80, 81, num_beams=3, max_new=7, min_new=7),
    BeamReq([9], 82, 83, num_beams=1, max_new=5, min_new=5),
    BeamReq([30, 31], 84, 85, num_beams=2, max_new=4, prefix_tokens=(11, 12, 13), min_new=4),
]
POOL_ROW = 4 * pool_width(9)

pytestmark = host_only


class Places(Like):
    """Notes which blocks the copies within the device, and to the host, are of."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__(changes, check=True)
        self.read: Counter[str] = Counter()

    def copy_d2h_async(self, src: int, dst: Any, stream: Any = 0) -> None:
        super().copy_d2h_async(src, dst, stream)
        self.read[self._block(src)] += 1

    def copy_d2d_async(self, src: int, dst: int, nbytes: int, stream: Any = 0) -> None:
        super().copy_d2d_async(src, dst, nbytes, stream)
        self.read[self._block(src)] += 1

    def _block(self, ptr: int) -> str:
        return next(entry.tag for entry in self.alloc_report() if entry.ptr <= ptr < entry.ptr + entry.nbytes)


@pytest.fixture(params=[False, True], ids=["in step", "a step ahead"])
def places(request: pytest.FixtureRequest) -> Places:
    return Places({"runs_ahead": request.param})


@pytest.fixture
def model(places: Places, make_tiny: MakeModel) -> NllbModel:
    return make_tiny(places, max_batch=6)


@pytest.fixture
def trace(model: NllbModel, places: Places) -> list[LaunchRecord]:
    """What a call with all of `REQS`, which all start at once, asks of the device."""
    model.generate_beams(REQS)  # nothing is made for the first time any more
    places.read.clear()
    with model.gpu.launch_trace() as records:
        assert [len(found[0].ids) for found in model.generate_beams(REQS)] == [7, 5, 8]
    return records


STEPS = 6
"""Of a search of seven ids, of which the language is given."""


def copies(trace: list[LaunchRecord], name: str) -> list[int]:
    return [record.nbytes for record in trace if (record.kind, record.name) == ("copy", name)]


def test_only_results_are_copied_to_the_host(trace: list[LaunchRecord], places: Places) -> None:
    """A flag for each search and three words for each greedy request, once a step; and, at a search's end, its pool."""
    flags = [8] * 4 + [4] * 2  # steps with both searches, and then with the first alone
    choices = [12] * 4
    pools = [POOL_ROW] * 5
    assert Counter(copies(trace, "d2h")) == Counter(flags + choices + pools)
    assert copies(trace, "d2d") == []
    assert places.read == {"workspace": len(flags + choices + pools)}


def test_the_host_waits_for_the_events_of_results_alone(trace: list[LaunchRecord], model: NllbModel) -> None:
    """Once a step, and once for each search that ended; at the very end the stream of prefills is destroyed."""
    waits = Counter(record.name for record in trace if record.kind == "wait")
    assert waits == {"event": STEPS + 2}
    blocking = [
        one
        for one, after in pairwise(trace)
        if one.kind in ("copy", "memset") and (after.kind, after.name) == ("wait", "stream")
    ]
    assert blocking == []


def test_what_goes_to_the_device_are_tables_and_rules(trace: list[LaunchRecord], model: NllbModel) -> None:
    """One table a launch of either side, and for each request that begins what it may not choose."""
    kernels = Counter(record.name for record in trace if record.kind == "kernel")
    assert kernels["beam_select_f32"] == STEPS
    assert kernels["sample_f32"] == 4
    assert kernels["beam_candidates_f32"] == STEPS
    tables = STEPS - 1 + 1 + 2 + STEPS + 4  # decode steps; encoder; prefixes of two lengths; beams; sampling
    rules = 2 * 2 + 1  # bans and history of each search, bans of the greedy one
    assert len(copies(trace, "h2d")) == tables + rules
    assert not [record for record in trace if record.kind == "memset"]


def test_a_step_of_a_search_copies_one_table_and_launches_what_any_step_does(make_tiny: MakeModel) -> None:
    """With ancestry, the same kernels run, and no key or value is moved."""
    model = make_tiny(HostBackend(check=True))
    seq, row = search(model)
    select(model, [row], [seq])
    with model.gpu.launch_trace() as searched:
        base = step(model, [seq])
    with model.gpu.launch_trace() as chosen:
        select(model, [base], [seq])
    model.free_sequence(seq)
    ordinary = [prefilled(model, Case([5, 6, 7], 80, 81, [])) for _ in range(3)]
    with model.gpu.launch_trace() as plain:
        model.decode_batch([9] * 3, ordinary)
    assert [(r.kind, r.name, r.grid, r.nbytes) for r in searched] == [(r.kind, r.name, r.grid, r.nbytes) for r in plain]
    kinds = [(record.kind, record.name) for record in chosen if record.kind != "wait"]
    assert kinds == [
        ("copy", "h2d"),
        ("kernel", "beam_candidates_f32"),
        ("kernel", "beam_select_f32"),
        ("copy", "d2h"),
    ]


def test_taking_waits_for_its_own_copy_alone(make_tiny: MakeModel) -> None:
    """Of a search that has ended, while the steps after it are not even begun."""
    model = make_tiny(HostBackend(check=True, order="deferred"))
    seq, row = search(model, BEAMS, ENDS)
    flags = [0]
    while not flags[0] & 1:
        flags = select(model, [row], [seq])
        if not flags[0] & 1:
            row = step(model, [seq])
    prefilled(model, Case([5] * 9, 80, 81, []))
    after = model.create_event()
    model.record_event(after)
    with model.gpu.launch_trace() as trace:
        [found] = model.take_beams(seq)
    assert len(found.ids) == 6
    assert not model.event_query(after)
    assert [(record.kind, record.name, record.nbytes) for record in trace] == [
        *[("copy", "d2h", POOL_ROW)] * 3,
        ("wait", "event", 0),
    ]
    assert model.gpu.default_stream() not in {record.stream for record in trace[:3]}
    model.destroy_event(after)
