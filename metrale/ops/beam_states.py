# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam searches in the middle of their way, for tests of `beam_select`: groups of many kinds in one launch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_runtime.op import Inputs
from metrale.ops import inputs
from metrale.ops.beam_layout import (
    AT_LIMIT,
    DONE,
    EARLY,
    GROUP_COLUMNS,
    GROUP_SETTINGS,
    IDS,
    LENGTH,
    NO_CHOICE,
    NOT_FINITE,
    ORDER,
    SCORE,
    STOPPED,
    pool_width,
)

Array = np.ndarray[Any, np.dtype[Any]]

KINDS: Final[dict[str, dict[str, Any]]] = {
    "middle": {"held": 2},
    "young": {},
    "no eos": {"held": 1, "eos": 0.0},
    "all eos": {"held": 1, "eos": 1.0},
    "full": {"held": 4, "eos": 0.6},
    "full of the worst": {"held": 4, "eos": 0.6, "pool": -50.0},
    "full of the best": {"held": 4, "eos": 0.6, "pool": -0.001},
    "early": {"held": 3, "eos": 0.7, "mode": EARLY},
    "early, with room": {"held": 1, "eos": 0.2, "mode": EARLY, "bound_norm": 1e3},
    "early, full": {"held": 4, "eos": 0.7, "mode": EARLY, "pool": -50.0},
    "stopped": {"held": 2, "eos": 0.7, "state": STOPPED, "pool": -50.0},
    "stopped, full": {"held": 4, "eos": 0.7, "state": STOPPED, "mode": EARLY, "pool": -50.0},
    "limit": {"held": 2, "mode": AT_LIMIT, "eos": 0.0},
    "limit, empty": {"mode": AT_LIMIT, "eos": 0.3},
    "limit, early": {"held": 4, "mode": AT_LIMIT | EARLY},
    "first": {"fresh": 1},
    "first, again": {"fresh": 1, "held": 4, "state": DONE | STOPPED | NOT_FINITE, "eos": 0.5},
    "first, early": {"fresh": 1, "held": 4, "state": NO_CHOICE, "eos": 1.0, "mode": EARLY, "norm": 1.0},
    "first, flagged": {"fresh": 1, "held": 2, "state": STOPPED, "flag": 0},
    "flagged": {"held": 2, "flag": -1},
    "flagged, stopped": {"held": 2, "flag": 0, "state": STOPPED},
    "done": {"held": 3, "state": DONE, "mode": AT_LIMIT},
    "done, stopped": {"held": 4, "state": DONE | STOPPED, "flag": 0},
    "done, no choice": {"state": DONE | NO_CHOICE},
    "few": {"left": 2, "eos": 0.5},
    "first, few": {"fresh": 1, "left": 3, "eos": 0.7, "norm": 2.0},
    "first, few, norm 1": {"fresh": 1, "left": 3, "eos": 0.7, "norm": 1.0},
    "garbage": {"dead": 3, "left": 3, "eos": 0.8, "norm": 3.0},
    "garbage, small norm": {"dead": 3, "left": 3, "eos": 0.8, "norm": 0.5},
    "garbage alone": {"dead": 4, "left": 3, "eos": 0.5, "norm": 0.5, "bound_norm": 1.0},
    "nothing left": {"left": 0},
    "nan": {"left": 1, "rest": np.nan},
    "nan, few": {"left": 1, "rest": np.nan, "empty": 3},
    "nothing left, full": {"left": 0, "held": 4},
    "norm 0": {"held": 1, "eos": 0.6, "norm": 0.0, "bound_norm": 0.0},
    "one": {"beams": 1, "k": 2, "eos": 0.4},
    "one, full": {"beams": 1, "k": 3, "eos": 0.4, "held": 1},
    "one, first": {"beams": 1, "k": 2, "fresh": 1},
    "kept alone": {"beams": 5, "k": 5, "held": 3},
    "wide": {"beams": 64, "k": 256, "held": 40, "spread": 0.1},
    "wide, full": {"beams": 64, "k": 128, "held": 64, "eos": 0.5, "spread": 0.1},
    "wide, first": {"beams": 64, "k": 192, "fresh": 1, "held": 64, "left": 70},
    "warp": {"beams": 32, "k": 64, "held": 31, "eos": 0.5, "spread": 0.1},
    "warp and one": {"beams": 33, "k": 66, "held": 5, "eos": 0.4, "spread": 0.1},
}
"""Kinds of groups for tests: what differs from a search of four beams that keeps eight candidates, before its first
hypothesis is finished. ``held`` are hypotheses in the pool, ``eos`` the share of ids that end one, ``left`` the
candidates of a row that are not minus infinity, or ``rest``, ``empty`` the last rows without any, ``dead`` the last
beams, of scores near -1e9; ``flag`` is a row that is flagged, ``spread`` how far apart the beams are, and ``pool``
about what the pool's scores are, which else are near those of the candidates."""

