# SPDX-License-Identifier: MIT OR Apache-2.0
"""The JSON files that lie beside a vocabulary, and the ids that they give to tokens.

They are read even where another file holds the vocabulary: an id that is off by one gives fluent nonsense, no error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metrale.checkpoint import read_json_object
from metrale.checkpoint.json_fields import shown
from metrale.errors import told

CONFIG: Final = "tokenizer_config.json"
SPECIAL_MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
WHOLE: Final = "tokenizer.json"

FLAGS: Final = ("special", "normalized", "lstrip", "rstrip", "single_word")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_CLASSES: Final = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True, slots=True)
class Claim:
    """One file's word on one token. ``flags`` is None where the file gives nothing but the id."""

    source: str
    content: object
    number: object
    flags: Mapping[str, bool] | None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the files; one that is absent is an empty object."""

    config: Mapping[str, object]
    special_map: Mapping[str, object]
    added: Mapping[str, object]
    whole: Mapping[str, object]

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Read what is there.

        Raises
        ------
        CheckpointError
            When a file is not a whole JSON object.
        """
        names = (CONFIG, SPECIAL_MAP, ADDED, WHOLE)
        return cls(*(read_json_object(folder / name) if os.path.lexists(folder / name) else {} for name in names))

    def claims(self) -> Iterator[Iterator[Claim]]:
        """Yield the claims of each file."""
        decoder = self.config.get("added_tokens_decoder")
        yield (
            Claim(CONFIG, _content(entry), int(number) if _is_id(number) else number, _flags(entry))
            for number, entry in (decoder.items() if isinstance(decoder, dict) else ())
        )
        yield (Claim(ADDED, content, number, None) for content, number in self.added.items())
        added = self.whole.get("added_tokens")
        yield (
            Claim(WHOLE, _content(entry), entry.get("id") if isinstance(entry, dict) else None, _flags(entry))
            for entry in (added if isinstance(added, list) else ())
        )

    def lists(self) -> Iterator[tuple[str, str, list[object]]]:
        """Yield each list of special tokens: its file, its key and the tokens' contents."""
        for source, file in ((CONFIG, self.config), (SPECIAL_MAP, self.special_map)):
            for key in _LISTS:
                value = file.get(key)
                entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
                yield source, key, [_content(entry) for entry in entries]

    def named_special(self) -> frozenset[str]:
        """Return the contents that the files call special without giving an id."""
        listed = [content for _, _, contents in self.lists() for content in contents]
        single = [
            _content(value)
            for file in (self.config, self.special_map)
            for key, value in file.items()
            if key.endswith("_token")
        ]
        return frozenset(content for content in (*listed, *single) if isinstance(content, str))

    @property
    def asks_legacy_order(self) -> bool:
        """Whether the files ask for the language after the text."""
        return self.config.get("legacy_behaviour") is True

    def unfit(self, classes: Iterable[str]) -> Iterator[str]:
        """Yield what the configuration asks for that no tokenizer here does; ``classes`` are those meant to be."""
        found = self.config.get("tokenizer_class")
        allowed = tuple(name + suffix for name in classes for suffix in ("", "Fast"))
        if found not in (*_CLASSES, *allowed):
            yield f"{CONFIG}: tokenizer_class is {shown(found)}, expected {allowed[0]} for the vocabulary that is there"
        options = self.config.get("sp_model_kwargs")
        if options:
            yield f"{CONFIG}: sp_model_kwargs is {shown(options)}, expected none: they change how texts are cut"

    def moved_pieces(self, vocabulary: Mapping[str, int], name: str) -> Iterator[str]:
        """Yield what ``tokenizer.json`` says against the ids of the pieces that the file ``name`` has."""
        model = self.whole.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, dict):
            wrong = [piece for piece, number in vocabulary.items() if vocab.get(piece) != number]
            if wrong:
                yield f"{WHOLE}: {len(wrong)} pieces of {name} have another id there or none, as {told(wrong[0])}"


def _content(entry: object) -> object:
    return entry.get("content") if isinstance(entry, dict) else entry


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _flags(entry: object) -> dict[str, bool] | None:
    if not isinstance(entry, dict):
        return None
    flags = {name: entry.get(name) is True for name in FLAGS}
    flags["normalized"] = entry.get("normalized", not flags["special"]) is True
    return flags
