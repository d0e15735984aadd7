# SPDX-License-Identifier: MIT OR Apache-2.0
"""Watches a model that an engine drives: rows, slots, spans of KV, and what is left at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from metrale.engine.handle import RequestHandle
from metrale.engine.lane import place
from metrale.engine.waiting import WaitingQueue
from metrale.engine.worker import Worker
from metrale.nllb.model import NllbModel
from tests.engine.serving import held
from tests.engine.stranger import Stranger


@contextmanager
def nothing_left(model: NllbModel) -> Iterator[None]:
    """Check that blocks, page-locked memory, streams, events, slots and KV are afterwards as they were."""
    model.synchronize()
    before = held(model)
    yield
    model.synchronize()
    assert held(model) == before
    assert model.gpu.scan_redzones() == []


@contextmanager
def watched_steps(model: NllbModel, worker: Worker) -> Iterator[None]:
    """Check of every step that it is no longer than it may be, that nothing in it is in vain from the start, that it
    uses each row once, and that its rows are those that tokens are chosen from, and beams.
    """
    forward, sample, select = model.mixed_forward_batch_fed, model.sample_batch_to_feed, model.select_beams_to_feed
    rows: dict[int, int] = {}  # of each sequence of the step, the first of its rows
    wrong: list[str] = []  # what is raised in a step is the engine's to deal with, so it is kept for the end

    def expect(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    def at(ptr: int) -> int:
        return (ptr - model.logits_buffer_ptr()) // model.logits_row_bytes()

    def watched_forward(sources: Any, decoding: Any, joining: Any, stream: int = 0) -> Any:
        seqs = [*decoding, *(one.seq for one in joining)]
        expect("each sequence once", len(set(map(id, seqs))) == len({seq.slot_idx for seq in seqs}) == len(seqs))
        rows.clear()
        row = 0
        for seq in seqs:
            rows[id(seq)] = row
            row += len(model._table.members(seq)) if model._beams.searches(seq) and len(rows) <= len(decoding) else 1
        expect("a row for each", row <= model.capacity().max_sequences)
        prefilled = sum(len(one.prompt_tokens) for one in joining)
        expect("a short step", len(joining) < 2 or prefilled <= worker._policy.max_prefill_tokens)
        limits = {id(lane.seq): lane.handle.request.target_positions for lane in worker._lanes}
        expect("tokens that may come", all(seq.seq_len < limits[id(seq)] for seq in decoding))
        return forward(sources, decoding, joining, stream)

    def watched_sample(logits: Any, seqs: Any, *args: Any, **options: Any) -> None:
        expect(
            "tokens of this step", [rows.pop(id(seq), -1) for seq in seqs] == [at(logits) + i for i in range(len(seqs))]
        )
        sample(logits, seqs, *args, **options)

    def watched_select(logits: Any, seqs: Any, *args: Any, **options: Any) -> None:
        expect("beams of this step", [rows.pop(id(seq), -1) for seq in seqs] == [at(ptr) for ptr in logits])
        expect("nobody is left out", not rows)
        select(logits, seqs, *args, **options)

    with (
        mock.patch.object(model, "mixed_forward_batch_fed", watched_forward),
        mock.patch.object(model, "sample_batch_to_feed", watched_sample),
        mock.patch.object(model, "select_beams_to_feed", watched_select),
    ):
        yield
    assert wrong == []


def check_lanes(model: NllbModel, worker: Worker, stranger: Stranger | None) -> None:
    """Check that live sequences are those of the lanes, each with slots and a span of its own."""
    live = model._table._live
    widths = {id(lane.seq): lane.handle.request.width for lane in worker._lanes}
    assert len(widths) == len(worker._lanes)
    assert sum(widths.values()) <= worker._policy.max_lanes
    if stranger is not None and stranger.seq is not None:
        widths[id(stranger.seq)] = 1
    assert Counter(id(seq) for seq, _ in live.values()) == widths
    assert all(slot in model._table.members(seq) for slot, (seq, _) in live.items())
    end = 0
    for span in sorted({span.first: span for _, span in live.values()}.values(), key=lambda span: span.first):
        assert span.first >= end
        end = span.first + span.positions
    assert end <= model._pool.capacity


@contextmanager
def in_order(queue: WaitingQueue, worker: Worker) -> Iterator[None]:
    """Check that whoever gets a lane meanwhile goes before all that go on waiting."""

    def waiting() -> set[RequestHandle]:
        return {*queue._waiting._live, *(one.handle for one in worker._swapped)}

    before, had = waiting(), {lane.handle for lane in worker._lanes}
    yield
    left = [place(handle) for handle in before & waiting()]
    came = [place(lane.handle) for lane in worker._lanes if lane.handle not in had]
    assert max(came, default=(-math.inf, 0)) < min(left, default=(math.inf, 0))
