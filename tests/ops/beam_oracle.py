# SPDX-License-Identifier: MIT OR Apache-2.0
"""A step of beam search as its description has it: lists of candidates and of hypotheses, one group after another.

Scores are float32 by definition. Here every candidate takes part in everything, and what may not is pushed away by 1e9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Any]
Score = Any
"""One float32."""

FAR = np.float32(-1e9)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam of the step before, and what it is continued with."""

    score: Score
    beam: int
    rank: int
    token: int
    logp: Score


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A place of the pool; one that is still free has no ids."""

    score: Score
    ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    member: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What a step makes of scores and pool: candidates that go on with their scores, the pool, bits of the state."""

    chosen: list[Candidate]
    scores: list[Score]
    pool: list[Hypothesis]
    stopped: bool
    done: bool


def ordered(score: Score) -> Score:
    """Return a score, minus infinity when it is NaN."""
    return np.fmax(score, np.float32(-np.inf))


def quotient(score: Score, norm: Score) -> Score:
    """Return ``score / norm`` in the same way."""
    with np.errstate(all="ignore"):
        return ordered(np.float32(score) / np.float32(norm))


def step(
    candidates: list[Candidate],
    pool: list[Hypothesis],
    sequences: list[tuple[tuple[int, ...], tuple[float, ...]]],
    eos: set[int],
    *,
    k: int,
    norm: Score,
    bound_norm: Score,
    at_limit: bool,
    early: bool,
    stopped: bool,
) -> Step:
    """Return one step. ``sequences`` are ids and log-probabilities by beam; ``pool`` has a place for each."""
    beams = len(sequences)
    best = sorted(candidates, key=lambda one: (-one.score, one.beam, one.rank))[:k]
    ended = [at_limit or one.token in eos for one in best]

    full = all(one.ids for one in pool)
    merged = list(pool)
    for index, one in enumerate(best):
        score = quotient(one.score, norm)
        for pushed in (early and full, stopped, not ended[index] or index >= beams):
            score = score + FAR if pushed else score
        ids, logps = sequences[one.beam]
        finished = ended[index] and index < beams
        new = Hypothesis(score, (*ids, one.token), (*logps, one.logp)) if finished else Hypothesis(score)
        merged.append(new)
    pool = sorted(merged, key=lambda one: -one.score)[:beams]

    running = [one.score + FAR if end else one.score for one, end in zip(best, ended, strict=True)]
    going = sorted(range(k), key=lambda index: -running[index])[:beams]
    full = all(one.ids for one in pool)
    worst = min(one.score for one in pool) if full else FAR
    stopped = stopped or not quotient(running[going[0]], bound_norm) > worst
    return Step(
        [best[index] for index in going],
        [running[index] for index in going],
        pool,
        stopped,
        stopped or (early and full) or all(ended),
    )


def _hypotheses(v: Values, slots: list[int]) -> list[Hypothesis]:
    """Return the places of a group's pool."""
    pool, capacity = v["pool"], v["capacity"]
    places = [Hypothesis(FAR)] * len(slots)
    for place, slot in enumerate(slots):
        member = int(pool[slot, 0])
        if member >= 0:
            row = pool[slots[member]]
            length = int(row[2])
            logps = row[3 + capacity : 3 + capacity + length].view(np.float32)
            ids = tuple(row[3 : 3 + length].tolist())
            places[place] = Hypothesis(row[1:2].view(np.float32)[0], ids, tuple(logps), member)
    return places


def _store(v: Values, slots: list[int], pool: list[Hypothesis]) -> int:
    """Write a group's pool into its rows and return how many hypotheses it has."""
    held = [one for one in pool if one.ids]
    stored = {one.member for one in held}
    free = [member for member in range(len(slots)) if member not in stored]
    v["pool"][slots, 0] = -1
    for place, one in enumerate(held):
        member = one.member
        if member is None:
            member = free.pop(0)
            row, capacity, length = v["pool"][slots[member]], v["capacity"], len(one.ids)
            row[1], row[2], row[3 : 3 + length] = one.score.view(np.int32), length, one.ids
            row[3 + capacity : 3 + capacity + length] = np.array(one.logps, np.float32).view(np.int32)
        v["pool"][slots[place], 0] = member
    return len(held)


def _start(v: Values, slots: list[int], length: int) -> None:
    for beam, slot in enumerate(slots):
        v["running"][slot] = FAR if beam else 0
        v["history"][slot, :length] = v["history"][slots[0], :length]
        v["ancestry"][slot] = 0
        v["logps"][slot, :length] = 0
        v["pool"][slot, 0] = -1
    v["state"][slots[0]] = 0


def _group(v: Values, group: int) -> None:
    first, member, beams, k, fresh, length, mode, eos_slot = v["counts"][group].tolist()
    slots = v["members"][member : member + beams].tolist()
    if fresh:
        _start(v, slots, length)
    state = int(v["state"][slots[0]])
    if state & 1:
        return
    rows = [first + (0 if fresh else beam) for beam in range(beams)]
    if any(v["flags"][row] for row in rows):
        v["state"][slots[0]] = state | 3
        return
    candidates = [
        Candidate(ordered(v["running"][slots[beam]] + value), beam, rank, int(v["ids"][row, rank]), value)
        for beam, row in enumerate(rows)
        for rank, value in enumerate(v["values"][row, :k])
    ]
    bits = [int(word) >> bit & 1 for word in v["bans"][eos_slot, 1] for bit in range(32)]
    sequences = [(tuple(v["history"][slot, :length].tolist()), tuple(v["logps"][slot, :length])) for slot in slots]
    after = step(
        candidates,
        _hypotheses(v, slots),
        sequences,
        {token for token, bit in enumerate(bits) if bit},
        k=k,
        norm=v["settings"][group, 0],
        bound_norm=v["settings"][group, 1],
        at_limit=bool(mode & 1),
        early=bool(mode & 2),
        stopped=bool(state & 8),
    )
    ancestry = [v["ancestry"][slot, :length].copy() for slot in slots]
    for beam, (slot, one) in enumerate(zip(slots, after.chosen, strict=True)):
        v["running"][slot] = after.scores[beam]
        ids, logps = sequences[one.beam]
        v["history"][slot, : length + 1] = (*ids, one.token)
        v["logps"][slot, : length + 1] = (*logps, one.logp)
        v["ancestry"][slot, : length + 1] = (*ancestry[one.beam], beam)
        v["cells"][v["cell_base"] + slot] = one.token
    held = _store(v, slots, after.pool)
    bits_set = (after.stopped, 8), (after.done, 1), (after.done and not held, 4)
    v["state"][slots[0]] = state | sum(bit for set_, bit in bits_set if set_)


def beam_select(v: Values) -> dict[str, Array]:
    written = ("running", "history", "ancestry", "logps", "pool", "state", "cells", "results")
    after = {**v, **{name: v[name].copy() for name in written}}
    for group in range(v["groups"]):
        _group(after, group)
        after["results"][group] = after["state"][v["members"][v["counts"][group, 1]]]
    return {name: after[name] for name in written}
