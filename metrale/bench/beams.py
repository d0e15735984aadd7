# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam search, timed and checked: whole calls of ``generate_beams``, steps by the device's clock, and their launches.

The protocol is that of greedy decoding (`metrale.bench.protocol`): 32 source tokens and exactly 64 output tokens, as no
id ends a hypothesis here. The language token, which is given, comes on top.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import DevicePtr
from metrale.bench.breakdown import breakdown, recording
from metrale.bench.decode import LANGUAGE, Batch, Busy
from metrale.bench.protocol import (
    LEAST_ONES,
    SCORE_TOLERANCE,
    STANDARD,
    Lengths,
    log_probabilities,
    sources,
    spread,
    timings,
)
from metrale.bench.timing import Clock, Reader
from metrale.model import BeamParams, BeamReq, FeedSource, Hypothesis, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel


def generate(
    model: NllbModel, size: int, beams: int, new_tokens: int, lengths: Lengths = STANDARD
) -> tuple[float, list[Hypothesis]]:
    """Search for ``size`` sources in one call; return its wall-clock milliseconds, and the best hypothesis of each."""
    requests = [
        BeamReq(ids[1:-1], LANGUAGE, LANGUAGE, num_beams=beams, max_new=new_tokens + 1, eos_ids=())
        for ids in sources(size, lengths.source, model.vocab_size(), LANGUAGE)
    ]
    start = time.perf_counter()
    found = model.generate_beams(requests)
    ms = 1e3 * (time.perf_counter() - start)
    best = [hypotheses[0] for hypotheses in found]
    got = {len(one.ids) for one in best}
    if got != {new_tokens + 1}:
        raise RuntimeError(f"expected {size} results of {new_tokens} tokens after the language, got {got} in all")
    return ms, best


def wall_times(model: NllbModel, size: int, beams: int, repeats: int) -> tuple[dict[str, Any], list[Hypothesis]]:
    """Time whole calls for 1 and for 64 tokens, after the same calls to warm up as the peers make.

    Also returns what the first call found.
    """
    first_ms, first = generate(model, size, beams, STANDARD.new)
    generate(model, size, beams, STANDARD.new)
    generate(model, size, beams, 1)
    ones = [generate(model, size, beams, 1)[0] for _ in range(max(repeats, LEAST_ONES))]
    runs = [generate(model, size, beams, STANDARD.new) for _ in range(repeats)]
    ids = [one.ids for one in first]
    report = {
        "first_call_ms": round(first_ms, 1),
        **timings(size, ones, [ms for ms, _ in runs]),
        "same_tokens_each_time": all([one.ids for one in found] == ids for _, found in runs),
        "different_tokens": len({token for one in ids for token in one}),
    }
    return report, first


def check(model: NllbModel, best: Hypothesis, dtype: str, lengths: Lengths = STANDARD) -> dict[str, Any]:
    """Compare the log-probabilities of the first source's result with those of the same ids fed one by one, alone.

    A beam that attends to keys and values of a wrong ancestor has others.
    """
    with Batch(model, 1, lengths) as batch:
        row = batch.prefill()
        rows = [model.copy_logits_to_host(row)]
        rows += [model.copy_logits_to_host(batch.decode([token])) for token in best.ids[1:-1]]
    alone = log_probabilities(np.stack(rows)[None], [best.ids[1:]])[0]
    error = float(np.abs(alone - best.logprobs[1:]).max())
    return {
        "largest_log_probability_difference": float(f"{error:.3g}"),
        "tolerance": SCORE_TOLERANCE[dtype],
        "passed": error <= SCORE_TOLERANCE[dtype],
    }


