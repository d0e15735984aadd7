# SPDX-License-Identifier: MIT OR Apache-2.0
"""What may be prefilled and decoded: every rule that is checked on the host before anything is enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from metrale.checks import flag, integer
from metrale.errors import InvalidInput, SequenceError, told
from metrale.model import PrefillSlice, ScoreReq, SequenceState
from metrale.nllb.adapter_slots import AdapterSlots
from metrale.nllb.checks import token_id, token_ids
from metrale.nllb.kv import Span
from metrale.nllb.limits import ModelShape
from metrale.nllb.sequences import SequenceTable
from metrale.nllb.slots import Batch, SlotColumns
from metrale.nllb.source import framed

PREFIX_LEN: Final = 2
"""Tokens that every prefill feeds to the decoder: the decoder start and the target language."""

FRAME_LEN: Final = 2
"""Tokens around a source: its language and EOS."""


def given_len(prompt_len: int) -> int:
    """Return how many of a prefilled sequence's first decoder tokens do not count as generated.

    As transformers has it: the start token alone, as the language token counts although it is given; but all of them,
    once the caller has given more than these two.
    """
    return 1 if prompt_len == PREFIX_LEN else prompt_len


@dataclass(frozen=True, slots=True)
class Languages:
    """The language ids that a sequence's 0 stands for; None when there is no default."""

    source: int | None = None
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prefill: the complete source, and the ids that the target begins with, all of them given."""

    seq: SequenceState
    span: Span
    source: tuple[int, ...]
    prefix: tuple[int, ...]


class Admission:
    """Turns what callers pass into prompts and spans, or refuses it.

    Parameters
    ----------
    shape : ModelShape
    languages : Languages
    table : SequenceTable
    adapters : AdapterSlots
    columns : SlotColumns
    legacy_order : bool
        See `framed`.
    """

    def __init__(
        self,
        shape: ModelShape,
        languages: Languages,
        table: SequenceTable,
        adapters: AdapterSlots,
        columns: SlotColumns,
        *,
        legacy_order: bool = False,
    ) -> None:
        self._shape = shape
        self._languages = languages
        self._table = table
        self._adapters = adapters
        self._columns = columns
        self._legacy_order = legacy_order

    def prompt(self, one: PrefillSlice, argument: str) -> Prompt:
        """Return the checked prompt of one slice; an error names ``argument``.

        Raises
        ------
        SequenceError
            When the sequence is not live.
        InvalidInput
            When the chunk is not the whole source, an id, a language or the length is out of range, or the sequence
            asks for an adapter that is not resident.
        """
        if not isinstance(one, PrefillSlice):
            raise InvalidInput(argument, "a PrefillSlice", one)
        span = self._table.span(one.seq)
        self._adapters.check(one.seq.adapter_slot)
        tokens = token_ids(argument, one.prompt_tokens, self._shape.vocab)
        start, length = (integer(f"{argument}: {name}", getattr(one, name), 0) for name in ("chunk_start", "chunk_len"))
        last = flag(f"{argument}: is_last_chunk", one.is_last_chunk)
        if (start, length, last) != (0, len(tokens), True):
            raise InvalidInput(
                f"{argument}: chunk",
                f"the whole source in one chunk (0, {len(tokens)}, last)",
                f"({told(start)}, {told(length)}, {'last' if last else 'not last'})",
            )
        source_language, target_language = self.language_ids(one.seq)
        eos = self._shape.config.eos_token_id[0]
        source = framed(source_language, tokens, eos, legacy_order=self._legacy_order)
        given = token_ids("prefix_tokens", one.seq.prefix_tokens, self._shape.vocab)
        prefix = (self._shape.config.generation.decoder_start_token_id, target_language, *given)
        if len(prefix) > self._shape.limits.target_positions:
            expected = f"at most {self._shape.limits.target_positions - PREFIX_LEN} ids"
            raise InvalidInput("prefix_tokens", expected, f"{len(given)} ids")
        most = min(self._shape.limits.max_source_len, self._source_room(span, len(prefix)))
        if len(source) > most:
            after = f", with {len(given)} ids of the target after it" if given else ""
            expected = f"at most {max(most - FRAME_LEN, 0)} ids (with language and EOS {most}){after}"
            raise InvalidInput(argument, expected, f"{len(tokens)} ids")
        return Prompt(one.seq, span, source, prefix)

    @staticmethod
    def _source_room(span: Span, prefix: int) -> int:
        """Return how many source tokens a span has room for, before the targets that begin with ``prefix`` tokens."""
        if not span.beam_positions:
            return span.positions - prefix
        if prefix > span.beam_positions:
            expected = f"at most {span.beam_positions - PREFIX_LEN} ids, as alloc_beams was told"
            raise InvalidInput("prefix_tokens", expected, f"{prefix - PREFIX_LEN} ids")
        return span.positions - len(span.slots) * span.beam_positions

    def language_ids(self, asked: SequenceState | ScoreReq) -> tuple[int, int]:
        """Return the checked languages of a source and its target. `InvalidInput` when there is none."""
        return (
            self._language("src_lang_id", asked.src_lang_id, self._languages.source, "source"),
            self._language("tgt_lang_id", asked.tgt_lang_id, self._languages.target, "target"),
        )

    def _language(self, argument: str, given: int, default: int | None, keyword: str) -> int:
        language = token_id(argument, given, self._shape.vocab)
        if language:
            return language
        if default is None:
            raise InvalidInput(argument, f"a language id, since load() was given no default {keyword}=", 0)
        return default

    def decodable(self, seqs: Sequence[SequenceState]) -> Batch:
        """Return different sequences that can each take another token. Raises as `_decodable`, for the first.

        `InvalidInput` also when one is there twice. A step has many sequences, and next to none that is refused: all
        are looked at together, and one by one to find out which is at fault.
        """
        batch = self._table.batch(seqs)
        if batch is not None:
            adapters = [seq.adapter_slot for seq in seqs]
            fits = (batch.lengths > 0) & (batch.lengths < self._columns.room[batch.slots])
            if (
                fits.all()
                and {*map(type, adapters)} == {int}
                and adapters == self._columns.adapters[batch.slots].tolist()
            ):
                if max(adapters) >= 0:
                    self._adapters.note_used(adapters)
                return batch
        self.check_distinct(seqs, "seqs")
        for seq in seqs:
            self._decodable(seq)
        return Batch.of(seqs)

    def _decodable(self, seq: SequenceState) -> None:
        """Refuse a sequence that cannot take another token.

        Raises
        ------
        SequenceError
            When it is not live, has not been prefilled, or is full.
        InvalidInput
            When it asks for another adapter than at its prefill, whose keys and values it has.
        """
        span = self.prefilled("decode", seq)
        if seq.adapter_slot != span.adapter:
            expected = f"{span.adapter}, with which the sequence in slot {seq.slot_idx} was prefilled"
            raise InvalidInput("adapter_slot", expected, seq.adapter_slot)
        self._adapters.check(seq.adapter_slot)
        most = self.target_positions(span)
        if seq.seq_len == most:
            raise SequenceError(f"decode: the sequence in slot {seq.slot_idx} is full: it has {most} decoder positions")

    def all_prefilled(self, call: str, seqs: Sequence[SequenceState]) -> Batch:
        """Return different sequences with keys and values. Raises as `prefilled` and `check_distinct` do."""
        batch = self._table.batch(seqs)
        if batch is not None and bool(((batch.lengths > 0) & (batch.lengths <= self._columns.room[batch.slots])).all()):
            return batch
        for seq in seqs:
            self.prefilled(call, seq)
        self.check_distinct(seqs, "seqs")
        return Batch.of(seqs)

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
        most = self.target_positions(span)
        if seq.seq_len > most:
            what = f"the sequence in slot {seq.slot_idx}"
            raise SequenceError(f"{call}: {what} has {most} decoder positions, and a seq_len of {seq.seq_len}")
        return span

    def target_positions(self, span: Span) -> int:
        """Return how many decoder positions a prefilled sequence has, or each of its beams."""
        return min(self._shape.limits.target_positions, span.target_room)

    @staticmethod
    def check_distinct(seqs: Sequence[SequenceState], argument: str) -> None:
        """Refuse a batch that names a sequence twice."""
        if len({id(seq) for seq in seqs}) < len(seqs):
            raise InvalidInput(argument, "different sequences", "one of them twice")
