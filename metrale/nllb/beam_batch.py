# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole beam searches for a list of requests: as many at a time as the model has lanes and KV for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.errors import DeviceError, OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale.checks import integer
from metrale.errors import InvalidInput, NoFreeSlot, NonFiniteLogits
from metrale.model import (
    BEAM_DONE_FLAG,
    BEAM_NO_CHOICE_FLAG,
    BEAM_NOT_FINITE_FLAG,
    NO_CHOICE_FLAG,
    NOT_FINITE_FLAG,
    BeamParams,
    BeamReq,
    FeedSource,
    Hypothesis,
    Model,
    PrefillSlice,
    SamplingParams,
    SequenceState,
)

Check: TypeAlias = Callable[[BeamReq, BeamParams, SamplingParams], None]

_MOST: Final = (1 << 31) - 1

_RESULTS: Final = 3  # of a choice: id, log-probability, flags


@dataclass(slots=True, eq=False)
class _Job:
    """A request and how far it has come.

    Attributes
    ----------
    index : int
        Its place among the requests.
    req : BeamReq
    beams : BeamParams
    params : SamplingParams
    seq : SequenceState or None
        While it runs.
    count : int
        Ids that count, chosen or about to be by what is enqueued.
    ids, logprobs : list
        Of a greedy one, what was chosen.
    """

    index: int
    req: BeamReq
    beams: BeamParams
    params: SamplingParams
    seq: SequenceState | None = None
    count: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def live(self) -> SequenceState:
        """The sequence of a request that runs."""
        assert self.seq is not None
        return self.seq

    @property
    def is_greedy(self) -> bool:
        return self.beams.num_beams == 1

    @property
    def at_limit(self) -> bool:
        """Whether what is enqueued reaches the request's limit."""
        return self.count >= self.req.max_new


class _Flight(NamedTuple):
    """A step in flight: its searches and greedy requests, and where what became of them will be."""

    searches: list[_Job]
    greedy: list[_Job]
    buffer: int


