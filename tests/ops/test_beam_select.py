# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `beam_select` promises of a search: every step of it, its details, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import MINIMUM
from metrale.ops.beam_layout import (
    AT_LIMIT,
    DONE,
    EARLY,
    GROUP_COLUMNS,
    GROUP_SETTINGS,
    IDS,
    LENGTH,
    MAX_BEAMS,
    MAX_KEPT,
    NO_CHOICE,
    NOT_FINITE,
    ORDER,
    SCORE,
    STOPPED,
    pool_width,
)
from metrale.ops.beam_select import OP
from tests.backends import host_only
from tests.ops.beam_oracle import FAR, beam_select
from tests.ops.beam_search import Run, Search, textbook
from tests.ops.harness import run, seed_of

Array = np.ndarray[Any, np.dtype[Any]]


def test_the_source_names_the_same_columns_bits_and_sizes() -> None:
    assert OP.source is not None
    source = OP.source.read_text(encoding="utf-8")
    names = {kind: body.split(", ") for kind, body in re.findall(r"enum (\w+) \{ (.*) \};", source)}
    renamed = {"K": "KEPT"}
    assert names["Count"] == [*(renamed.get(name.upper(), name.upper()) for name in GROUP_COLUMNS), "COUNTS"]
    assert names["Setting"] == [*(name.upper() for name in GROUP_SETTINGS), "SETTINGS"]
    assert names["Mode"] == [f"AT_LIMIT = {AT_LIMIT}", f"EARLY = {EARLY}"]
    bits = {"DONE": DONE, "NOT_FINITE": NOT_FINITE, "NO_CHOICE": NO_CHOICE, "STOPPED": STOPPED}
    assert names["State"] == [f"{name} = {bit}" for name, bit in bits.items()]
    assert [names["Column"].index(name) for name in ("ORDER", "SCORE", "HELD", "IDS")] == [ORDER, SCORE, LENGTH, IDS]
    assert f"MAX_BEAMS = {MAX_BEAMS};" in source
    assert f"MAX_KEPT = {MAX_KEPT};" in source


@pytest.mark.parametrize("case", OP.cases)
def test_every_bit_is_what_the_oracle_says(gpu: GpuBackend, case: Mapping[str, Any]) -> None:
    values: dict[str, Any] = dict(OP.make_inputs(np.random.default_rng(seed_of(OP, "f32", case) + 1), "f32", **case))
    results = run(OP, gpu, "f32", values)
    for name, exact in beam_select(values).items():
        assert results[name].tobytes() == exact.tobytes(), name


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.7, 2.0])
def test_whole_searches_are_the_textbook_s(gpu: GpuBackend, early: bool | str, penalty: float) -> None:
    searches = [
        Search(seed=1, early=early, penalty=penalty),
        Search(seed=2, beams=3, eos=(0, 7), prompt=(1, 5, 2), early=early, penalty=penalty),
        Search(seed=3, beams=1, early=early, penalty=penalty),
        Search(seed=4, beams=5, vocab=40, eos=(33, 3, 39), early=early, penalty=penalty, limit=7, scale=0.5),
        Search(seed=5, beams=2, eos=(), early=early, penalty=penalty, limit=5),
        Search(seed=6, beams=4, vocab=3, early=early, penalty=penalty),  # beams of -1e9 go on, and finish
        Search(seed=7, beams=4, vocab=3, eos=(0, 1), early=early, penalty=penalty),
        Search(seed=8, beams=6, vocab=9, early=early, penalty=penalty, banned=0.6),
        Search(seed=9, beams=4, early=early, penalty=penalty, prompt=(2, 3, 4, 5, 6, 7, 8, 9), limit=9),
        Search(seed=10, beams=2, early=early, penalty=penalty, scale=6.0, limit=16),
    ]
    expected = [textbook(search) for search in searches]
    assert len({len(steps) for steps in expected}) > 2, "they stop at different steps"
    found = Run(gpu, searches, capacity=17).traces()
    for search, steps, right in zip(searches, found, expected, strict=True):
        assert steps == right, search


