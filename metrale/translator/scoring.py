# SPDX-License-Identifier: MIT OR Apache-2.0
"""Scores and attention of targets that are there already, beside an engine that has the lanes of the same model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpu_runtime.errors import OutOfMemory
from metrale.errors import NoFreeSlot, SequenceError
from metrale.model import ScoredTarget, ScoreReq
from metrale.nllb.admission import PREFIX_LEN
from metrale.nllb.model import NllbModel
from metrale.translator.jobs import Job
from metrale.translator.terms import Adapter
from metrale.translator.translation import Translation

_AT_A_TIME: Final = 16
_WITH_ATTENTION: Final = 4
"""Targets of one call, during which nobody else has the model. The attention of one may take 200 MB on the host."""

_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05


class Scorer:
    """Scores targets, a few at a time, and waits for room where an engine has all of it.

    Parameters
    ----------
    model : NllbModel
    gate : Lock
        Whoever submits to the engine holds it for that moment. Here it is held while room is waited for: nothing new
        comes, so that lanes fall free.
    check_open : callable
        Raises when waiting is in vain, because the translator is closed.
    """

    def __init__(self, model: NllbModel, gate: threading.Lock, check_open: Callable[[], object]) -> None:
        self._model = model
        self._gate = gate
        self._check_open = check_open

    def run(
        self, reqs: Sequence[ScoreReq], adapters: Sequence[Adapter | None], *, attention: bool = False
    ) -> Iterator[ScoredTarget]:
        """Yield what each target came to.

        Raises
        ------
        gpu_runtime.OutOfMemory
            When the whole KV cache is too small for a target.
        SequenceError
            When an adapter has left its slot.
        """
        size = _WITH_ATTENTION if attention else _AT_A_TIME
        for first in range(0, len(reqs), size):
            chosen = slice(first, first + size)
            yield from self._some(reqs[chosen], adapters[chosen], attention)

    def _some(
        self, reqs: Sequence[ScoreReq], adapters: Sequence[Adapter | None], attention: bool
    ) -> list[ScoredTarget]:
        if (found := self._attempt(reqs, adapters, attention)) is not None:
            return found
        pause = _FIRST_PAUSE
        with self._gate:
            while (found := self._attempt(reqs, adapters, attention)) is None:
                self._check_open()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return found

    def _attempt(
        self, reqs: Sequence[ScoreReq], adapters: Sequence[Adapter | None], attention: bool
    ) -> list[ScoredTarget] | None:
        """Return what targets came to, or None while others have the lanes or the KV."""
        with self._model.exclusive():
            for adapter in adapters:
                if adapter is not None and self._model.adapters().get(adapter.name) != adapter.slot:
                    raise left(adapter)
                if adapter is not None and self._model.adapter_id_for(adapter.slot) != adapter.number:
                    raise left(adapter)
            if not self._has_room(max(map(self._positions, reqs))):
                return None
            return self._model.score_targets(reqs, attention=attention)  # room for the largest is room for each

    def _positions(self, req: ScoreReq) -> int:
        overhead = self._model.capacity().prompt_overhead
        return len(req.prompt_tokens) + overhead + PREFIX_LEN + len(req.target_tokens) - 1

    def _has_room(self, positions: int) -> bool:
        """Return whether a sequence of so many positions can be had now, or never: then asking for it tells."""
        pool = self._model.capacity().kv_positions
        if pool is not None and positions > pool:
            return True
        try:
            self._model.free_sequence(self._model.alloc_sequence_for(positions))
        except (NoFreeSlot, OutOfMemory):
            return False
        return True


def attended(scorer: Scorer, jobs: Sequence[Job], results: Sequence[Translation]) -> list[Translation]:
    """Return the results of jobs, those that have tokens with their attention."""
    complete = list(results)
    wanted = [index for index, one in enumerate(results) if one.hypotheses and one.hypotheses[0].token_ids]
    reqs = [_attention_request(jobs[index], results[index]) for index in wanted]
    found = scorer.run(reqs, [jobs[index].terms.adapter for index in wanted], attention=True)
    for index, scored in zip(wanted, found, strict=True):
        assert scored.attention is not None
        mean = scored.attention.mean(axis=(0, 1), dtype=np.float32)
        complete[index] = replace(results[index], attention=mean)
    return complete


def _attention_request(job: Job, result: Translation) -> ScoreReq:
    request = job.request
    return ScoreReq(
        request.prompt_tokens,
        result.hypotheses[0].token_ids,
        request.src_lang_id,
        request.tgt_lang_id,
        request.adapter_slot,
    )


def left(adapter: Adapter) -> SequenceError:
    """Return the error of an adapter that is not there any more."""
    return SequenceError(f"the adapter {adapter.name!r} has left its slot, or was loaded anew, since the call began")
