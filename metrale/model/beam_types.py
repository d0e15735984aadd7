# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is asked of a beam search, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from metrale.checks import integer, kept, listed, real
from metrale.errors import InvalidInput
from metrale.model.sampling import SamplingParams

EarlyStopping: TypeAlias = bool | Literal["never"]
"""When a beam search ends; see :class:`BeamParams`."""

MAX_BEAMS: Final = 64
"""Most beams of one search."""

BEAM_DONE_FLAG: Final = 1
"""The search has ended."""
BEAM_NOT_FINITE_FLAG: Final = 2
"""It has ended because a row of its logits holds a NaN or an infinity."""
BEAM_NO_CHOICE_FLAG: Final = 4
"""It has ended without any hypothesis, because every id was forbidden."""

_MOST_PENALTY: Final = 1e4


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How wide a beam search is, and when it ends. The semantics are those of transformers.

    Attributes
    ----------
    num_beams : int
        Hypotheses that are followed at once, 1 to 64.
    length_penalty : float
        A finished hypothesis of ``L`` ids scores its summed log-probability over ``L ** length_penalty``. ``L`` counts
        the language token and EOS; after a given prefix, only what follows the prefix.
    early_stopping : bool or "never"
        ``False`` ends when no running beam can beat the worst of ``num_beams`` finished hypotheses at its present
        length, ``True`` as soon as there are ``num_beams``, ``"never"`` when none can at any length.
    num_return_sequences : int
        Hypotheses to return, at most ``num_beams``.

    Raises
    ------
    InvalidInput
        When one of them is out of range.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        beams = integer("num_beams", self.num_beams, 1, MAX_BEAMS)
        object.__setattr__(self, "num_beams", beams)
        expected = f"a number from {-_MOST_PENALTY:.0f} to {_MOST_PENALTY:.0f}"
        penalty = real("length_penalty", self.length_penalty, -_MOST_PENALTY, _MOST_PENALTY, expected)
        object.__setattr__(self, "length_penalty", penalty)
        early: object = self.early_stopping
        if not (isinstance(early, bool) or (isinstance(early, str) and early == "never")):
            raise InvalidInput("early_stopping", "False, True or 'never'", self.early_stopping)
        expected = f"1 to {beams}, the number of beams"
        count = integer("num_return_sequences", self.num_return_sequences, 1, beams, expected)
        object.__setattr__(self, "num_return_sequences", count)

    @property
    def why_nothing(self) -> str:
        """What a search without any hypothesis comes from, besides that every id is forbidden; empty when nothing."""
        if self.num_beams == 1 or self.length_penalty >= 0:
            return ""
        return f", or a length_penalty of {self.length_penalty:g} takes every score below -1e9, where none counts"


@dataclass(frozen=True, slots=True)
class BeamReq:
    """One beam search, run to its end by ``ModelForward.generate_beam_batch`` or ``generate_beams``.

    Attributes
    ----------
    prompt_tokens : Sequence[int]
        Subword ids of the source, without language token and EOS: the model adds both.
    src_lang_id, tgt_lang_id : int
        Language token ids; 0 is the model's default.
    adapter_slot : int
        Adapter to apply, or -1 for the base model.
    num_beams : int
        Width of the search; 1 is greedy. The request occupies that many lanes.
    max_new : int
        Most ids in the result, the language token and EOS included.
    length_penalty, early_stopping, num_return_sequences
        As in `BeamParams`.
    min_new : int
        Ids that must be there before EOS may be chosen, the language token among them.
    no_repeat_ngram_size, repetition_penalty, suppress_tokens
        As in `SamplingParams`.
    bad_words_ids : sequence of sequences of int
        Ids, or ids in a row, that may not occur. One that is an EOS id alone is left out, as transformers does.
    forced_eos_id : int or None
        The id that comes last when the result is as long as it may be.
    prefix_tokens : sequence of int
        Ids that the target begins with after its language, which are given and not searched. ``max_new``, ``min_new``
        and the length of a score count only what follows, once there are any.
    eos_ids : sequence of int or None
        Ids that end a hypothesis; None takes the model's.
    """

    prompt_tokens: Sequence[int]
    src_lang_id: int = 0
    tgt_lang_id: int = 0
    adapter_slot: int = -1
    num_beams: int = 4
    max_new: int = 256
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1
    min_new: int = 0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    bad_words_ids: Sequence[Sequence[int]] = ()
    suppress_tokens: Sequence[int] = ()
    forced_eos_id: int | None = None
    prefix_tokens: Sequence[int] = ()
    eos_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "prefix_tokens", "suppress_tokens", "eos_ids", "bad_words_ids"):
            object.__setattr__(self, name, kept(getattr(self, name)))

    def beam_params(self) -> BeamParams:
        """Return its width and its end. `InvalidInput` when one of them is out of range."""
        return BeamParams(self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences)

    def sampling_params(self, eos_ids: Sequence[int]) -> SamplingParams:
        """Return what is done to log-probabilities; ``eos_ids`` are the model's. `InvalidInput` as `SamplingParams`."""
        return SamplingParams(
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            suppress_tokens=tuple(listed("suppress_tokens", self.suppress_tokens, "a sequence of ids")),
            bad_words=tuple(listed("bad_words", self.bad_words_ids, "a sequence of sequences of ids")),
            eos_ids=tuple(listed("eos_ids", eos_ids if self.eos_ids is None else self.eos_ids, "a sequence of ids")),
            min_new_tokens=self.min_new,
            max_new_tokens=self.max_new,
            forced_eos_id=self.forced_eos_id,
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a beam search.

    Attributes
    ----------
    ids : list of int
        From the language token to EOS, which is missing when the limit came first.
    score : float
        Summed log-probability over ``L ** length_penalty``; NaN of a greedy result.
    logprobs : list of float
        Log-probability of each of ``ids`` after the processors, or before them of a greedy result; 0 of ids that were
        given.
    """

    ids: list[int]
    score: float
    logprobs: list[float]