def inputs_of(
    values: Any, *, running: Any, eos: tuple[int, ...] = (), pool: tuple[float, ...] = (), length: int = 2, **given: Any
) -> dict[str, Any]:
    """Return the op's parameters for one group, whose beams have the slots 0, 1, ...; ids are 10 times the beam plus
    the rank, and ``pool`` the scores of what has finished, the i-th best in member i's row."""
    values = np.asarray(values, np.float32)
    beams, most = len(running), values.shape[1]
    counts = {"row": 0, "member": 0, "beams": beams, "k": most, "fresh": 0, "length": length, "mode": 0, "eos": 0}
    capacity, state = 4, given.pop("state", 0)
    norm, bound_norm = given.pop("norm", 1.0), given.pop("bound_norm", 1.0)
    counts |= given
    rows = np.full((beams, pool_width(capacity)), -5, np.int32)
    rows[:, ORDER] = [place if place < len(pool) else -1 for place in range(beams)]
    rows[: len(pool), SCORE] = np.array(pool, np.float32).view(np.int32)
    rows[: len(pool), LENGTH] = 1
    bans = np.zeros((beams, 2, 3), np.uint32)
    for token in eos:
        bans[0, 1, token >> 5] |= np.uint32(1 << (token & 31))
    return {
        "values": values,
        "ids": (10 * np.arange(len(values))[:, None] + np.arange(most)).astype(np.int32),
        "flags": np.zeros(len(values), np.int32),
        "counts": np.array([[counts[name] for name in GROUP_COLUMNS]], np.int32),
        "settings": np.array([[norm, bound_norm]], np.float32),
        "members": np.arange(beams, dtype=np.int32),
        "bans": bans,
        "running": np.asarray(running, np.float32),
        "history": np.arange(beams * capacity, dtype=np.int32).reshape(beams, capacity) + 50,
        "ancestry": np.zeros((beams, capacity), np.int32),
        "logps": np.full((beams, capacity), -1.0, np.float32),
        "pool": rows,
        "state": np.full(beams, state, np.int32),
        "cells": np.full(beams, -77, np.int32),
        "results": np.full(1, -77, np.int32),
        "groups": 1,
        "candidate_rows": len(values),
        "most": most,
        "member_count": beams,
        "slot_count": beams,
        "words": 3,
        "capacity": capacity,
        "pool_width": pool_width(capacity),
        "cell_base": 0,
        "cell_count": beams,
    }


def held(results: Mapping[str, Array]) -> list[float]:
    """Return the scores in the pool, best first."""
    pool = results["pool"]
    members = [member for member in pool[:, ORDER] if member >= 0]
    return [float(score) for score in pool[members, SCORE].view(np.float32)]


TWO = [[-1.0, -2.0, -3.0, -4.0], [-1.5, -2.5, -3.5, -4.5]]


def test_a_step_without_an_end(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2]))
    assert found["running"].tolist() == [-2, -3]
    assert found["cells"].tolist() == [0, 1]  # both go on with the first beam
    assert found["history"].tolist() == [[50, 51, 0, 53], [50, 51, 1, 57]]
    assert found["ancestry"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert found["logps"].tolist() == [[-1, -1, -1, -1], [-1, -1, -2, -1]]
    assert found["results"].tolist() == [0]
    assert held(found) == []


def test_the_lower_beam_wins_a_tie_then_the_better_rank(gpu: GpuBackend) -> None:
    values = inputs_of([[-2.0, -2.0, -2.0, -2.0], [-1.0, -1.0, -1.0, -1.0]], running=[0, -1])
    assert run(OP, gpu, "f32", values)["cells"].tolist() == [0, 1]


def test_what_has_finished_goes_into_the_pool_with_its_score_over_the_norm(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(1,), norm=4.0))
    assert found["cells"].tolist() == [0, 10]
    assert held(found) == [-0.75]
    assert found["pool"][0, LENGTH] == 3
    assert found["pool"][0, IDS : IDS + 3].tolist() == [50, 51, 1]
    assert found["pool"][0, IDS + 4 : IDS + 7].view(np.float32).tolist() == [-1, -1, -2]