_NORMS: Final = (1.0, 2.0, 0.5, 7.0, 1.9)


def make_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    kinds: tuple[str, ...],
    capacity: int = 12,
    length: int | None = None,
    words: int = 3,
    levels: bool = False,
    spare: int = 0,
) -> Inputs:
    """``kinds`` are names of `KINDS`, a group each. Histories are of ``length`` ids, or of any; with ``levels``, scores
    are few, so that many are equal; ``spare`` is added to the candidates of a row, to the rows and to the slots."""
    asked = [{"beams": 4, "k": 8, **KINDS[kind]} for kind in kinds]
    most = max(one["k"] for one in asked) + spare
    member_count = sum(one["beams"] for one in asked) + spare
    slot_count, cell_base = member_count + 1, 2 * spare
    members = rng.permutation(slot_count)[:member_count].astype(np.int32)
    candidate_rows = sum(1 if one.get("fresh") else one["beams"] for one in asked) + spare
    values: dict[str, Any] = {
        "values": np.full((candidate_rows, most), np.nan, np.float32),
        "ids": rng.integers(0, 32 * words, (candidate_rows, most)).astype(np.int32),
        "flags": np.zeros(candidate_rows, np.int32),
        "counts": np.zeros((len(asked), len(GROUP_COLUMNS)), np.int32),
        "settings": np.ones((len(asked), len(GROUP_SETTINGS)), np.float32),
        "members": members,
        "bans": rng.integers(0, 1 << 32, (slot_count, 2, words), np.uint32),
        "running": inputs.normal(rng, (slot_count,), "f32"),
        "history": rng.integers(0, 32 * words, (slot_count, capacity)).astype(np.int32),
        "ancestry": rng.integers(0, 64, (slot_count, capacity)).astype(np.int32),
        "logps": inputs.normal(rng, (slot_count, capacity), "f32", mean=-3.0),
        "pool": rng.integers(0, 1 << 20, (slot_count, pool_width(capacity))).astype(np.int32),
        "state": np.full(slot_count, 64, np.int32),
        "cells": inputs.output((cell_base + slot_count + spare,), "i32"),
        "results": inputs.output((len(asked),), "i32"),
    }
    row = candidate_rows - spare
    member = spare
    for group, one in enumerate(asked):
        rows = 1 if one.get("fresh") else one["beams"]
        row -= rows  # the last rows first
        past = int(rng.integers(1, capacity)) if length is None else length
        places = (row, member, one["beams"], one["k"], one.get("fresh", 0), past, one.get("mode", 0), members[member])
        values["counts"][group] = places
        _search(rng, values, group, one, slice(row, row + rows), levels)
        member += one["beams"]
    return {
        **values,
        "groups": len(asked),
        "candidate_rows": candidate_rows,
        "most": most,
        "member_count": member_count,
        "slot_count": slot_count,
        "words": words,
        "capacity": capacity,
        "pool_width": pool_width(capacity),
        "cell_base": cell_base,
        "cell_count": values["cells"].size,
    }


