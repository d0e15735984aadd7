# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is asked of the engine, and what came of it."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal, Self

from metrale.checks import flag, integer, listed, real
from metrale.engine.errors import RequestFailed
from metrale.errors import InvalidInput
from metrale.model import GREEDY, BeamParams, Hypothesis, SamplingParams

FinishReason = Literal["eos", "length", "cancelled", "timeout", "error"]
"""Why a sequence ended: it chose EOS, it reached its limit, or somebody or something stopped it."""

_MOST: Final = (1 << 31) - 1
"""Ids are 32-bit integers on the device; the other numbers have the same limit."""

_LEAST_SECONDS: Final = sys.float_info.min


@dataclass(frozen=True, slots=True)
class Request:
    """One source to translate, and how. What only the model can judge, the vocabulary for one, the engine checks.

    Attributes
    ----------
    prompt_tokens : tuple of int
        Subword ids, without language and EOS. Any iterable of integers may be given.
    src_lang_id, tgt_lang_id : int
        0 is the model's default.
        The model has one only if it was loaded with ``source=`` or ``target=``.
    max_new_tokens : int or None
        Most tokens to generate, the language token and EOS included; None is the model's limit. 1 asks for the language
        token alone: the request ends at once with "length".
    eos_ids : frozenset of int or None
        Every id that ends the sequence; None takes the model's. With an empty set, it runs to ``max_new_tokens``.
    sampling : SamplingParams
        Greedy unless given. With ``min_new_tokens`` or ``bad_words`` and no ``eos_ids`` of its own, EOS means the
        request's; with beams it always does. Its own ``max_new_tokens`` is not looked at.
    beams : BeamParams or None
        Search with so many beams, of which each takes a lane; None takes one token after the other. The tokens come all
        together, when the search has ended.
    prefix_tokens : tuple of int
        Ids that the target begins with after its language. They are given, not generated: ``max_new_tokens``,
        ``min_new_tokens`` and the length of a score count only what follows them, the language then no more. All of it
        together is at most the model's limit.
    adapter_slot : int
        Adapter to apply, or -1 for the base model.
    priority : int
        Larger goes first. A request that waits gains on newer ones, one priority for each ``aging`` seconds of the
        `Engine`.
    timeout : float or None
        Seconds from submission, after which the request ends with "timeout" and what it has.
    logprobs : bool
        Whether `Generated` gives the log-probability of every chosen token.
    on_token : callable or None
        Called with every id as it comes (neither the language token nor EOS), on the engine's thread: all requests
        wait while it runs, and it cannot wait for one. An exception in it ends this request with "error".

    Raises
    ------
    InvalidInput
        When a value is of the wrong type or out of range.
    """

    prompt_tokens: Sequence[int]
    src_lang_id: int = 0
    tgt_lang_id: int = 0
    max_new_tokens: int | None = None
    _: KW_ONLY
    eos_ids: frozenset[int] | None = None
    sampling: SamplingParams = GREEDY
    beams: BeamParams | None = None
    prefix_tokens: Sequence[int] = ()
    adapter_slot: int = -1
    priority: int = 0
    timeout: float | None = None
    logprobs: bool = False
    on_token: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "prefix_tokens"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.eos_ids is not None:
            object.__setattr__(self, "eos_ids", frozenset(_ids("eos_ids", self.eos_ids)))
        if self.max_new_tokens is not None:
            most = integer("max_new_tokens", self.max_new_tokens, 1, _MOST)
            object.__setattr__(self, "max_new_tokens", most)
        for name, low in (
            ("src_lang_id", 0),
            ("tgt_lang_id", 0),
            ("adapter_slot", -1),
            ("priority", -_MOST),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), low, _MOST))
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidInput("sampling", "a SamplingParams", self.sampling)
        if self.beams is not None:
            if not isinstance(self.beams, BeamParams):
                raise InvalidInput("beams", "a BeamParams or None", self.beams)
            if self.sampling.temperature:
                raise InvalidInput("sampling.temperature", "0, as beam search draws nothing", self.sampling.temperature)
        if self.timeout is not None:
            expected = "a finite number of seconds above 0, or None"
            object.__setattr__(self, "timeout", real("timeout", self.timeout, _LEAST_SECONDS, math.inf, expected))
        object.__setattr__(self, "logprobs", flag("logprobs", self.logprobs))
        if self.on_token is not None and not callable(self.on_token):
            raise InvalidInput("on_token", "a callable or None", self.on_token)
        if inspect.iscoroutinefunction(self.on_token):
            raise InvalidInput("on_token", "a callable that is not async: nobody would await it", self.on_token)

    @property
    def most_tokens(self) -> int:
        """``max_new_tokens`` of a request that an engine has completed."""
        assert self.max_new_tokens is not None
        return self.max_new_tokens

    @property
    def width(self) -> int:
        """Lanes that the request takes."""
        return 1 if self.beams is None else self.beams.num_beams

    @property
    def counted_from(self) -> int:
        """Tokens that count before any is chosen: the language's, unless more is given."""
        return 0 if self.prefix_tokens else 1

    @property
    def given_tokens(self) -> int:
        """Tokens of the target that come before those which ``max_new_tokens`` counts."""
        return 1 + len(self.prefix_tokens) if self.prefix_tokens else 0

    @property
    def target_positions(self) -> int:
        """Decoder positions of a target at its limit: the last token is not fed, and the decoder start is."""
        return self.given_tokens + self.most_tokens

    @property
    def end_ids(self) -> frozenset[int]:
        """``eos_ids`` of a request that an engine has completed."""
        assert self.eos_ids is not None
        return self.eos_ids


@dataclass(slots=True)
class Generated:
    """What a request came to.

    Attributes
    ----------
    ids : list of int
        The tokens chosen, without the language token and EOS.
    finish_reason : FinishReason
    logprob : float
        Sum of the chosen tokens' log-probabilities, EOS included; NaN unless asked for. They are those of the
        unprocessed logits, and with beams those of the search, after its processors.
    logprobs : list of float or None
        Its terms, one for each chosen token, EOS included; None unless asked for.
    length : int
        Tokens that a score divides by: the language token (not after a given prefix), ``ids`` and, if there, EOS.
    score : float
        The sequence's score as transformers defines it: with beams, that of the search; otherwise ``logprob`` over
        ``length``, NaN unless log-probabilities were asked for.
    hypotheses : list of Hypothesis or None
        What a beam search found, the best first, at most ``num_return_sequences``. None without beams, and when no
        search came to its end: the request was ended before, or asked for the language token alone.
    error : str or None
        What went wrong, with ``finish_reason`` "error".
    eos_id : int or None
        The id that ended the sequence, with ``finish_reason`` "eos".
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    logprob: float = math.nan
    logprobs: list[float] | None = None
    length: int = 1
    score: float = math.nan
    hypotheses: list[Hypothesis] | None = None
    error: str | None = None
    eos_id: int | None = None

    def raise_for_error(self) -> Self:
        """Return the result itself, unless it ended with "error".

        Raises
        ------
        RequestFailed
            With ``error`` as its text.
        """
        if self.finish_reason == "error":
            raise RequestFailed(self.error or "")
        return self


def _ids(argument: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ids as a tuple of ints; an error names the first wrong one as ``argument[i]``."""
    return tuple(
        value if type(value) is int and 0 <= value <= _MOST else integer(f"{argument}[{index}]", value, 0, _MOST)
        for index, value in enumerate(listed(argument, values, "an iterable of ids"))
    )