def test_only_the_first_candidates_as_many_as_beams_come_into_the_pool(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(10,)))  # the third
    assert held(found) == []
    assert found["cells"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("norm", "scores"), [(1.0, []), (0.5, []), (2.0, [-5e8])], ids=["no better than a free place", "worse", "better"]
)
def test_a_beam_of_minus_1e9_comes_into_the_pool_when_the_norm_makes_it_better_than_a_free_place(
    gpu: GpuBackend, norm: float, scores: list[float]
) -> None:
    values = inputs_of([[-1.0, -np.inf, -np.inf, -np.inf]] * 2, running=[-1, FAR], eos=(10,), norm=norm)
    assert held(run(OP, gpu, "f32", values)) == scores


def test_an_equal_score_does_not_displace_what_is_there(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(0, 1), pool=(-1.0, -2.0)))
    assert held(found) == [-1, -2]
    assert (found["pool"][:, LENGTH] == 1).all()


def test_what_enters_a_full_pool_takes_the_row_of_what_leaves_it(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(0,), pool=(-1.0, -5.0)))
    assert held(found) == [-1, -2]
    assert found["pool"][:, LENGTH].tolist() == [1, 3]
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(0,), pool=(-4.0, -5.0)))
    assert held(found) == [-2, -4]
    assert found["pool"][:, ORDER].tolist() == [1, 0]


def test_the_search_stops_when_the_best_beam_cannot_better_the_worst_of_a_full_pool(gpu: GpuBackend) -> None:
    for bound_norm, state in ((1.0, STOPPED | DONE), (1.9, STOPPED | DONE), (2.1, 0)):
        values = inputs_of(TWO, running=[-1, -2], pool=(-0.5, -1.0), bound_norm=bound_norm)
        assert run(OP, gpu, "f32", values)["results"].tolist() == [state]
    values = inputs_of(TWO, running=[-1, -2], pool=(-0.5, -1.0), bound_norm=2.0)  # no better is not better
    assert run(OP, gpu, "f32", values)["results"].tolist() == [STOPPED | DONE]


def test_a_search_that_has_stopped_stays_so_and_takes_nothing_more(gpu: GpuBackend) -> None:
    given: dict[str, Any] = {"running": [-1, -2], "eos": (0,), "pool": (-8.0, -9.0), "bound_norm": 9.0}
    found = run(OP, gpu, "f32", inputs_of(TWO, **given))
    assert (held(found), found["results"].tolist()) == ([-2, -8], [0])
    found = run(OP, gpu, "f32", inputs_of(TWO, **given, state=STOPPED))
    assert (held(found), found["results"].tolist()) == ([-8, -9], [STOPPED | DONE])


def test_early_stopping_is_done_with_a_full_pool_which_takes_nothing_more(gpu: GpuBackend) -> None:
    given: dict[str, Any] = {"running": [-1, -2], "eos": (0,), "bound_norm": 9.0}
    for mode, state in ((0, 0), (EARLY, DONE)):
        found = run(OP, gpu, "f32", inputs_of(TWO, **given, pool=(-8.0,), mode=mode))
        assert (held(found), found["results"].tolist()) == ([-2, -8], [state])
    found = run(OP, gpu, "f32", inputs_of(TWO, **given, pool=(-8.0, -9.0), mode=EARLY))
    assert (held(found), found["results"].tolist()) == ([-8, -9], [DONE])
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], pool=(-8.0,), mode=EARLY, bound_norm=9.0))
    assert found["results"].tolist() == [0], "with room it goes on"


