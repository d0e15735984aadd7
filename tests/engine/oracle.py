# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request comes to alone: one call of the model after the other, and every id chosen by NumPy in float64."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.engine import Generated, Request, RequestHandle
from metrale.model import SamplingParams
from metrale.nllb.model import NllbModel
from tests.engine.patience import PATIENCE
from tests.ops.oracles import gumbel, kept_scores

NUDGE: Final = 1e-4
"""Of the largest logit: how far logits may be off in a `Solo` that is clear, and lead to the same ids. Other company
changes a row by 2e-6 at most (`tests.nllb.decoding.NEIGHBOURS`)."""

_NUDGES: Final = 3


@dataclass(frozen=True)
class Solo:
    """A request, and what it comes to.

    Attributes
    ----------
    ids : list of int
        Every chosen id, EOS included.
    rows : ndarray
        The logits that they were chosen from, float64 ``[len(ids), vocab]``.
    clear : bool
        Whether small errors of the logits change nothing, so that neither company nor rounding matters.
    """

    request: Request
    ids: list[int]
    rows: NDArray[np.float64]
    clear: bool

    @property
    def reason(self) -> str:
        return "eos" if self.ids and self.ids[-1] in self.request.end_ids else "length"

    @property
    def tokens(self) -> list[int]:
        """The ids without EOS."""
        return self.ids[:-1] if self.reason == "eos" else self.ids

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """The log-softmax of each row at its id."""
        return np.array([log_softmax(row)[token] for row, token in zip(self.rows, self.ids, strict=True)])

    def check(self, handle: RequestHandle) -> None:
        """Assert that ``handle`` came to the same; wait for it."""
        self.check_result(handle.result(PATIENCE))

    def check_result(self, result: Generated) -> None:
        """Assert that ``result`` is the same."""
        assert result.error is None, result.error
        assert (result.ids, result.finish_reason) == (self.tokens, self.reason)
        assert result.eos_id == (self.ids[-1] if self.reason == "eos" else None)
        assert result.length == self.request.counted_from + len(self.ids)


def run_solo(model: NllbModel, request: Request) -> Solo:
    """Run a request on a model that nobody else uses."""
    ids: list[int] = []
    rows: list[NDArray[np.float64]] = []
    rng = np.random.default_rng(0)
    clear = True
    seq = model.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
    seq.adapter_slot, seq.prefix_tokens = request.adapter_slot, request.prefix_tokens
    counted = request.counted_from
    ptr = model.prefill(request.prompt_tokens, seq) if request.most_tokens > counted else None
    while ptr is not None:
        row = model.copy_logits_to_host(ptr).astype(np.float64)
        rows.append(row)
        ids.append(choose(row, request, seq.tokens))
        for _ in range(_NUDGES):
            nudged = row + rng.uniform(-NUDGE, NUDGE, len(row)) * np.abs(row).max()
            clear = clear and choose(nudged, request, seq.tokens) == ids[-1]
        is_last = ids[-1] in request.end_ids or counted + len(ids) >= request.most_tokens
        ptr = None if is_last else model.decode(ids[-1], seq)
    model.free_sequence(seq)
    return Solo(request, ids, np.array(rows), clear)


def choose(row: NDArray[np.float64], request: Request, history: Sequence[int]) -> int:
    """Return the next id after ``history``, which begins with the start token, the language and what else is given."""
    params, endings = request.sampling, request.sampling.eos_ids or request.end_ids
    count = len(history) - 1 - request.given_tokens  # the start token was not generated
    if count + 1 == request.most_tokens and params.forced_eos_id is not None:
        return params.forced_eos_id
    x = processed(row, params, history, endings)
    if count < params.min_new_tokens:
        x[list(endings)] = -np.inf
    if params.temperature == 0:
        return int(x.argmax())
    scores = kept_scores(x, params.temperature, params.top_k, params.top_p, params.min_p)
    ids = np.flatnonzero(scores > -np.inf)
    return int(ids[(scores[ids] + gumbel(params.seed, len(history), ids)).argmax()])


def processed(
    row: NDArray[np.float64], params: SamplingParams, history: Sequence[int], endings: Collection[int] = ()
) -> NDArray[np.float64]:
    """Return the logits after repetition penalty, n-grams, bans and bad words, of which ``endings`` alone are none."""
    x = row.copy()
    for token in set(history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    size = params.no_repeat_ngram_size
    if size:
        grams = {tuple(history[first : first + size]) for first in range(len(history) - size + 1)}
        ending = tuple(history[len(history) - size + 1 :])
        x[[token for token in range(len(x)) if (*ending, token) in grams]] = -np.inf
    x[list(params.suppress_tokens)] = -np.inf
    for *prefix, token in params.bad_words:
        if not prefix and token in endings:
            continue
        if len(prefix) < len(history) and list(history[len(history) - len(prefix) :]) == prefix:
            x[token] = -np.inf
    return x


def log_softmax(row: NDArray[Any]) -> NDArray[np.float64]:
    """Return the log-softmax of one row in float64."""
    shifted = row.astype(np.float64) - row.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
