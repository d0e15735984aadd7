# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tokenizer that callers see, the same for every kind of vocabulary."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from metrale.errors import InvalidInput, UnknownLanguage
from metrale.nllb.languages import near_languages
from metrale.nllb.source import framed
from metrale.nllb.tokenizer.layout import HEAD, Layout
from metrale.nllb.tokenizer.subwords import Span, Subwords, joined


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tokenizer:
    """The tokenizer of a checkpoint. `open_tokenizer` makes one.

    Immutable, and safe to share between threads without a lock.

    Attributes
    ----------
    kind : str
        Where the ids come from, in words.
    vocab_size : int
        Rows of the model's embedding, at least ``len(tokenizer)``. Rows past ``len(tokenizer)`` have no text.
    layout : Layout
        Which id is which.
    legacy_order : bool
        Whether ``encode_source`` puts the language after the text.
    asks_legacy_order : bool
        Whether the checkpoint's files ask for that order. It is taken on request alone.
    bos_id, pad_id, eos_id, unk_id : int
        The ids of ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``.
    """

    bos_id: ClassVar[int] = HEAD["<s>"]
    pad_id: ClassVar[int] = HEAD["<pad>"]
    eos_id: ClassVar[int] = HEAD["</s>"]
    unk_id: ClassVar[int] = HEAD["<unk>"]

    kind: str
    vocab_size: int
    layout: Layout
    _subwords: Subwords
    asks_legacy_order: bool = False
    legacy_order: bool = False
    _codes: Mapping[int, str] = field(init=False)

    def __post_init__(self) -> None:
        codes = {number: code for code, number in self.layout.languages.items()}
        object.__setattr__(self, "_codes", MappingProxyType(codes))

    def __len__(self) -> int:
        """Return the number of entries: one more than the largest id that the tokenizer's files name."""
        return self.layout.entries

    def __repr__(self) -> str:
        sizes = f"{len(self)} entries, {len(self.languages)} languages, vocab_size={self.vocab_size}"
        return f"Tokenizer({self.kind}, {sizes})"

    @property
    def languages(self) -> tuple[str, ...]:
        """The language codes, in the order of their ids."""
        return tuple(self.layout.languages)

    @property
    def mask_id(self) -> int | None:
        """The id of ``<mask>``, None when the vocabulary has none."""
        return self.layout.mask_id

    def encode(self, text: str) -> list[int]:
        """Return the subword ids of ``text``, without language and ``</s>``, however many they are.

        The text is plain: ``</s>``, ``<mask>`` or ``eng_Latn`` in it are characters like any others. Text without
        anything visible gives no ids.

        Raises
        ------
        InvalidInput
            When ``text`` is not a str or holds a lone surrogate, which no UTF-8 can express.
        """
        _require_text("text", text)
        return self._subwords.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ``[encode(text) for text in texts]``, computed on several threads.

        Raises
        ------
        InvalidInput
            As ``encode``; the argument's name says which text it was.
        """
        if isinstance(texts, str):
            raise InvalidInput("texts", "a sequence of str", "one str")
        try:
            listed = list(texts)
        except TypeError:
            raise InvalidInput("texts", "a sequence of str", reprlib.repr(texts)) from None
        for i, text in enumerate(listed):
            _require_text(f"texts[{i}]", text)
        return self._subwords.encode_batch(listed)

    def encode_source(self, text: str, language: str) -> list[int]:
        """Return the encoder's input: the id of ``language``, the ids of ``text``, ``</s>``.

        In the legacy order the language comes last.

        Raises
        ------
        InvalidInput
            As ``encode``, and UnknownLanguage as ``language_id``.
        """
        return list(framed(self.language_id(language), self.encode(text), self.eos_id, legacy_order=self.legacy_order))

    def unknown_spans(self, text: str) -> tuple[Span, ...]:
        """Return which parts of ``text`` the vocabulary lacks: those that became ``<unk>``.

        Returns
        -------
        tuple of (int, int)
            ``[start, stop)`` in code points of ``text``, so that ``text[start:stop]`` is a part that is lost. In order,
            none empty; parts side by side are one. A letter and the marks on it are lost together when they
            are one character after normalisation; so is a code point that stands for several (U+33A1) of which one is
            unknown. Empty exactly when ``encode`` gives no ``<unk>``.

        Raises
        ------
        InvalidInput
            As ``encode``.
        """
        _require_text("text", text)
        return joined(self._subwords.unknown_spans(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, as transformers does with ``skip_special_tokens=True``.

        Special tokens, ``<unk>`` and ``<mask>`` among them, language codes, and ids from ``len(tokenizer)`` up to
        ``vocab_size``, which are padding of the embedding, give no text.

        Parameters
        ----------
        ids : iterable of int
            Python or NumPy integers in ``[0, vocab_size)``.

        Raises
        ------
        InvalidInput
            When an id is not an integer or is outside the vocabulary.
        """
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError:
            raise InvalidInput("ids", "a sequence of integers", reprlib.repr(ids)) from None
        for i, number in enumerate(numbers):
            if not 0 <= number < self.vocab_size:
                raise InvalidInput(f"ids[{i}]", f"an id from 0 to {self.vocab_size - 1}", number)
        return self._subwords.decode([number for number in numbers if self.layout.is_text(number)])

    def is_special(self, token: int) -> bool:
        """Return whether an id gives no text: a special token, a language code, or a padding row."""
        return not self.layout.is_text(token)

    def language_id(self, code: str, argument: str = "language") -> int:
        """Return the id of a language code.

        Parameters
        ----------
        code : str
            One of ``languages``, spelt exactly so; of M2M-100 also as the vocabulary has it, ``__fr__`` for ``fr``.
        argument : str
            The name of the caller's argument, for the error.

        Raises
        ------
        UnknownLanguage
            With up to three codes that may have been meant, for ISO 639 codes and English names too.
        """
        found = self.layout.language_id(code) if isinstance(code, str) else None
        if found is None:
            near = near_languages(code, self.languages) if isinstance(code, str) else ()
            raise UnknownLanguage(argument, code[:80] if isinstance(code, str) else code, near)
        return found

    def language_code(self, language_id: int) -> str:
        """Return the language code that has this id.

        Raises
        ------
        InvalidInput
            When it is not the id of a language.
        """
        try:
            code = self._codes.get(operator.index(language_id))
        except TypeError:
            code = None
        if code is None:
            ids = list(self._codes)
            among = f", from {min(ids)} to {max(ids)}" if ids else ", of which there is none"
            raise InvalidInput("language_id", f"the id of a language{among}", reprlib.repr(language_id))
        return code


def _require_text(argument: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidInput(argument, "a str", type(text).__name__)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}"
        raise InvalidInput(argument, "text that UTF-8 can express", got) from None
