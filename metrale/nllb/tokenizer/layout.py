# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which id is which: the special tokens, the languages and the entries that are text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HEAD: Final[Mapping[str, int]] = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
"""The first ids of every vocabulary of the family."""

MASK: Final = "<mask>"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ids of one vocabulary that are no subwords.

    Attributes
    ----------
    languages : mapping of str to int
        Language codes as callers write them, and their ids, in the order of the ids.
    entries : int
        One more than the largest id that the tokenizer's files name.
    text_ids : range
        Ids among which those of text are; outside it, all are special tokens, languages or nothing.
    extra_text : frozenset of int
        Ids of text outside that range: tokens that were added to the vocabulary.
    silent : frozenset of int
        Ids within the range that have no text after all.
    mask_id : int or None
        The id of ``<mask>``; None when the vocabulary has none.
    """

    languages: Mapping[str, int]
    entries: int
    text_ids: range
    extra_text: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    mask_id: int | None = None

    def is_text(self, token: int) -> bool:
        """Return whether an id gives text."""
        return (token in self.text_ids and token not in self.silent) or token in self.extra_text