@pytest.mark.parametrize("ended", [{"mode": AT_LIMIT}, {"eos": (0, 1, 2, 3, 10, 11, 12, 13)}])
def test_a_group_whose_candidates_are_all_finished_is_done(gpu: GpuBackend, ended: Mapping[str, Any]) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], **ended))
    assert found["results"].tolist() == [DONE | STOPPED]
    assert held(found) == [-2, -3]
    assert found["running"].tolist() == [np.float32(-2) + FAR, np.float32(-3) + FAR]
    # where the pool has room, and a bound of -5e8 is better than a free place, that alone is the reason
    values = inputs_of([[-1.0, -np.inf, -np.inf, -np.inf]] * 2, running=[-1, FAR], bound_norm=2.0, **ended)
    found = run(OP, gpu, "f32", values)
    assert (held(found), found["results"].tolist()) == ([-2], [DONE])


def test_one_candidate_that_is_not_finished_keeps_a_group_going(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(TWO, running=[-1, -2], eos=(0, 1, 10), bound_norm=9.0))
    assert found["results"].tolist() == [0]
    assert found["cells"].tolist() == [2, 0]


def test_a_group_with_nothing_to_choose_says_so(gpu: GpuBackend) -> None:
    found = run(OP, gpu, "f32", inputs_of(np.full((2, 4), -np.inf), running=[-1, -2]))
    assert found["results"].tolist() == [DONE | NO_CHOICE | STOPPED]


@pytest.mark.parametrize("fresh", [0, 1])
def test_a_flag_ends_a_group_before_the_step(gpu: GpuBackend, fresh: int) -> None:
    values = inputs_of(TWO, running=[-1, -2], fresh=fresh, pool=(-8.0,))
    values["flags"][1 - fresh] = 1
    found = run(OP, gpu, "f32", values)
    assert found["results"].tolist() == [DONE | NOT_FINITE]
    assert found["state"].tolist() == [DONE | NOT_FINITE, 0]
    assert found["cells"].tolist() == [-77, -77]
    if fresh:
        assert found["history"].tolist() == [[50, 51, 52, 53], [50, 51, 56, 57]]
        assert held(found) == []
    else:
        assert all(found[name].tobytes() == values[name].tobytes() for name in ("running", "history", "pool"))


def test_only_the_flags_of_rows_that_are_used_count(gpu: GpuBackend) -> None:
    values = inputs_of(TWO, running=[-1, -2], fresh=1)
    values["flags"][1] = 1
    assert run(OP, gpu, "f32", values)["results"].tolist() == [0]


def test_a_search_begins_without_what_another_left(gpu: GpuBackend) -> None:
    """To the end of its rows: passes that run ahead of a search that is done read columns that no step wrote."""
    values = inputs_of(TWO, running=[-1, -2], fresh=1, length=1)
    values["ancestry"][...] = 63
    assert run(OP, gpu, "f32", values)["ancestry"].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]


def test_a_done_group_is_as_it_was(gpu: GpuBackend) -> None:
    values = inputs_of(TWO, running=[-1, -2], state=DONE | NO_CHOICE)
    values["flags"][...] = 1
    found = run(OP, gpu, "f32", values)
    assert found["results"].tolist() == [DONE | NO_CHOICE]
    assert all(found[name].tobytes() == values[name].tobytes() for name in found if name != "results")