class BeamBatch:
    """One call of ``generate_beams``: the requests go in as there is room, and leave as they end.

    Parameters
    ----------
    model : Model
    reqs : sequence of BeamReq
    target : int or None
        The language that a request's 0 stands for.
    check : callable
        Raises InvalidInput when the model would refuse a request, whatever else it does.

    Raises
    ------
    InvalidInput
        When a request is wrong, or the model too small for it.
    """

    def __init__(self, model: Model, reqs: Sequence[BeamReq], target: int | None, check: Check) -> None:
        self._model = model
        self._capacity = model.capacity()
        self._target = target
        self._check = check
        self._results: list[list[Hypothesis]] = [[] for _ in reqs]
        self._spoilt: list[int] = []
        self._hopeless: dict[int, str] = {}
        jobs = [self._checked(index, req) for index, req in enumerate(reqs)]
        self._waiting = deque(job for job in jobs if not self._is_given(job))
        self._running: list[_Job] = []
        self._flights: deque[_Flight] = deque()
        self._lag = int(model.runs_ahead())

    def _checked(self, index: int, req: BeamReq) -> _Job:
        name = f"reqs[{index}]"
        if not isinstance(req, BeamReq):
            raise InvalidInput(name, "a BeamReq", req)
        capacity = self._capacity
        try:
            most, least = integer("max_new", req.max_new, 1, _MOST), integer("min_new", req.min_new, 0, _MOST)
            req = replace(req, max_new=most, min_new=least)  # NumPy's integers wrap when something is added
            job = _Job(index, req, req.beam_params(), req.sampling_params(tuple(sorted(capacity.eos_ids))))
            self._check(req, job.beams, job.params)
        except InvalidInput as error:
            argument = error.argument.replace("bad_words", "bad_words_ids")
            raise InvalidInput(f"{name}.{argument}", error.expected, error.got) from None
        given = 1 + len(req.prefix_tokens) if len(req.prefix_tokens) else 0  # the language, which else counts
        for what, count, most in (
            ("num_beams", job.beams.num_beams, capacity.max_beams),
            ("prompt_tokens", len(req.prompt_tokens), capacity.max_prompt_tokens),
            ("max_new", req.max_new + given, capacity.max_new_tokens),
        ):
            if count > most:
                after = " with the language and prefix_tokens" if what == "max_new" and given else ""
                raise InvalidInput(f"{name}.{what}", f"at most {most}{after}, the model's limit", f"{count}")
        for what, language, needed in (
            ("src_lang_id", req.src_lang_id, capacity.needs_src_lang),
            ("tgt_lang_id", req.tgt_lang_id, capacity.needs_tgt_lang),
        ):
            if needed and not language:
                raise InvalidInput(f"{name}.{what}", "a language id, as the model was loaded without a default", 0)
        positions, pool = self._positions(job), capacity.kv_positions
        if pool is not None and positions > pool:
            raise InvalidInput(name, f"at most {pool:,} KV positions, the model's pool", f"{positions:,}")
        return job

    def _is_given(self, job: _Job) -> bool:
        """Return whether the language, which is given, is all that a request asks for; then it has its result."""
        if job.req.max_new > 1 or len(job.req.prefix_tokens):
            return False
        language = job.req.tgt_lang_id or self._target or 0
        self._results[job.index] = [Hypothesis([language], math.nan if job.is_greedy else 0.0, [0.0])]
        return True

    def _positions(self, job: _Job) -> int:
        """Return the KV positions that a request takes."""
        source, target = self._lengths(job)
        return source + job.beams.num_beams * target

    def _lengths(self, job: _Job) -> tuple[int, int]:
        """Return the source positions of a request, and the target positions of each of its beams."""
        target = job.req.max_new + (len(job.req.prefix_tokens) + 1 if len(job.req.prefix_tokens) else 0)
        return len(job.req.prompt_tokens) + self._capacity.prompt_overhead, max(target, 2)

    def run(self) -> list[list[Hypothesis]]:
        """Run all requests to their end."""
        model = self._model
        with ExitStack() as stack:
            self._buffers: list[tuple[NDArray[np.int32], NDArray[np.int32], int]] = []
            self._views: dict[tuple[int, int, int], tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
            lanes = self._capacity.max_sequences
            for _ in range(self._lag + 1):
                memory = model.alloc_host_pinned((_RESULTS + 1) * lanes * 4)
                stack.callback(model.free_host_pinned, memory)
                words = memory.array[: (_RESULTS + 1) * lanes * 4].view(np.int32)
                event = model.create_event()
                stack.callback(model.destroy_event, event)
                self._buffers.append((words[:lanes], words[lanes:], event))
            self._free = deque(range(self._lag + 1))
            self._stream = model.create_stream()
            stack.callback(model.destroy_stream, self._stream)
            stack.callback(self._end_all)
            while self._waiting or self._running or self._flights:
                self._turn()
        if self._spoilt:
            raise NonFiniteLogits(tuple(sorted(self._spoilt)), "requests")
        if self._hopeless:
            where = ", ".join(f"reqs[{index}]" for index in sorted(self._hopeless))
            why = max(self._hopeless.values(), key=len)
            raise InvalidInput(where, "ids that may be chosen", f"none, as every id is forbidden{why}")
        return self._results

    def _end_all(self) -> None:
        for job in self._running:
            self._model.free_sequence(job.live)

    def _turn(self) -> None:
        """Enqueue a step if there is one to make, and read an older one."""
        with self._model.exclusive():
            joining = self._admit()
            decoding = [job for job in self._running[: len(self._running) - len(joining)] if not job.at_limit]
            if decoding or joining:
                self._enqueue(decoding, joining)
        if not (decoding or joining or self._flights):  # instead of no end
            raise DeviceError("generate_beams: what is at its limit has not ended, as far as the results say")
        while len(self._flights) > (self._lag if decoding or joining else 0):
            self._read()

    def _admit(self) -> list[_Job]:
        """Allocate sequences for the requests that come next, as far as there is room."""
        joining: list[_Job] = []
        while self._waiting:
            job = self._waiting[0]
            source, target = self._lengths(job)
            try:
                if job.is_greedy:
                    seq = self._model.alloc_sequence_for(source + target)
                else:
                    seq = self._model.alloc_beams(job.beams.num_beams, source, target)
            except (NoFreeSlot, OutOfMemory):
                if not (self._running or self._flights):
                    raise
                break
            job.seq = seq
            self._waiting.popleft()
            self._running.append(job)
            joining.append(job)
            seq.src_lang_id, seq.tgt_lang_id = job.req.src_lang_id, job.req.tgt_lang_id
            seq.adapter_slot, seq.prefix_tokens = job.req.adapter_slot, tuple(job.req.prefix_tokens)
        return joining

    def _enqueue(self, decoding: list[_Job], joining: list[_Job]) -> None:
        """Enqueue one step: searches in the first rows, then greedy requests, then what joins, greedy ones first."""
        model, buffer = self._model, self._free[0]
        decoding.sort(key=lambda job: job.is_greedy)
        joining.sort(key=lambda job: not job.is_greedy)
        seqs = [job.live for job in decoding]
        slices = [PrefillSlice.whole(tuple(job.req.prompt_tokens), job.live) for job in joining]
        model.mixed_forward_batch_fed([FeedSource(sampled=True)] * len(seqs), seqs, slices, self._stream)
        for seq in seqs:
            seq.seq_len += 1
        for job in joining:
            self._begin(job)
        searches, greedy = self._choose(decoding, joining, buffer)
        for job in (*searches, *greedy):
            job.count += 1
        self._free.popleft()
        self._flights.append(_Flight(searches, greedy, buffer))

    def _begin(self, job: _Job) -> None:
        job.count = 0 if len(job.req.prefix_tokens) else 1  # the language counts, unless more is given
        if job.is_greedy:
            self._model.begin_sampling(job.live, job.params)
        else:
            self._model.begin_beams(job.live, job.beams, job.params)

    def _choose(self, decoding: list[_Job], joining: list[_Job], buffer: int) -> tuple[list[_Job], list[_Job]]:
        """Let every search and every greedy request of a step choose; return them in the order of their results."""
        model, event = self._model, self._buffers[buffer][-1]
        searches: list[_Job] = []
        greedy: list[_Job] = []
        rows: list[DevicePtr] = []
        row, first_greedy = 0, 0
        joined, base, row_bytes = {id(job) for job in joining}, model.logits_buffer_ptr(), model.logits_row_bytes()
        for job in (*decoding, *joining):
            if job.is_greedy:
                first_greedy = first_greedy if greedy else row
                greedy.append(job)
            else:
                searches.append(job)
                rows.append(base.offset(row * row_bytes))
            row += 1 if job.is_greedy or id(job) in joined else job.beams.num_beams
        flags, choices = self._places(buffer, len(searches), len(greedy))
        if searches:
            model.select_beams_to_feed(rows, [job.live for job in searches], flags, event)
        if greedy:
            seqs = [job.live for job in greedy]
            model.sample_batch_to_feed(base.offset(first_greedy * row_bytes), seqs, choices, event, logprobs=True)
        return searches, greedy

    def _places(self, buffer: int, searches: int, greedy: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return where the results of so many of either kind go: the same arrays each time, which copies know then."""
        key = (buffer, searches, greedy)
        found = self._views.get(key)
        if found is None:
            flags, choices, _ = self._buffers[buffer]
            found = flags[:searches], choices[: _RESULTS * greedy].reshape(_RESULTS, greedy)
            self._views[key] = found
        return found

    # results

    def _read(self) -> None:
        """Wait for the oldest step in flight, and end the requests that it ended."""
        searches, greedy, buffer = self._flights.popleft()
        self._free.append(buffer)
        flags, results = self._places(buffer, len(searches), len(greedy))
        self._model.event_synchronize(self._buffers[buffer][-1])
        for job, state in zip(searches, flags.tolist(), strict=True):
            if job.seq is not None and state & BEAM_DONE_FLAG:
                self._end(job, [] if state & BEAM_NOT_FINITE_FLAG else self._model.take_beams(job.live), state)
        for job, token, logprob, state in zip(
            greedy, results[0].tolist(), results[1].view(np.float32).tolist(), results[2].tolist(), strict=True
        ):
            if job.seq is not None:
                self._take(job, token, logprob, state)

    def _take(self, job: _Job, token: int, logprob: float, state: int) -> None:
        """Give a greedy request its next id, and end it if that was the last."""
        if state & (NOT_FINITE_FLAG | NO_CHOICE_FLAG):
            self._end(job, [], BEAM_NOT_FINITE_FLAG if state & NOT_FINITE_FLAG else BEAM_NO_CHOICE_FLAG)
            return
        job.ids.append(token)
        job.logprobs.append(logprob)
        given = job.live.tokens[1 : job.live.prompt_len]
        if token in job.params.eos_ids or len(job.ids) + (len(given) == 1) >= job.req.max_new:
            found = Hypothesis([*given, *job.ids], math.nan, [*(0.0 for _ in given), *job.logprobs])
            self._end(job, [found], 0)

    def _end(self, job: _Job, found: list[Hypothesis], state: int) -> None:
        self._model.free_sequence(job.live)
        job.seq = None
        self._running.remove(job)
        self._results[job.index] = found
        if state & BEAM_NOT_FINITE_FLAG:
            self._spoilt.append(job.index)
        elif not found:
            self._hopeless[job.index] = job.beams.why_nothing
