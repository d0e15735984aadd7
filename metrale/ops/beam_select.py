# SPDX-License-Identifier: MIT OR Apache-2.0
"""One step of beam search after the candidates of every beam are known, as transformers does it, in its float32.

A group is the beams of one request. ``values`` and ``ids`` have the best continuations of each beam, best first. The
first step of a group has one candidate row, which all its beams use, and begins with scores of 0 and, but for beam 0,
-1e9. With n beams and k candidates to keep, a step is:

1. The score of a candidate is its beam's score plus its value. The best k of all are kept, in order; the lower beam
   wins a tie, then the better rank. One is finished when its id is an EOS id, or all are at the length limit.
2. The pool has at most n finished hypotheses, best first. Of the first n candidates the finished ones come in with
   ``score / norm``; less 1e9 when the pool is full and early stopping is on, and less 1e9 when the search has stopped.
   A free place counts as -1e9, and what is there already wins a tie.
3. The n best candidates go on, the finished ones with their scores less 1e9: the tables of the beams follow their
   parents, and the new ids come behind.
4. The search stops for good unless ``best score / bound_norm`` is greater than the worst score of the pool, free places
   included. The group is done when that is so, when early stopping is on and the pool is full, or when all k candidates
   are finished. Of a done group nothing changes any more.

A penalty of 1e9 is an addition in float32 as any other: where the candidates are few, a beam of that score may go on,
finish, and come into the pool. NaN counts as minus infinity.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import metrale_kernels
import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, REGISTRY, Dims, LaunchPlan, Op, OpSpec, scalar, tensor
from gpu_runtime.streams import StreamLike
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
from metrale.ops.beam_states import CASES, make_inputs

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="beam_select",
    args=(
        tensor("values", "in", "f32", "candidate_rows", "most"),
        tensor("ids", "in", "i32", "candidate_rows", "most"),
        tensor("flags", "in", "i32", "candidate_rows"),
        tensor("counts", "in", "i32", "groups", len(GROUP_COLUMNS)),
        tensor("settings", "in", "f32", "groups", len(GROUP_SETTINGS)),
        tensor("members", "in", "i32", "member_count"),
        tensor("bans", "in", "u32", "slot_count", 2, "words"),
        tensor("running", "inout", "f32", "slot_count"),
        tensor("history", "inout", "i32", "slot_count", "capacity"),
        tensor("ancestry", "inout", "i32", "slot_count", "capacity"),
        tensor("logps", "inout", "f32", "slot_count", "capacity"),
        tensor("pool", "inout", "i32", "slot_count", "pool_width"),
        tensor("state", "inout", "i32", "slot_count"),
        tensor("cells", "inout", "i32", "cell_count"),
        tensor("results", "out", "i32", "groups"),
        scalar("groups", "i32"),
        scalar("candidate_rows", "i32"),
        scalar("most", "i32"),
        scalar("member_count", "i32"),
        scalar("slot_count", "i32"),
        scalar("words", "i32"),
        scalar("capacity", "i32"),
        scalar("pool_width", "i32"),
        scalar("cell_base", "i32"),
        scalar("cell_count", "i32"),
    ),
    tolerance=EXACT,  # single additions and divisions, each rounded once, and comparisons
    dtypes=("f32",),  # scores are float32 whatever the model computes in
)

THREADS: Final = 256

_FAR: Final = np.float32(-1e9)
_LOWEST: Final = np.float32(-np.inf)


def plan(dims: Dims, dtype: str, limits: Limits) -> LaunchPlan:
    """One block of 256 threads a group.

    Raises
    ------
    ValueError
        When ``pool_width`` is not what the capacity takes.
    """
    width = pool_width(dims["capacity"])
    if dims["pool_width"] != width:
        raise ValueError(f"beam_select: pool_width: expected {width}, got {dims['pool_width']}")
    return LaunchPlan(SPEC.entry(dtype), (dims["groups"], 1, 1), (THREADS, 1, 1))


class _Tables(NamedTuple):
    """What the slots have, as the parameters of the same names, and the slots of one group."""

    running: Array
    history: Array
    ancestry: Array
    logps: Array
    pool: Array
    slots: Array


class _Found(NamedTuple):
    """The candidates that are kept, best first: ``[k]`` each."""

    scores: Array
    beams: Array
    ids: Array
    logps: Array
    finished: Array


def reference(
    *,
    values: Array,
    ids: Array,
    flags: Array,
    counts: Array,
    settings: Array,
    members: Array,
    bans: Array,
    running: Array,
    history: Array,
    ancestry: Array,
    logps: Array,
    pool: Array,
    state: Array,
    cells: Array,
    results: Array,
    groups: int,
    candidate_rows: int,
    most: int,
    member_count: int,
    slot_count: int,
    words: int,
    capacity: int,
    pool_width: int,
    cell_base: int,
    cell_count: int,
) -> None:
    """Group by group.

    A row, a member, a slot, a length or an id that is out of range is an error, and so is a slot that two beams of the
    launch share; on a GPU it would be an access out of bounds, or a race.
    """
    _check_counts(counts, candidate_rows, most, member_count, slot_count, capacity)
    _check_slots(counts, members, slot_count, cell_base, cell_count)
    for group, (row, member, beams, k, fresh, length, mode, eos) in enumerate(counts.tolist()):
        tables = _Tables(running, history, ancestry, logps, pool, members[member : member + beams])
        lead = tables.slots[0]
        if fresh:
            state[lead] = 0
            _begin(tables, length)
        if not state[lead] & DONE:
            rows = np.full(beams, row) if fresh else np.arange(row, row + beams)
            if flags[rows].any():
                state[lead] |= DONE | NOT_FINITE
            else:
                found = _candidates(tables, values[rows, :k], ids[rows, :k], mode, bans[eos, 1])
                state[lead] = _step(tables, found, settings[group], int(state[lead]), mode, length)
                cells[cell_base + tables.slots] = history[tables.slots, length]
        results[group] = state[lead]


def _refuse(name: str, low: int, after: int, got: Array) -> None:
    """Raise InvalidPointer when a value is not in ``[low, after)``."""
    if got.size and not low <= got.min() <= got.max() < after:
        raise InvalidPointer(
            f"beam_select: {name}: expected values in [{low}, {after}), got {got.min()} to {got.max()}"
        )


def _check_counts(
    counts: Array, candidate_rows: int, most: int, member_count: int, slot_count: int, capacity: int
) -> None:
    """Raise InvalidPointer when a column of ``counts`` is out of range."""
    row, member, beams, k, fresh, length, mode, eos = counts.T
    _refuse("beams", 1, MAX_BEAMS + 1, beams)
    _refuse("k", 1, min(MAX_KEPT, most) + 1, k)
    _refuse("k, beyond beams", 0, MAX_KEPT, k - beams)
    _refuse("fresh", 0, 2, fresh)
    _refuse("row", 0, candidate_rows, row)
    _refuse("row, the last", 0, candidate_rows, row + np.where(fresh, 1, beams) - 1)
    _refuse("member", 0, member_count, member)
    _refuse("member, the last", 0, member_count, member + beams - 1)
    _refuse("length", 0, capacity, length)
    _refuse("mode", 0, AT_LIMIT + EARLY + 1, mode)
    _refuse("eos", 0, slot_count, eos)


def _check_slots(counts: Array, members: Array, slot_count: int, cell_base: int, cell_count: int) -> None:
    """Raise InvalidPointer when a beam's slot or cell is out of range, or is another's too."""
    used = [members[member : member + beams] for _, member, beams, *_ in counts.tolist()]
    slots = np.concatenate(used)
    _refuse("members", 0, slot_count, slots)
    _refuse("cells", 0, cell_count, cell_base + slots)
    if np.unique(slots).size != slots.size:
        raise InvalidPointer("beam_select: members: expected a slot for each beam, got one for several")


def _begin(tables: _Tables, length: int) -> None:
    """Make all beams of a group copies of its first, which alone has a score that counts; the pool is empty.

    The ancestry is cleared to its end. A decoder pass over a search that is done already, enqueued before the host knew
    it, reads columns that no step has written: what another search left there may be a beam that this one has not.
    """
    slots = tables.slots
    tables.running[slots] = _FAR
    tables.running[slots[0]] = 0
    tables.history[slots, :length] = tables.history[slots[0], :length]
    tables.ancestry[slots] = 0
    tables.logps[slots, :length] = 0
    tables.pool[slots, ORDER] = -1


def _candidates(tables: _Tables, values: Array, ids: Array, mode: int, eos: Array) -> _Found:
    """Return the best of all beams' candidates, as many as one beam has: ``values`` and ``ids`` are ``[beams, k]``."""
    k = values.shape[1]
    _refuse("ids", 0, 32 * eos.size, ids)
    scores = np.fmax(tables.running[tables.slots, None] + values, _LOWEST).ravel()
    best = np.argsort(-scores, kind="stable")[:k]
    chosen = ids.ravel()[best]
    at_limit = np.full(k, mode & AT_LIMIT != 0)
    finished = at_limit | (eos[chosen >> 5] >> (chosen & 31).astype(np.uint32) & np.uint32(1) != 0)
    return _Found(scores[best], best // k, chosen, values.ravel()[best], finished)


def _step(tables: _Tables, found: _Found, settings: Array, state: int, mode: int, length: int) -> int:
    """Make a group's step and return its state afterwards."""
    norm, bound_norm = settings
    held = _finish(tables, found, norm, state, mode, length)
    _go_on(tables, found, length)
    full = held.size == tables.slots.size
    with np.errstate(all="ignore"):
        bound = tables.running[tables.slots[0]] / bound_norm
    if not bound > (held[-1] if full else _FAR):
        state |= STOPPED
    if state & STOPPED or (mode & EARLY and full) or found.finished.all():
        state |= DONE if held.size else DONE | NO_CHOICE
    return state


def _finish(tables: _Tables, found: _Found, norm: Any, state: int, mode: int, length: int) -> Array:
    """Put what has finished into the pool and return the scores there, best first."""
    slots, pool = tables.slots, tables.pool
    beams = slots.size
    entries = pool[slots, ORDER]
    _refuse("pool, the order", -1, beams, entries)
    entries = entries[entries >= 0]
    held = np.full(beams, _FAR)
    held[: entries.size] = pool[slots[entries], SCORE].view(np.float32)

    finished = np.flatnonzero(found.finished[:beams])
    with np.errstate(all="ignore"):
        scores = found.scores[finished] / norm
    if mode & EARLY and entries.size == beams:
        scores += _FAR
    if state & STOPPED:
        scores += _FAR

    merged = np.concatenate([held, scores])  # NaN comes last
    places = np.argsort(-merged, kind="stable")[:beams]
    places = places[(places < entries.size) | (places >= beams)]  # without what is still free
    stays = places < beams
    order = np.empty_like(places)
    order[stays] = entries[places[stays]]
    entering = finished[places[~stays] - beams]
    order[~stays] = np.setdiff1d(np.arange(beams), order[stays])[: entering.size]
    pool[slots[: order.size], ORDER] = order

    to, parents, capacity = slots[order[~stays]], slots[found.beams[entering]], tables.history.shape[1]
    pool[to, SCORE] = merged[places[~stays]].view(np.int32)
    pool[to, LENGTH] = length + 1
    pool[to, IDS : IDS + length] = tables.history[parents, :length]
    pool[to, IDS + length] = found.ids[entering]
    pool[to, IDS + capacity : IDS + capacity + length] = tables.logps[parents, :length].view(np.int32)
    pool[to, IDS + capacity + length] = found.logps[entering].view(np.int32)
    return np.asarray(merged[places])


def _go_on(tables: _Tables, found: _Found, length: int) -> None:
    """Choose the beams of the next step, and let their tables follow their parents."""
    slots = tables.slots
    scores = np.where(found.finished, found.scores + _FAR, found.scores)
    best = np.argsort(-scores, kind="stable")[: slots.size]
    parents = slots[found.beams[best]]
    tables.running[slots] = scores[best]
    for table in (tables.history, tables.ancestry, tables.logps):
        table[slots, :length] = table[parents, :length]
    tables.history[slots, length] = found.ids[best]
    tables.logps[slots, length] = found.logps[best]
    tables.ancestry[slots, length] = np.arange(slots.size)


OP: Final = REGISTRY.register(
    Op(SPEC, reference, make_inputs, CASES, plan=plan, source=metrale_kernels.path(SPEC.name))
)


def beam_select(
    gpu: GpuBackend,
    values: int,
    ids: int,
    flags: int,
    counts: int,
    settings: int,
    members: int,
    bans: int,
    running: int,
    history: int,
    ancestry: int,
    logps: int,
    pool: int,
    state: int,
    cells: int,
    results: int,
    *,
    groups: int,
    candidate_rows: int,
    most: int,
    member_count: int,
    slot_count: int,
    words: int,
    capacity: int,
    cell_base: int,
    cell_count: int,
    stream: StreamLike = 0,
) -> None:
    """Enqueue a step of beam search for each of ``groups`` groups of beams, as the module says.

    ``values`` (float32) and ``ids`` (int32) are ``[candidate_rows, most]``, the processed log-probabilities of each
    row's best continuations from the largest down; ``flags`` is int32 ``[candidate_rows]``, not 0 where a row is not to
    be trusted. ``counts`` (int32, ``[groups, 8]``) and ``settings`` (float32, ``[groups, 2]``) have the columns of
    `GROUP_COLUMNS` and `GROUP_SETTINGS`; `metrale.ops.beam_layout` has all these names. ``members`` is int32
    ``[member_count]``: the slots of the groups' beams, each slot once. ``bans`` is uint32 ``[slot_count, 2, words]``,
    as `sample` has it.

    By slot: ``running`` float32, the beams' scores; ``history`` int32, ``logps`` float32 and ``ancestry`` int32, each
    ``[slot_count, capacity]``: the beams' ids, their log-probabilities, and which beam of the group wrote the KV of a
    position; ``pool`` int32 ``[slot_count, pool_width(capacity)]``, with the columns `ORDER`, `SCORE`, `LENGTH` and
    `IDS`; ``state`` int32, that of a group in its first beam's slot, of the bits `DONE`, `NOT_FINITE`, `NO_CHOICE` and
    `STOPPED`. A first step reads of them the first beam's history alone.

    The new id of each beam also goes to ``cells[cell_base + slot]`` (int32, ``[cell_count]``), and the group's state to
    ``results`` (int32, ``[groups]``). A group that is done, or becomes so because of a flag, writes no cell.
    """
    pointers = (values, ids, flags, counts, settings, members, bans)
    tables = (running, history, ancestry, logps, pool, state, cells, results)
    sizes = (groups, candidate_rows, most, member_count, slot_count, words, capacity, pool_width(capacity))
    OP.launch(gpu, "f32", (*pointers, *tables, *sizes, cell_base, cell_count), stream)