def _search(
    rng: np.random.Generator, values: dict[str, Any], group: int, one: dict[str, Any], rows: slice, levels: bool
) -> None:
    """Fill in one group: its candidates, settings, EOS ids, scores and pool."""
    _, member, beams, k, _, past, _, lead = values["counts"][group].tolist()
    slots = values["members"][member : member + beams]
    count = rows.stop - rows.start
    found = np.sort(-rng.exponential(3.0, (count, k)))[:, ::-1].astype(np.float32)
    running = np.sort(-3 - rng.exponential(one.get("spread", 2.0), beams))[::-1].astype(np.float32)
    if levels:
        found, running = np.floor(found), np.floor(running)
    if "left" in one:
        found[:, one["left"] :] = one.get("rest", -np.inf)
    if "empty" in one:
        found[count - one["empty"] :] = one.get("rest", -np.inf)
    if "dead" in one:
        running[beams - one["dead"] :] -= np.float32(1e9)
    values["values"][rows, :k] = found
    values["running"][slots] = running
    if "flag" in one:
        values["flags"][range(rows.start, rows.stop)[one["flag"]]] = 1

    norm = one.get("norm", _NORMS[rng.integers(0, 2 if levels else len(_NORMS))])
    values["settings"][group] = norm, one.get("bound_norm", norm * (1 + rng.integers(0, 2)))
    ends = rng.random(values["bans"].shape[-1] * 32) < one.get("eos", 0.3)
    values["bans"][lead, 1] = np.packbits(ends, bitorder="little").view("<u4")
    values["state"][slots[0]] = one.get("state", 0)

    scores = np.sort((running[:count, None] + found).ravel())[::-1][: 2 * beams]
    scores = scores[scores > -1e8]
    scores = scores / np.float32(norm or 1.0)
    if "pool" in one or not scores.size:
        scores = np.full(1, one.get("pool", -5.0), np.float32)
    _hold(rng, values, slots, one.get("held", 0), scores, past, levels)


def _hold(
    rng: np.random.Generator, values: dict[str, Any], slots: Array, held: int, scores: Array, past: int, levels: bool
) -> None:
    """Put ``held`` hypotheses with some of the scores into a group's pool, in any of its rows."""
    chosen = rng.choice(scores, held)
    if not levels:
        chosen = chosen * rng.uniform(0.9, 1.1, held).astype(np.float32)
    order = rng.permutation(slots.size)[:held]
    pool, capacity = values["pool"], values["history"].shape[1]
    pool[slots, ORDER] = -1
    pool[slots[:held], ORDER] = order
    pool[slots[order], SCORE] = np.sort(chosen)[::-1].astype(np.float32).view(np.int32)
    pool[slots[order], LENGTH] = rng.integers(1, past + 1, held) if past else 1
    logps = inputs.normal(rng, (held, capacity), "f32", mean=-3.0)
    pool[slots[order], IDS + capacity :] = logps.view(np.int32)


# The first case has a group of every kind.
CASES: Final = (
    {"kinds": tuple(KINDS), "spare": 3},
    {"kinds": tuple(KINDS), "levels": True},
    {"kinds": tuple(KINDS)[::-1], "capacity": 1, "length": 0, "words": 1},
    {"kinds": ("full",) * 12, "levels": True, "capacity": 5, "length": 4},
    {"kinds": ("early", "early, with room", "limit", "few", "garbage") * 4, "words": 70, "capacity": 40},
    {"kinds": ("first, few", "first, few, norm 1", "garbage", "garbage, small norm") * 3, "spare": 1},
    # histories longer than what is moved at a time
    {"kinds": ("wide", "full", "wide, full", "first", "one, full"), "capacity": 1200, "length": 1100},
    {"kinds": ("wide, first", "warp", "warp and one", "wide"), "levels": True, "capacity": 100, "length": 99},
)
