# SPDX-License-Identifier: MIT OR Apache-2.0
"""Subwords by SentencePiece, for the two families' ways from pieces to ids, and what of a text is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sentencepiece import SentencePieceProcessor

from metrale.nllb.tokenizer.layout import HEAD
from metrale.nllb.tokenizer.spm_file import OFFSET
from metrale.nllb.tokenizer.subwords import SPACE, Span, Subwords

_UNKNOWN = HEAD["<unk>"]


class SpmSubwords(Subwords, Protocol):
    """Subwords by SentencePiece.

    After loading, the processor is only read (its calls are const), and it releases the GIL while it encodes.
    """

    @property
    def processor(self) -> SentencePieceProcessor:
        """SentencePiece."""

    def piece(self, number: int) -> str:
        """Return the piece that has this id."""

    def text_of(self, pieces: list[str]) -> str:
        """Return the text of pieces."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NllbSubwords:
    """NLLB-200's subwords: piece i is id ``i + 1``, the unknown piece is ``<unk>``."""

    processor: SentencePieceProcessor

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return _moved(self.processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on several threads."""
        return [_moved(ids) for ids in self.processor.encode(list(texts))]

    def piece(self, number: int) -> str:
        """Return the piece that has this id."""
        return str(self.processor.id_to_piece(number - OFFSET))

    def text_of(self, pieces: list[str]) -> str:
        """Return the text of pieces."""
        # The space that SentencePiece puts before a text is none of the text's.
        return "".join([piece.replace(SPACE, "") for piece in pieces[:1]] + pieces[1:]).replace(SPACE, " ")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of pieces."""
        return self.text_of(self.processor.id_to_piece([number - OFFSET for number in ids]))

    def unknown_spans(self, text: str) -> Iterator[Span]:
        """Yield what of the text became ``<unk>``."""
        return unknown_pieces(self.processor, text, [not number for number in self.processor.encode(text)])


def _moved(ids: list[int]) -> list[int]:
    # Encoding gives no piece below 3 but 0, the unknown one; </s> in a text is made of ordinary pieces.
    return [number + OFFSET if number else _UNKNOWN for number in ids]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class M2mSubwords:
    """M2M-100's subwords: the text of each piece is looked up in ``vocab.json``.

    Attributes
    ----------
    processor : SentencePieceProcessor
    numbers : mapping of str to int
        The ids of pieces, without the special tokens: a run of unknown characters is a piece too, and may spell one.
    pieces : sequence of str
        The pieces by id, special tokens included.
    """

    processor: SentencePieceProcessor
    numbers: Mapping[str, int]
    pieces: Sequence[str]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._looked_up(self.processor.encode(text, out_type=str))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on several threads."""
        return [self._looked_up(pieces) for pieces in self.processor.encode(list(texts), out_type=str)]

    def _looked_up(self, pieces: list[str]) -> list[int]:
        return [self.numbers.get(piece, _UNKNOWN) for piece in pieces]

    def piece(self, number: int) -> str:
        """Return the piece that has this id."""
        return self.pieces[number]

    def text_of(self, pieces: list[str]) -> str:
        """Return the text of pieces; the spaces around it are left out, as transformers does for this family."""
        return str(self.processor.decode(pieces)).strip() if pieces else ""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of pieces."""
        return self.text_of([self.pieces[number] for number in ids])

    def unknown_spans(self, text: str) -> Iterator[Span]:
        """Yield what of the text became ``<unk>``."""
        return unknown_pieces(self.processor, text, [number == _UNKNOWN for number in self.encode(text)])


def unknown_pieces(processor: SentencePieceProcessor, text: str, unknown: Sequence[bool]) -> Iterator[Span]:
    """Yield the spans of a text that its unknown pieces came from.

    SentencePiece normalises a text first: one code point may become many, many one, some nothing, and a run of spaces
    one. The pieces are the normalised text, cut; of each of its code points SentencePiece says where in the text it
    began. A code point of which any part is unknown is unknown as a whole.

    Parameters
    ----------
    processor : SentencePieceProcessor
    text : str
    unknown : sequence of bool
        For each piece of the text whether it has become ``<unk>``.
    """
    if not any(unknown):
        return
    _, origins = processor.normalize(text, with_offsets=True)
    position = 0
    for piece, lost in zip(processor.encode(text, out_type=str), unknown, strict=True):
        start, position = position, position + len(piece)
        if lost:
            # The space in front of a word belongs to the mark of its beginning, unless it is all there is.
            word = start + len(piece) - len(piece.lstrip(SPACE))
            first = word if word < position else start
            stop = source_end(origins, position)
            while stop - 1 > origins[position - 1] and not processor.normalize(text[stop - 1]):
                stop -= 1  # what normalises to nothing counts to the code point in front of it
            yield origins[first], stop


def source_end(origins: Sequence[int], stop: int) -> int:
    """Return where in a text the code point ends that the one before ``stop`` of its normalised form came from."""
    last = origins[stop - 1]
    return next((origin for origin in origins[stop:] if origin > last), origins[-1])
