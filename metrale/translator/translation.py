# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a text came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.engine import FinishReason
from metrale.translator.unknown import UnknownSpan

Languages = str | Sequence[str] | None
"""A language code for all texts, one for each, or None for the model's default."""


@dataclass(frozen=True, slots=True)
class TranslationHypothesis:
    """One of the translations that were found for a text.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
        The target's ids after its language, all of them: the prefix that was given, special tokens, and EOS unless the
        limit came first.
    score : float or None
        As in `Translation`.
    token_logprobs : tuple of float or None
        The log-probability of each of ``token_ids``, 0 of those that were given. With one beam they are the model's
        own, with more the search's, after what withholds tokens. None unless scores were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float | None = None
    token_logprobs: tuple[float, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "score": self.score,
            "token_logprobs": None if self.token_logprobs is None else list(self.token_logprobs),
        }


@dataclass(frozen=True, slots=True)
class Translation:
    """One translated text.

    Attributes
    ----------
    text : str
        With the prefix that was given. With ``cancelled`` and ``timeout``, as far as it came; empty with ``error``.
    token_ids : tuple of int
        The ids that the text is made of: those of the target, without language, EOS and other special tokens.
    score : float or None
        The sequence's score as transformers defines it: summed log-probability over length (with beams, to the power of
        ``length_penalty``), where the length counts the language token (whose log-probability is 0) and EOS, and after
        a given prefix only what follows. None unless it was asked for.
    finish_reason : str
        ``eos``, ``length``, ``cancelled``, ``timeout`` or ``error``.
    truncated : bool
        Whether the source was too long and only its beginning was translated.
    source_lang, target_lang : str
    error : str or None
        What went wrong, when ``finish_reason`` is ``error``.
    adapter : str or None
        The name of the adapter that was applied.
    hypotheses : tuple of TranslationHypothesis
        The best first, which is this translation itself; at most ``num_return_sequences``. Empty for a blank text, with
        ``error``, and when a beam search did not come to its end.
    unknown : tuple of UnknownSpan
        What the model does not know of the text, all of it, and of the prefix. A translation can only guess at it.
    repeats : bool
        Whether the translation is a loop. A run is something of up to 32 ids that comes at least 4 times, one after the
        other, over at least 16 ids. In a loop, at least half of what was generated is in runs, or a run goes on to
        where a limit stopped it. But where the text, or the prefix, repeats something at least 4 times itself, it is
        none unless it has more than twice as many ids in runs.
    attention : ndarray or None
        float32 ``[targets, sources]``: what the decoder attends to in the source, the mean over its layers and heads.
        Row ``i`` belongs to the step that ``hypotheses[0].token_ids[i]`` was chosen in, the last row so to EOS. The
        columns are the source's language, its tokens and EOS; a row's sum is 1. None unless it was asked for, and where
        there are no such tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float | None
    finish_reason: FinishReason
    truncated: bool
    source_lang: str
    target_lang: str
    error: str | None = None
    adapter: str | None = None
    hypotheses: tuple[TranslationHypothesis, ...] = ()
    unknown: tuple[UnknownSpan, ...] = ()
    repeats: bool = False
    attention: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def token_logprobs(self) -> tuple[float, ...] | None:
        """The log-probability of each of ``hypotheses[0].token_ids``; None unless scores were asked for."""
        return self.hypotheses[0].token_logprobs if self.hypotheses else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; ``attention``, as lists of rows, only if it is there."""
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "score": self.score,
            "finish_reason": self.finish_reason,
            "truncated": self.truncated,
            "source_lang": self.source_lang,
            "target_lang": self.target_lang,
            "error": self.error,
            "adapter": self.adapter,
            "token_logprobs": None if self.token_logprobs is None else list(self.token_logprobs),
            "hypotheses": [hypothesis.to_dict() for hypothesis in self.hypotheses],
            "unknown": [span.to_dict() for span in self.unknown],
            "repeats": self.repeats,
        }
        if self.attention is not None:
            fields["attention"] = self.attention.tolist()
        return fields


@dataclass(frozen=True, slots=True)
class Scored:
    """How likely a target that was given is.

    Attributes
    ----------
    score : float
        Summed log-probability over length, which counts the language token and EOS.
    token_ids : tuple of int
        The target's ids after its language, EOS included.
    token_logprobs : tuple of float
        The log-probability of each of them, by the model's unprocessed logits.
    truncated : bool
        Whether the source was too long and only its beginning was looked at.
    source_lang, target_lang : str
    adapter : str or None
    unknown : tuple of UnknownSpan
        What the model does not know of the source and of the target.
    """

    score: float
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    truncated: bool
    source_lang: str
    target_lang: str
    adapter: str | None = None
    unknown: tuple[UnknownSpan, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {
            "score": self.score,
            "token_ids": list(self.token_ids),
            "token_logprobs": list(self.token_logprobs),
            "truncated": self.truncated,
            "source_lang": self.source_lang,
            "target_lang": self.target_lang,
            "adapter": self.adapter,
            "unknown": [span.to_dict() for span in self.unknown],
        }
