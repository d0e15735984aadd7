# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelScoring: how likely a given target is, and what each of its tokens attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.checks import kept
from metrale.model.refusal import refusal


@dataclass(frozen=True, slots=True)
class ScoreReq:
    """A source and the target to be scored.

    Attributes
    ----------
    prompt_tokens : Sequence[int]
        Subword ids of the source, without language token and EOS.
    target_tokens : Sequence[int]
        Ids of the target after its language token, at least one; EOS as well if it is to count.
    src_lang_id, tgt_lang_id : int
        Language token ids; 0 is the model's default.
    adapter_slot : int
        Adapter to apply, or -1 for the base model.
    """

    prompt_tokens: Sequence[int]
    target_tokens: Sequence[int]
    src_lang_id: int = 0
    tgt_lang_id: int = 0
    adapter_slot: int = -1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "target_tokens"):
            object.__setattr__(self, name, kept(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class ScoredTarget:
    """What a target came to.

    Attributes
    ----------
    logprobs : list of float
        The log-softmax of the unprocessed logits at each of ``target_tokens``, given the ones before it.
    attention : ndarray or None
        float32 ``[layers, heads, targets, sources]``: the cross-attention of the decoder position that each of
        ``target_tokens`` was predicted from. The sources are language, prompt and EOS; a row's sum is 1. None unless
        asked for.
    """

    logprobs: list[float]
    attention: NDArray[np.floating[Any]] | None = None

    @property
    def score(self) -> float:
        """The sequence's score as transformers defines it: the sum over the length, which counts the language token."""
        return sum(self.logprobs) / (1 + len(self.logprobs))


class ModelScoring:
    """Targets that are given and not chosen, all their tokens in one pass. A model may keep the default."""

    def score_targets(self, reqs: Sequence[ScoreReq], *, attention: bool = False) -> list[ScoredTarget]:
        """Score each target, and wait for the results.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        metrale.errors.InvalidInput
            When an id is not in the vocabulary, or a text is too long; nothing is enqueued.
        metrale.errors.NoFreeSlot, gpu_runtime.errors.OutOfMemory
            When there is no room for the next of them.
        metrale.errors.NonFiniteLogits
            When the logits of a target hold a NaN or an infinity; ``rows`` are the requests' places.
        """
        raise refusal(self, "score_targets")
