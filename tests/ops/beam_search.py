# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole beam searches over a toy model: by `beam_select`, and by a search whose beams are lists of ids.

The toy model's log-probabilities depend on every id of a sequence, so that a beam with a wrong past goes another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_runtime import GpuBackend
from metrale.ops.beam_layout import AT_LIMIT, DONE, EARLY, IDS, LENGTH, SCORE, pool_width
from metrale.ops.beam_select import OP
from tests.ops.beam_oracle import FAR, Candidate, Hypothesis, step
from tests.ops.harness import run

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Search:
    """What is searched, and how; lengths count the prompt. ``scale`` is how far apart the model's logits are."""

    seed: int = 0
    beams: int = 4
    vocab: int = 12
    eos: tuple[int, ...] = (0,)
    prompt: tuple[int, ...] = (2,)
    limit: int = 9
    early: bool | str = False
    penalty: float = 1.0
    banned: float = 0.0
    scale: float = 2.0

    @property
    def kept(self) -> int:
        return max(2, 1 + len(self.eos)) * self.beams

    def row(self, sequence: tuple[int, ...]) -> Array:
        """Return the log-probabilities after a sequence; a share ``banned`` of them is minus infinity."""
        rng = np.random.default_rng([self.seed, *sequence])
        logits = (self.scale * rng.standard_normal(self.vocab)).astype(np.float32)
        logps = logits - np.log(np.exp(logits).sum())
        logps[rng.random(self.vocab) < self.banned] = -np.inf
        return np.asarray(logps)

    def ranked(self, sequence: tuple[int, ...]) -> list[tuple[int, Any]]:
        """Return the ids after a sequence with their log-probabilities, best first, which decides between scores that
        are equal because -1e9 took their digits."""
        return sorted(enumerate(self.row(sequence)), key=lambda one: -one[1])

    def norm(self, length: int) -> Any:
        return np.float32((length - len(self.prompt)) ** self.penalty)

    def bound_norm(self, length: int) -> Any:
        return self.norm(self.limit if self.early == "never" and self.penalty > 0 else length)


@dataclass(frozen=True, slots=True)
class Trace:
    """After a step: the beams as ids and scores; the pool as ids, log-probabilities and scores; whether it is done."""

    beams: list[tuple[tuple[int, ...], float]]
    pool: list[tuple[tuple[int, ...], tuple[float, ...], float]]
    done: bool


def textbook(search: Search) -> list[Trace]:
    """Return what a search with lists of ids does, step by step."""
    beams = search.beams
    sequences: list[Any] = [(search.prompt, (0.0,) * len(search.prompt))] * beams
    scores, pool, traces = [np.float32(0), *[FAR] * (beams - 1)], [Hypothesis(FAR)] * beams, []
    stopped = done = False
    while not done:
        candidates = [
            Candidate(scores[beam] + logp, beam, rank, token, logp)
            for beam, (ids, _) in enumerate(sequences)
            for rank, (token, logp) in enumerate(search.ranked(ids))
        ]
        length = len(sequences[0][0]) + 1
        after = step(
            candidates,
            pool,
            sequences,
            set(search.eos),
            k=search.kept,
            norm=search.norm(length),
            bound_norm=search.bound_norm(length),
            at_limit=length == search.limit,
            early=search.early is True,
            stopped=stopped,
        )
        sequences = [
            ((*sequences[one.beam][0], one.token), (*sequences[one.beam][1], float(one.logp))) for one in after.chosen
        ]
        scores, pool, stopped, done = after.scores, after.pool, after.stopped, after.done
        held = [(one.ids, tuple(map(float, one.logps)), float(one.score)) for one in pool if one.ids]
        running = [(ids, float(score)) for (ids, _), score in zip(sequences, scores, strict=True)]
        traces.append(Trace(running, held, done))
    return traces


