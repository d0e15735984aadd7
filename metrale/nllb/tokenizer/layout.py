# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which id is which: the special tokens, the languages and the entries that are text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

HEAD: Final[Mapping[str, int]] = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
"""The first ids of every vocabulary of the family."""

MASK: Final = "<mask>"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ids of one vocabulary.

    Attributes
    ----------
    languages : mapping of str to int
        Language codes as callers write them, and their ids, in the order of the ids.
    entries : int
        One more than the largest id that the tokenizer's files name.
    text_ids : collection of int
        The ids of text. All others are special tokens, languages or nothing, but for those of ``added_text``.
    added_text : frozenset of int
        Ids outside of it which are text as well: tokens that were added to the vocabulary.
    other_spellings : mapping of str to int
        What else a caller may write for a language.
    mask_id : int or None
        The id of ``<mask>``; None when the vocabulary has none.
    """

    languages: Mapping[str, int]
    entries: int
    text_ids: Collection[int]
    added_text: frozenset[int] = frozenset()
    other_spellings: Mapping[str, int] = field(default_factory=dict)
    mask_id: int | None = None

    def is_text(self, token: int) -> bool:
        """Return whether an id gives text."""
        return token in self.text_ids or token in self.added_text

    def language_id(self, code: str) -> int | None:
        """Return the id of a language, None when there is no such code."""
        found = self.languages.get(code)
        return self.other_spellings.get(code) if found is None else found
