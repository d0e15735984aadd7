# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each text of a call may have of its own: languages, a target prefix, an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from metrale.errors import InvalidInput, told
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import Tokenizer
from metrale.translator.translation import Languages
from metrale.translator.unknown import UnknownSpan, unknown_in

OneOrEach = str | Sequence[str | None] | None
"""A value for all texts, one for each, or None; None in a sequence stands for one text without."""

Prefix = tuple[tuple[int, ...], tuple[UnknownSpan, ...]]
"""The ids of a target prefix, and what is unknown of it."""

_NO_PREFIX: Final[Prefix] = ((), ())

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A resident adapter: its name, its slot, and the model's number for this load of it."""

    name: str
    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for one text.

    Attributes
    ----------
    source, target : str
        Language codes.
    prefix : tuple of int
        Ids that the target begins with.
    adapter : Adapter or None
    unknown : tuple of UnknownSpan
        What the model does not know of the prefix.
    """

    source: str
    target: str
    prefix: tuple[int, ...] = ()
    adapter: Adapter | None = None
    unknown: tuple[UnknownSpan, ...] = ()

    @property
    def adapter_name(self) -> str | None:
        return None if self.adapter is None else self.adapter.name

    @property
    def adapter_slot(self) -> int:
        """The adapter's slot, -1 without one."""
        return -1 if self.adapter is None else self.adapter.slot


class TermsReader:
    """Checks what a caller says about texts, and gives each its terms.

    Parameters
    ----------
    model : NllbModel
    tokenizer : Tokenizer
    """

    def __init__(self, model: NllbModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def read(
        self, count: int, source: Languages, target: Languages, prefix: OneOrEach = None, adapter: OneOrEach = None
    ) -> list[Terms]:
        """Return the terms of ``count`` texts.

        Raises
        ------
        UnknownLanguage, InvalidInput
            When a value is wrong, no adapter of that name is resident, or there is not one for each text.
        """
        sources = self._languages("source", source, count, self._model.languages.source)
        targets = self._languages("target", target, count, self._model.languages.target)
        prefixes = self._prefixes(prefix, count)
        adapters = self._adapters(adapter, count)
        each = zip(sources, targets, prefixes, adapters, strict=True)
        return [Terms(source, target, ids, one, unknown) for source, target, (ids, unknown), one in each]

    def _languages(self, argument: str, given: Languages, count: int, default: int | None) -> list[str]:
        if given is None:
            if default is None:
                raise InvalidInput(argument, f"a language code here, or as {argument}= where the model is loaded", None)
            return [self._tokenizer.language_code(default)] * count
        codes = _each(argument, given, count, "code", "a language code")
        return [self._tokenizer.language_code(self._tokenizer.language_id(code, argument)) for code in codes]

    def _prefixes(self, given: OneOrEach, count: int) -> list[Prefix]:
        if given is None:
            return [_NO_PREFIX] * count
        if isinstance(given, str):
            return [self._prefix("target_prefix", given)] * count
        texts = _each("target_prefix", given, count, "text", "a text")
        return [
            _NO_PREFIX if text is None else self._prefix(f"target_prefix[{index}]", text)
            for index, text in enumerate(texts)
        ]

    def _prefix(self, argument: str, text: str) -> Prefix:
        try:
            ids = tuple(self._tokenizer.encode(text))
        except InvalidInput as error:
            raise InvalidInput(argument, error.expected, error.got) from None
        return ids, unknown_in(self._tokenizer, text, ids, "target")

    def _adapters(self, given: OneOrEach, count: int) -> list[Adapter | None]:
        if given is None:
            return [None] * count
        names = _each("adapter", given, count, "name", "an adapter's name")
        with self._model.exclusive():
            resident = {
                name: Adapter(name, slot, self._model.adapter_id_for(slot))
                for name, slot in self._model.adapters().items()
            }
        for name in names:
            if name is not None and (not isinstance(name, str) or name not in resident):
                among = f"one of {', '.join(resident)}" if resident else "None, as no adapter is loaded"
                raise InvalidInput("adapter", among, told(name))
        return [None if name is None else resident[name] for name in names]


def _each(argument: str, given: str | Iterable[T], count: int, unit: str, one: str) -> list[T]:
    """Return ``count`` values: the one that is given, or those that are."""
    if isinstance(given, str):
        return [given] * count  # type: ignore[list-item]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InvalidInput(argument, f"{one}, or one for each text", told(given))
    values = list(given)
    if len(values) != count:
        texts = f"one {unit}" if count == 1 else f"one {unit} for each of {count} texts"
        raise InvalidInput(argument, texts, f"{len(values)} {unit}s")
    return values
