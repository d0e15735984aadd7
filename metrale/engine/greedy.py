# SPDX-License-Identifier: MIT OR Apache-2.0
"""Greedy decoding of any number of requests, in batches of as many lanes as the model has free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale.errors import SequenceError
from metrale.model import Model, PrefillSlice, SequenceState

FinishReason = Literal["eos", "length", "cancelled", "timeout", "error"]
"""Why a sequence ended: it chose EOS, it reached its limit, or somebody or something stopped it."""

NOT_FINITE: Final = "the model's logits hold a NaN or an infinity"
_FRAMING: Final = 3
"""Positions of a sequence that are neither prompt nor new tokens: source language and EOS, decoder start."""


@dataclass(frozen=True, slots=True)
class Request:
    """One source to translate.

    Attributes
    ----------
    prompt_tokens : sequence of int
        Subword ids, without language and EOS.
    src_lang_id, tgt_lang_id : int
    max_new_tokens : int
        Most tokens to generate, the language token and EOS included.
    eos_ids : frozenset of int
        Every id that ends the sequence.
    """

    prompt_tokens: Sequence[int]
    src_lang_id: int
    tgt_lang_id: int
    max_new_tokens: int
    eos_ids: frozenset[int]


@dataclass(slots=True)
class Generated:
    """What a request came to.

    Attributes
    ----------
    ids : list of int
        The tokens chosen, without the language token and EOS.
    finish_reason : FinishReason
    logprob : float
        Sum of the chosen tokens' log-probabilities, EOS included; NaN when scores were not asked for.
    length : int
        Tokens that a score divides by: the language token, ``ids`` and, if there, EOS.
    error : str or None
        What went wrong, with ``finish_reason`` "error".
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    logprob: float = 0.0
    length: int = 1
    error: str | None = None


@dataclass(slots=True)
class _Lane:
    index: int
    request: Request
    seq: SequenceState
    result: Generated

    def accept(self, token: int) -> bool:
        """Take the chosen token; return whether the lane goes on."""
        self.result.length += 1
        if token in self.request.eos_ids:
            self.result.finish_reason = "eos"
            return False
        self.result.ids.append(token)
        return self.result.length < self.request.max_new_tokens


def generate_greedy(
    model: Model,
    requests: Sequence[Request],
    *,
    scores: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Generated]:
    """Run every request to its end and return the results in order.

    Requests are batched in the order given, so those of similar length should be neighbours. A request whose logits
    are not finite, or that the KV cache has no room for, ends with "error"; the others go on. Each batch has the model
    to itself (`Model.exclusive`); between batches other threads get their turn.

    Parameters
    ----------
    model : Model
        Its free slots are the lanes; they are free again on return, also after an exception.
    requests : sequence of Request
    scores : bool
        Whether to sum log-probabilities. Each step then reads its logits rows back.
    progress : callable or None
        Called with the number of requests finished so far, after each batch step that finishes some.

    Raises
    ------
    SequenceError
        When every slot of the model is taken by others.
    """
    results = [Generated(logprob=0.0 if scores else float("nan")) for _ in requests]
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None and count:
            progress(done)

    waiting = [index for index, request in enumerate(requests) if request.max_new_tokens > 1]
    finished(len(requests) - len(waiting))  # one new token is the language token, which is given
    while waiting:
        lanes: list[_Lane] = []
        with model.exclusive():  # rows and slots are the model's: another caller's step would write the same rows
            try:
                taken = _open_lanes(model, requests, results, waiting, lanes)
                waiting = waiting[taken:]
                finished(taken - len(lanes))  # those that no memory is left for
                _run_batch(model, lanes, scores, finished)
            finally:
                for lane in lanes:
                    model.free_sequence(lane.seq)
    return results


def _open_lanes(
    model: Model,
    requests: Sequence[Request],
    results: Sequence[Generated],
    waiting: Sequence[int],
    lanes: list[_Lane],
) -> int:
    """Allocate sequences for as many of the waiting requests as fit, in order, into ``lanes``.

    Returns how many requests were dealt with: one that has no room although no lane is open ends with "error".
    """
    for taken, index in enumerate(waiting):
        request = requests[index]
        try:
            seq = model.alloc_sequence_for(len(request.prompt_tokens) + _FRAMING + request.max_new_tokens)
        except OutOfMemory as error:
            if lanes:
                return taken
            results[index].finish_reason, results[index].error = "error", str(error)
            continue
        except SequenceError:
            if lanes:
                return taken
            raise
        lanes.append(_Lane(index, request, seq, results[index]))  # first of all: whoever is in lanes is freed
        seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
    return len(waiting)


def _run_batch(model: Model, lanes: Sequence[_Lane], scores: bool, finished: Callable[[int], None]) -> None:
    """Prefill all lanes at once and decode until the last one ends; a lane that ends leaves the batch at once."""
    if not lanes:
        return
    slices = [PrefillSlice.whole(lane.request.prompt_tokens, lane.seq) for lane in lanes]
    first_row = model.prefill_batch_chunk(slices)[0]
    while lanes:
        tokens, bad = model.argmax_rows(first_row, len(lanes))
        if scores:
            _add_logprobs(model, first_row, lanes, tokens)
        going: list[tuple[int, _Lane]] = []
        for row, (token, lane) in enumerate(zip(tokens, lanes, strict=True)):
            if row in bad:
                lane.result.finish_reason, lane.result.error = "error", NOT_FINITE
            elif lane.accept(token):
                going.append((token, lane))
                continue
            model.free_sequence(lane.seq)  # at once: somebody else, even the callback, may have use for it
        finished(len(lanes) - len(going))
        lanes = [lane for _, lane in going]
        if lanes:
            first_row = model.decode_batch([token for token, _ in going], [lane.seq for lane in lanes])


def _add_logprobs(model: Model, first_row: DevicePtr, lanes: Sequence[_Lane], tokens: Sequence[int]) -> None:
    """Add each chosen token's log-softmax, computed in float32 as transformers does."""
    for row, (lane, token) in enumerate(zip(lanes, tokens, strict=True)):
        logits = model.copy_logits_to_host(first_row.offset(row * model.logits_row_bytes()))
        logits -= logits.max()
        lane.result.logprob += float(logits[token] - np.log(np.exp(logits).sum()))
