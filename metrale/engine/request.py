# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is asked of the engine, and what came of it."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal, Self

from metrale.checks import integer, real
from metrale.engine.errors import RequestFailed
from metrale.errors import InvalidInput
from metrale.model import GREEDY, SamplingParams

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
        Greedy unless given. With ``min_new_tokens`` and no ``eos_ids`` of its own, it withholds the request's.
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
    adapter_slot: int = -1
    priority: int = 0
    timeout: float | None = None
    logprobs: bool = False
    on_token: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", _ids("prompt_tokens", self.prompt_tokens))
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
        if self.timeout is not None:
            expected = "a finite number of seconds above 0, or None"
            object.__setattr__(self, "timeout", real("timeout", self.timeout, _LEAST_SECONDS, math.inf, expected))
        if not isinstance(self.logprobs, bool):
            raise InvalidInput("logprobs", "a bool", self.logprobs)
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
        Sum of the chosen tokens' log-probabilities under the unprocessed logits, EOS included; NaN unless asked for.
    logprobs : list of float or None
        Its terms, one for each chosen token, EOS included; None unless asked for.
    length : int
        Tokens that a score divides by: the language token, ``ids`` and, if there, EOS.
    error : str or None
        What went wrong, with ``finish_reason`` "error".
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    logprob: float = math.nan
    logprobs: list[float] | None = None
    length: int = 1
    error: str | None = None

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
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInput(argument, "an iterable of ids", values)
    return tuple(
        value if type(value) is int and 0 <= value <= _MOST else integer(f"{argument}[{index}]", value, 0, _MOST)
        for index, value in enumerate(values)
    )
