# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which characters of a text the model does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from metrale.nllb.tokenizer import Tokenizer

Where = Literal["source", "target"]


@dataclass(frozen=True, slots=True)
class UnknownSpan:
    """A part of a text that the model's vocabulary lacks: the model was given ``<unk>`` in its place.

    Attributes
    ----------
    start, stop : int
        The part is ``[start, stop)`` of the text as the caller gave it, in code points.
    text : str
        What stands there.
    where : str
        Whose part: of the ``source``, or of the ``target`` that was given: a prefix, or one to be scored.
    """

    start: int
    stop: int
    text: str
    where: Where = "source"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {"start": self.start, "stop": self.stop, "text": self.text, "where": self.where}


def unknown_in(
    tokenizer: Tokenizer, text: str, tokens: Sequence[int], where: Where = "source"
) -> tuple[UnknownSpan, ...]:
    """Return what is unknown of a text whose ids, all of them, are ``tokens``, in order."""
    if tokenizer.unk_id not in tokens:  # nearly always; finding the places costs more
        return ()
    return tuple(UnknownSpan(start, stop, text[start:stop], where) for start, stop in tokenizer.unknown_spans(text))
