# SPDX-License-Identifier: MIT OR Apache-2.0
"""How texts are translated: what `Translator.translate` and `Translator.stream` take alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypedDict

from metrale.checks import flag, listed
from metrale.errors import InvalidInput, told
from metrale.model import GREEDY, BeamParams, EarlyStopping, SamplingParams
from metrale.nllb.limits import WORD_ROOM

_FLOAT32_EXPONENTS: Final = 126


class Options(TypedDict, total=False):
    """The keyword arguments that make a `TranslationOptions`."""

    max_new_tokens: int | None
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: EarlyStopping
    min_new_tokens: int | None
    no_repeat_ngram_size: int | None
    repetition_penalty: float | None
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: Sequence[int] | None
    forced_eos: bool | int
    sampling: SamplingParams
    return_scores: bool
    return_attention: bool
    truncate: bool
    timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationOptions:
    """What all texts of one call have in common. Names and meanings are those of transformers where it has them.

    Attributes
    ----------
    max_new_tokens : int or None
        Most tokens to generate, EOS and the language token included; after a given prefix, only what follows it. None
        takes the model's limit, in which the prefix and the language count.
    num_beams : int
        Hypotheses that are followed at once; each takes a lane of the model. 1 is greedy, or draws.
    num_return_sequences : int
        Hypotheses to return, at most ``num_beams``.
    length_penalty, early_stopping
        See `BeamParams`; with one beam they have no effect.
    min_new_tokens, no_repeat_ngram_size, repetition_penalty, suppress_tokens
        See `SamplingParams`, of which they are fields: None leaves what ``sampling`` says.
    bad_words_ids : sequence of sequences of int, or None
        Ids, or ids in a row, that may not occur: ``bad_words`` of `SamplingParams`.
    forced_eos : bool or int
        The id that comes last when a translation is as long as it may be, whatever the model makes of it: True is the
        model's (first) EOS. An end that was forced counts as one: ``finish_reason`` is ``eos``.
    sampling : SamplingParams
        How tokens are drawn. Each text draws by a seed of its own, which follows from ``seed`` and the text's index
        alone. Beams draw nothing.
    return_scores : bool
        Whether to compute scores and log-probabilities.
    return_attention : bool
        Whether to compute `Translation.attention`, in a pass of its own over the finished translation.
    truncate : bool
        Whether a source that is too long is cut, and flagged in its result, or refused.
    timeout : float or None
        Most seconds for a text, from when the engine is given it.

    Raises
    ------
    InvalidInput
        When one of them is out of range, or is given here and in ``sampling``.
    """

    max_new_tokens: int | None = None
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_new_tokens: int | None = None
    no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    forced_eos: bool | int = False
    sampling: SamplingParams = GREEDY
    return_scores: bool = False
    return_attention: bool = False
    truncate: bool = True
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidInput("sampling", "a SamplingParams", told(self.sampling))
        for name in ("return_scores", "return_attention", "truncate"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name, read in (("bad_words_ids", _words), ("suppress_tokens", partial(_ids, "suppress_tokens"))):
            given: object = getattr(self, name)
            if given is not None:  # an iterator gives its items once, and they are asked for again
                object.__setattr__(self, name, read(given))
        BeamParams(self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences)
        self.sampling_params(0)

    @property
    def beam_params(self) -> BeamParams | None:
        """How to search; None with one beam."""
        if self.num_beams == 1:
            return None
        return BeamParams(self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences)

    def check_penalty(self, longest: int) -> None:
        """Refuse a ``length_penalty`` by which no score of a hypothesis of ``longest`` ids is a number.

        Raises
        ------
        InvalidInput
            When the power is no float32 above 0.
        """
        exponent = math.log2(longest) * self.length_penalty
        if self.num_beams > 1 and not -_FLOAT32_EXPONENTS < exponent < _FLOAT32_EXPONENTS:
            expected = f"one whose power of {longest}, the longest result, is a float32 above 0"
            raise InvalidInput("length_penalty", expected, str(self.length_penalty))

    def sampling_params(self, eos_id: int) -> SamplingParams:
        """Return ``sampling`` with what is given beside it; ``eos_id`` is the model's (first) EOS.

        Raises
        ------
        InvalidInput
            As the class says.
        """
        given: dict[str, Any] = {
            field: value for field, argument in _FIELDS.items() if (value := getattr(self, argument)) is not None
        }
        if self.forced_eos is not False:
            given["forced_eos_id"] = eos_id if self.forced_eos is True else self.forced_eos
        for field in given:
            if getattr(self.sampling, field) != getattr(GREEDY, field):
                argument = _FIELDS.get(field, "forced_eos")
                raise InvalidInput(argument, f"it here, or {field} of sampling", "both")
        with renamed():
            params = replace(self.sampling, **given)
        size = sum(len(word) + 1 for word in params.bad_phrases)
        if size > WORD_ROOM - 2:
            expected = f"at most {WORD_ROOM - 2} ids in all, each phrase counting for one more"
            raise InvalidInput("bad_words_ids", expected, str(size))
        return params


_FIELDS: Final = {
    "min_new_tokens": "min_new_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "bad_words": "bad_words_ids",
    "suppress_tokens": "suppress_tokens",
}
"""The arguments that are fields of `SamplingParams`, by these."""

_RENAMED: Final = {"bad_words": "bad_words_ids", "forced_eos_id": "forced_eos", "prefix_tokens": "target_prefix"}


@contextmanager
def renamed() -> Iterator[None]:
    """Let errors in a ``with`` block call arguments as the translator's callers do, not as its parts do."""
    try:
        yield
    except InvalidInput as error:
        argument = error.argument.removeprefix("sampling.").removeprefix("beams.")
        for inside, outside in _RENAMED.items():
            argument = argument.replace(inside, outside)
        raise InvalidInput(argument, error.expected, error.got) from None


def _words(given: object) -> tuple[tuple[int, ...], ...]:
    words = listed("bad_words_ids", given, "a sequence of sequences of ids")
    return tuple(_ids(f"bad_words_ids[{index}]", word) for index, word in enumerate(words))


def _ids(argument: str, given: object) -> tuple[int, ...]:
    return tuple(listed(argument, given, "a sequence of ids"))