class Run:
    """Searches in one launch a step, with slots in any order and candidate rows as `top_k` would make them."""

    def __init__(self, gpu: GpuBackend, searches: list[Search], capacity: int) -> None:
        rng = np.random.default_rng(0)
        self.gpu, self.searches, self.capacity = gpu, searches, capacity
        self.first = np.cumsum([0, *(search.beams for search in searches)])
        self.slot_count = int(self.first[-1]) + 2
        self.members = rng.permutation(self.slot_count)[:-2].astype(np.int32)
        self.words = max(-(-search.vocab // 32) for search in searches)
        self.bans = rng.integers(0, 1 << 32, (self.slot_count, 2, self.words), np.uint32)
        self.lengths = [len(search.prompt) for search in searches]
        self.tables: dict[str, Array] = {
            "running": rng.standard_normal(self.slot_count).astype(np.float32),
            "history": rng.integers(0, 4, (self.slot_count, capacity)).astype(np.int32),
            "ancestry": np.full((self.slot_count, capacity), -5, np.int32),
            "logps": rng.standard_normal((self.slot_count, capacity)).astype(np.float32),
            "pool": rng.integers(-1, 2, (self.slot_count, pool_width(capacity))).astype(np.int32),
            "state": rng.integers(0, 16, self.slot_count).astype(np.int32),
            "cells": np.full(self.slot_count, -77, np.int32),
        }
        self.written = np.full((self.slot_count, capacity), -1)
        """Which id the beam of a slot has put into its own KV, by position."""
        for search, slots in zip(searches, self.slots, strict=True):
            self.tables["history"][slots[0], : len(search.prompt)] = search.prompt
            self.written[slots[0], : len(search.prompt)] = search.prompt
            self.bans[slots[0], 1] = 0
            for token in search.eos:
                self.bans[slots[0], 1, token >> 5] |= np.uint32(1 << (token & 31))

    @property
    def slots(self) -> list[Array]:
        return np.split(self.members, self.first[1:-1])

    def _candidates(self, fresh: bool) -> tuple[Array, Array]:
        most = max(search.kept for search in self.searches) + 1
        values, ids = [], []
        for search, slots, length in zip(self.searches, self.slots, self.lengths, strict=True):
            for slot in slots[:1] if fresh else slots:
                row = search.row(tuple(self.tables["history"][slot, :length].tolist()))
                order = np.argsort(-row, kind="stable")[:most]
                values.append(np.pad(row[order], (0, most - order.size), constant_values=-np.inf))
                ids.append(np.pad(order, (0, most - order.size)))
        return np.array(values, np.float32), np.array(ids, np.int32)

    def step(self, fresh: bool) -> list[int]:
        """Make a step and return the groups' states. A group that is done is launched with the others."""
        values, ids = self._candidates(fresh)
        counts, settings = [], []
        for group, (search, length) in enumerate(zip(self.searches, self.lengths, strict=True)):
            mode = AT_LIMIT * (length + 1 == search.limit) + EARLY * (search.early is True)
            row, member = group if fresh else self.first[group], self.first[group]
            counts.append([row, member, search.beams, search.kept, int(fresh), length, mode, self.members[member]])
            settings.append([search.norm(length + 1), search.bound_norm(length + 1)])
        results = run(
            OP,
            self.gpu,
            "f32",
            {
                "values": values,
                "ids": ids,
                "flags": np.zeros(len(values), np.int32),
                "counts": np.array(counts, np.int32),
                "settings": np.array(settings, np.float32),
                "members": self.members,
                "bans": self.bans,
                **self.tables,
                "results": np.full(len(self.searches), -77, np.int32),
                "groups": len(self.searches),
                "candidate_rows": len(values),
                "most": values.shape[1],
                "member_count": len(self.members),
                "slot_count": self.slot_count,
                "words": self.words,
                "capacity": self.capacity,
                "pool_width": pool_width(self.capacity),
                "cell_base": 0,
                "cell_count": self.slot_count,
            },
        )
        self.tables = {name: results[name] for name in self.tables}
        return [int(state) for state in results["results"]]

    def trace(self, group: int, length: int, state: int) -> Trace:
        """Return what a group has, ``length`` ids a beam, and look at its ancestry and cells."""
        slots, tables = self.slots[group], self.tables
        self.written[slots, length - 1] = tables["cells"][slots]
        beams = []
        for slot in slots:
            ids = tables["history"][slot, :length]
            writers = slots[tables["ancestry"][slot, :length]]
            assert self.written[writers, np.arange(length)].tolist() == ids.tolist()
            beams.append((tuple(ids.tolist()), float(tables["running"][slot])))
        held = []
        for member in tables["pool"][slots, 0]:
            if member >= 0:
                row = tables["pool"][slots[member]]
                ids, logps = row[IDS:][: row[LENGTH]], row[IDS + self.capacity :][: row[LENGTH]].view(np.float32)
                score = row[SCORE : SCORE + 1].view(np.float32)
                held.append((tuple(ids.tolist()), tuple(logps.tolist()), float(score[0])))
        return Trace(beams, held, bool(state & DONE))

    def traces(self) -> list[list[Trace]]:
        """Return each group's steps until it is done."""
        found: list[list[Trace]] = [[] for _ in self.searches]
        states = [0] * len(self.searches)
        fresh = True
        while not all(state & DONE for state in states):
            running = [not state & DONE for state in states]
            states = self.step(fresh)
            for group in np.flatnonzero(running).tolist():
                self.lengths[group] += 1
                found[group].append(self.trace(group, self.lengths[group], states[group]))
            for group in (group for group, state in enumerate(states) if state & DONE):
                self.lengths[group] = min(self.lengths[group], self.capacity - 1)
            fresh = False
        return found