def test_a_group_has_the_same_bits_alone_and_among_any_others(gpu: GpuBackend) -> None:
    values: dict[str, Any] = dict(OP.make_inputs(np.random.default_rng(3), "f32", **OP.cases[0]))
    together = run(OP, gpu, "f32", values)
    counts, settings = values["counts"], values["settings"]
    for group in range(values["groups"])[::5]:
        one = {"counts": counts[group : group + 1], "settings": settings[group : group + 1], "groups": 1}
        alone = run(OP, gpu, "f32", {**values, **one, "results": values["results"][:1]})
        slots = values["members"][counts[group, 1] : counts[group, 1] + counts[group, 2]]
        assert alone["results"][0] == together["results"][group]
        for name in ("running", "history", "ancestry", "logps", "pool", "state"):
            assert alone[name][slots].tobytes() == together[name][slots].tobytes(), (group, name)
    moved = {"counts": counts[::-1].copy(), "settings": settings[::-1].copy()}
    reversed_ = run(OP, gpu, "f32", {**values, **moved})
    assert all(
        reversed_[name].tobytes() == together[name].tobytes()
        for name in together
        if name not in {"counts", "settings", "results"}
    )


def test_a_pool_of_the_wrong_width_is_refused() -> None:
    assert OP.plan is not None
    assert OP.plan({"groups": 3, "capacity": 5, "pool_width": 13}, "f32", MINIMUM).grid == (3, 1, 1)
    with pytest.raises(ValueError, match="beam_select: pool_width: expected 13, got 12"):
        OP.plan({"groups": 3, "capacity": 5, "pool_width": 12}, "f32", MINIMUM)


@host_only
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("row", -1, r"row: expected values in \[0, 2\), got -1"),
        ("row", 1, r"row, the last: expected values in \[0, 2\), got 2"),
        ("member", -1, r"member: expected values in \[0, 2\), got -1"),
        ("member", 1, r"member, the last: expected values in \[0, 2\), got 2"),
        ("member", (1 << 31) - 1, r"member: expected"),
        ("beams", 0, r"beams: expected values in \[1, 65\), got 0"),
        ("beams", 65, r"beams: expected values in \[1, 65\), got 65"),
        ("k", 1, r"k, beyond beams: expected values in \[0, 256\), got -1"),
        ("k", 5, r"k: expected values in \[1, 5\), got 5"),
        ("fresh", 2, r"fresh: expected values in \[0, 2\), got 2"),
        ("length", -1, r"length: expected values in \[0, 4\), got -1"),
        ("length", 4, r"length: expected values in \[0, 4\), got 4"),
        ("mode", 4, r"mode: expected values in \[0, 4\), got 4"),
        ("eos", -1, r"eos: expected values in \[0, 2\), got -1"),
        ("eos", 2, r"eos: expected values in \[0, 2\), got 2"),
    ],
)
def test_a_column_that_is_out_of_range_is_refused(gpu: GpuBackend, column: str, value: int, message: str) -> None:
    values = inputs_of(TWO, running=[-1, -2])
    values["counts"][0, GROUP_COLUMNS.index(column)] = value
    with pytest.raises(InvalidPointer, match=f"beam_select: {message}"):
        run(OP, gpu, "f32", values)


@host_only
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("members", 2, r"members: expected values in \[0, 2\), got 0 to 2"),
        ("members", -1, r"members: expected values in \[0, 2\), got -1 to 0"),
        ("members", 0, "members: expected a slot for each beam, got one for several"),
        ("ids", 96, r"ids: expected values in \[0, 96\), got 0 to 96"),
        ("ids", -1, r"ids: expected values in \[0, 96\), got -1 to 12"),
        ("cell_base", 1, r"cells: expected values in \[0, 2\), got 1 to 2"),
        ("cell_base", -1, r"cells: expected values in \[0, 2\), got -1 to 0"),
        ("pool", 2, r"pool, the order: expected values in \[-1, 2\), got"),
    ],
)
def test_what_leads_out_of_an_array_is_refused(gpu: GpuBackend, name: str, value: int, message: str) -> None:
    values = inputs_of(TWO, running=[-1, -2])
    if name == "cell_base":
        values[name] = value
    elif name == "pool":
        values[name][1, ORDER] = value
    else:
        values[name].reshape(-1)[-1] = value
    with pytest.raises(InvalidPointer, match=f"beam_select: {message}"):
        run(OP, gpu, "f32", values)
