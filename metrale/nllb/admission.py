# SPDX-License-Identifier: MIT OR Apache-2.0
"""What may be prefilled and decoded: every rule that is checked on the host before anything is enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.checks import token_id, token_ids
from metrale.nllb.kv import Span
from metrale.nllb.limits import ModelShape
from metrale.nllb.sequences import SequenceTable

PREFIX_LEN: Final = 2
"""Tokens that prefill feeds to the decoder: the decoder start and the target language."""

FRAME_LEN: Final = 2
"""Tokens around a source: its language before it and EOS after it."""


@dataclass(frozen=True, slots=True)
class Languages:
    """The language ids that a sequence's 0 stands for; None when there is no default."""

    source: int | None = None
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prefill: the complete source, and the language that the target begins with."""

    seq: SequenceState
    span: Span
    source: tuple[int, ...]
    target: int


class Admission:
    """Turns what callers pass into prompts and spans, or refuses it.

    Parameters
    ----------
    model : str
        The model's name, for refusals.
    shape : ModelShape
    languages : Languages
    table : SequenceTable
    """

    def __init__(self, model: str, shape: ModelShape, languages: Languages, table: SequenceTable) -> None:
        self._model = model
        self._shape = shape
        self._languages = languages
        self._table = table

    def prompt(self, one: PrefillSlice, argument: str) -> Prompt:
        """Return the checked prompt of one slice; an error names ``argument``.

        Raises
        ------
        SequenceError
            When the sequence is not live.
        NotSupported
            When the sequence asks for an adapter.
        InvalidInput
            When the chunk is not the whole source, or an id, a language or the length is out of range.
        """
        span = self._table.span(one.seq)
        self._check_adapter(one.seq)
        if one.chunk_start != 0 or not one.is_last_chunk or one.chunk_len != len(one.prompt_tokens):
            raise InvalidInput(
                f"{argument}: chunk",
                f"the whole source in one chunk (0, {len(one.prompt_tokens)}, last)",
                f"({one.chunk_start}, {one.chunk_len}, {'last' if one.is_last_chunk else 'not last'})",
            )
        tokens = token_ids(argument, one.prompt_tokens, self._shape.vocab)
        source_language = self._language("src_lang_id", one.seq.src_lang_id, self._languages.source, "source")
        target_language = self._language("tgt_lang_id", one.seq.tgt_lang_id, self._languages.target, "target")
        source = (source_language, *tokens, self._shape.config.eos_token_id[0])
        most = min(self._shape.limits.max_source_len, span.positions - PREFIX_LEN)
        if len(source) > most:
            expected = f"at most {most - FRAME_LEN} ids (with language and EOS {most})"
            raise InvalidInput(argument, expected, f"{len(tokens)} ids")
        return Prompt(one.seq, span, source, target_language)

    def _language(self, argument: str, given: int, default: int | None, keyword: str) -> int:
        language = token_id(argument, given, self._shape.vocab)
        if language:
            return language
        if default is None:
            raise InvalidInput(argument, f"a language id, since load() was given no default {keyword}=", 0)
        return default

    def decodable(self, seq: SequenceState) -> Span:
        """Return the span of a sequence that can take another token.

        Raises
        ------
        SequenceError
            When it is not live, has not been prefilled, or is full.
        NotSupported
            When it asks for an adapter.
        """
        span = self.prefilled("decode", seq)
        self._check_adapter(seq)
        most = self._target_positions(span)
        if seq.seq_len == most:
            raise SequenceError(f"decode: the sequence in slot {seq.slot_idx} is full: it has {most} decoder positions")
        return span

    def prefilled(self, call: str, seq: SequenceState) -> Span:
        """Return the span of a sequence that has keys and values; an error names ``call``.

        Raises
        ------
        SequenceError
            When it is not live or has not been prefilled, or when its ``seq_len``, which callers of fed steps advance
            by themselves, is more than it has positions.
        """
        span = self._table.span(seq)
        if not span.source_len or seq.seq_len < 1:
            raise SequenceError(f"{call}: the sequence in slot {seq.slot_idx} has not been prefilled")
        most = self._target_positions(span)
        if seq.seq_len > most:
            what = f"the sequence in slot {seq.slot_idx}"
            raise SequenceError(f"{call}: {what} has {most} decoder positions, and a seq_len of {seq.seq_len}")
        return span

    def _target_positions(self, span: Span) -> int:
        return min(self._shape.limits.target_positions, span.positions - span.source_len)

    def _check_adapter(self, seq: SequenceState) -> None:
        if seq.adapter_slot != -1:
            raise NotSupported(self._model, "adapter_slot", f"no adapter is in slot {seq.adapter_slot}")

    @staticmethod
    def check_distinct(seqs: Sequence[SequenceState], argument: str) -> None:
        """Refuse a batch that names a sequence twice."""
        if len({id(seq) for seq in seqs}) < len(seqs):
            raise InvalidInput(argument, "different sequences", "one of them twice")
