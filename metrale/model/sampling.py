# SPDX-License-Identifier: MIT OR Apache-2.0
"""How the ids of one sequence are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from metrale.checks import integer, listed, real
from metrale.errors import InvalidInput

_INT32_MAX: Final = (1 << 31) - 1
_FLOAT32_MAX: Final = 3.4e38
_FLOAT32_TINY: Final = 1.2e-38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next id of one sequence is chosen. The steps and their order are those of transformers.

    First the logits are processed: repetition penalty, repeated n-grams, bans, bad words, minimum length. Then, unless
    ``temperature`` is 0, they are divided by it, cut to the ``top_k``, the ``top_p`` and the ``min_p``, and an id is
    drawn. The history that penalty and n-grams look at is every id that the decoder was given, the start token and the
    language included.

    Attributes
    ----------
    temperature : float
        0 takes the largest processed logit (greedy); larger is more even.
    top_k : int
        Keep the ids whose score is at least the k-th largest; 0 keeps all.
    top_p : float
        Keep an id when all ids of a larger score together have a probability below this; 1 keeps all.
    min_p : float
        Keep an id when its probability is at least this share of the largest; 0 keeps all.
    repetition_penalty : float
        Positive logits of ids in the history are divided by it, others multiplied; 1 changes nothing.
    no_repeat_ngram_size : int
        No n-gram of this size may occur twice in the history; 0 allows all.
    suppress_tokens : tuple of int
        Ids that are never chosen.
    bad_words : tuple of tuple of int
        Ids, or ids in a row, that may not occur. The last of several is not chosen where the history has at least as
        many ids and ends in the others. One that is an EOS id alone is left out.
    eos_ids : tuple of int
        Not chosen before there are ``min_new_tokens``.
    min_new_tokens : int
        Generated ids, the language token among them, that must be there before EOS may be chosen.
    max_new_tokens : int or None
        Generated ids at the limit, the language token among them. Beam search needs it, and ``forced_eos_id``.
    forced_eos_id : int or None
        The id that comes last at the limit, whatever the logits are.
    seed : int
        Key of the random numbers, 64 bits. A draw depends on it and on the position alone, whatever else is in the
        batch.

    Raises
    ------
    InvalidInput
        When one of them is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    forced_eos_id: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high, expected in (
            ("temperature", 0.0, _FLOAT32_MAX, "a finite number of at least 0"),
            ("top_p", _FLOAT32_TINY, 1.0, "a number above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1"),
            ("repetition_penalty", _FLOAT32_TINY, _FLOAT32_MAX, "a finite number above 0"),
        ):
            object.__setattr__(self, name, real(name, getattr(self, name), low, high, expected))
        for name, limit in (
            ("top_k", _INT32_MAX),
            ("no_repeat_ngram_size", _INT32_MAX),
            ("min_new_tokens", _INT32_MAX),
            ("seed", (1 << 64) - 1),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), 0, limit))
        for name in ("suppress_tokens", "eos_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        given = listed("bad_words", self.bad_words, "a sequence of sequences of ids")
        words = tuple(_ids(f"bad_words[{at}]", word) for at, word in enumerate(given))
        object.__setattr__(self, "bad_words", words)
        for at, word in enumerate(words):
            integer(f"bad_words[{at}]: length", len(word), 1)
        for name, low in (("max_new_tokens", 1), ("forced_eos_id", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name), low, _INT32_MAX))
        if self.forced_eos_id in self.suppress_tokens:
            raise InvalidInput("forced_eos_id", "an id that is not among suppress_tokens", self.forced_eos_id)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that are never chosen: those of ``suppress_tokens``, and bad words of one id that is no EOS."""
        words = (word[0] for word in self.bad_words if len(word) == 1)
        return (*self.suppress_tokens, *(token for token in words if token not in self.eos_ids))

    @property
    def bad_phrases(self) -> tuple[tuple[int, ...], ...]:
        """Bad words of several ids."""
        return tuple(word for word in self.bad_words if len(word) > 1)

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on the ids before it."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size > 0 or bool(self.bad_phrases)

    @property
    def suppresses_eos(self) -> bool:
        """Whether EOS is withheld from short results."""
        return self.min_new_tokens > 0 and bool(self.eos_ids)


def _ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Return ids as a tuple of int, none negative."""
    tokens = enumerate(listed(name, ids, "a sequence of ids"))
    return tuple(integer(f"{name}[{at}]", token, 0, _INT32_MAX) for at, token in tokens)


GREEDY: Final = SamplingParams()
"""The largest logit, always."""