class Searches:
    """Live searches with sources of equal length, one step at a time. A context manager that frees them.

    Parameters
    ----------
    model : NllbModel
    size : int
        Searches.
    beams : int
        Of each.
    lengths : Lengths
    """

    def __init__(self, model: NllbModel, size: int, beams: int, lengths: Lengths = STANDARD) -> None:
        self._model = model
        self._lengths = lengths
        self._beams = beams
        self._sources = [ids[1:-1] for ids in sources(size, lengths.source, model.vocab_size(), LANGUAGE)]
        self._event = model.create_event()
        self._memory = model.alloc_host_pinned(4 * size)
        self._flags: NDArray[np.int32] = self._memory.array[: 4 * size].view(np.int32)
        self._seqs: list[SequenceState] = []
        try:
            for _ in range(size):
                seq = model.alloc_beams(beams, lengths.source, lengths.budget)
                seq.src_lang_id = seq.tgt_lang_id = LANGUAGE
                self._seqs.append(seq)
        except BaseException:
            self.free()
            raise

    def __enter__(self) -> Searches:
        return self

    def __exit__(self, *error: object) -> None:
        self.free()

    def free(self) -> None:
        """Wait for the device, and free everything."""
        self._model.synchronize()
        while self._seqs:
            self._model.free_sequence(self._seqs.pop())
        self._model.free_host_pinned(self._memory)
        self._model.destroy_event(self._event)

    def begin(self) -> None:
        """Take in the sources, and make the first selection."""
        pairs = zip(self._sources, self._seqs, strict=True)
        rows = self._model.prefill_batch_chunk([PrefillSlice.whole(ids, seq) for ids, seq in pairs])
        params = SamplingParams(eos_ids=(), max_new_tokens=self._lengths.new + 1)
        for seq in self._seqs:
            self._model.begin_beams(seq, BeamParams(num_beams=self._beams), params)
        self._select(rows)

    def decode(self) -> None:
        """Enqueue a decoder pass of every beam."""
        self._model.decode_batch_fed([FeedSource(sampled=True)] * len(self._seqs), self._seqs)
        for seq in self._seqs:
            seq.seq_len += 1

    def select(self) -> None:
        """Enqueue the selection after a decoder pass."""
        first, step = self._model.logits_buffer_ptr(), self._beams * self._model.logits_row_bytes()
        self._select([first.offset(index * step) for index in range(len(self._seqs))])

    def _select(self, rows: list[DevicePtr]) -> None:
        self._model.select_beams_to_feed(rows, self._seqs, self._flags, self._event)

    def step(self) -> None:
        """Enqueue a decoder pass and the selection after it."""
        self.decode()
        self.select()


def step_times(
    model: NllbModel, size: int, beams: int, clock: Clock, busy: Busy, repeats: int, lengths: Lengths = STANDARD
) -> dict[str, Any]:
    """Time steps half way: how long the host takes to enqueue one, and the device alone, the host being ahead of it.

    Nothing is returned when there are too few tokens for that.
    """
    count = lengths.device_steps(repeats)
    if not count:
        return {}
    with Searches(model, size, beams, lengths) as searches:
        searches.begin()
        enqueuing = []
        for _ in range(lengths.half_way):
            model.synchronize()
            start = time.perf_counter()
            searches.step()
            enqueuing.append(1e3 * (time.perf_counter() - start))
        host = spread(enqueuing)
        steps = clock.ms(searches.step, count, before=busy.during(host["median"]))
    return {"host_enqueue_ms": host, "step_device_ms": spread(steps)}


def launches(
    model: NllbModel, size: int, beams: int, clock: Clock, reader: Reader, repeats: int
) -> tuple[dict[str, Any], int]:
    """Time each kind of launch of a step half way; also return how many launches are in no breakdown.

    The pass and the selection are recorded apart, because the selection changes the ancestry that the pass read. Both
    are enough to be repeated: of the searches nothing is used afterwards.
    """
    with Searches(model, size, beams) as searches:
        searches.begin()
        for _ in range(STANDARD.half_way):
            searches.step()
        with recording(model.gpu) as step:
            searches.decode()
        decode = breakdown(clock, reader, step.calls, repeats)
        with recording(model.gpu) as selection:
            searches.select()
        select = breakdown(clock, reader, selection.calls, repeats)
    counts = {"decode": step.counts(), "select": selection.counts()}
    return {"decode": decode, "select": select, "launches_per_step": counts}, step.unseen() + selection.unseen()


def measure(
    model: NllbModel, size: int, beams: int, dtype: str, clock: Clock, reader: Reader, busy: Busy, options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Time one batch size; also return what is wrong.

    Returns
    -------
    dict
        ``wall`` and ``check``; ``device`` (of a step); ``decode`` and ``select``, unless ``options.no_ops``: where the
        time of a step goes.
    list of str
    """
    problems = []
    wall, found = wall_times(model, size, beams, options.repeats)
    case: dict[str, Any] = {"beams": beams, "wall": wall, "check": check(model, found[0], dtype)}
    if not wall["same_tokens_each_time"]:
        problems.append("equal calls chose different tokens")
    if not case["check"]["passed"]:
        problems.append(f"log-probabilities are not those of the same ids alone: {case['check']}")
    case["device"] = step_times(model, size, beams, clock, busy, options.repeats)
    if not options.no_ops:
        parts, unseen = launches(model, size, beams, clock, reader, options.op_repeats)
        case |= parts
        if unseen:
            problems.append(f"{unseen} launches are in no breakdown")
    return case, [f"batch {size}, {beams} beams: {problem}" for problem in problems]
