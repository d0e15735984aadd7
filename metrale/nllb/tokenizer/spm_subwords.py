# SPDX-License-Identifier: MIT OR Apache-2.0
"""Subwords by SentencePiece: NLLB-200's, whose ids are the pieces' moved by one, and what of a text is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sentencepiece import SentencePieceProcessor

from metrale.nllb.tokenizer.layout import HEAD
from metrale.nllb.tokenizer.spm_file import OFFSET
from metrale.nllb.tokenizer.subwords import SPACE, Span


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NllbSubwords:
    """NLLB-200's subwords: piece i is id ``i + 1``, the unknown piece is ``<unk>``.

    After loading, the processor is only read (its calls are const), and it releases the GIL while it encodes.
    """

    processor: SentencePieceProcessor

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return _moved(self.processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on several threads."""
        return [_moved(ids) for ids in self.processor.encode(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of pieces."""
        pieces = self.processor.id_to_piece([number - OFFSET for number in ids])
        if pieces:
            # The space that SentencePiece puts before a text is none of the text's.
            pieces[0] = pieces[0].replace(SPACE, "")
        return "".join(pieces).replace(SPACE, " ")

    def unknown_spans(self, text: str) -> Iterator[Span]:
        """Yield what of the text became ``<unk>``."""
        unknown = [not number for number in self.processor.encode(text)]
        return unknown_pieces(self.processor, text, unknown)


def _moved(ids: list[int]) -> list[int]:
    # Encoding gives no piece below 3 but 0, the unknown one; </s> in a text is made of ordinary pieces.
    return [number + OFFSET if number else HEAD["<unk>"] for number in ids]


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
            last = origins[position - 1]
            stop = next((origin for origin in origins[position:] if origin > last), len(text))
            yield origins[first], _without_dropped(processor, text, last, stop)


def _without_dropped(processor: SentencePieceProcessor, text: str, last: int, stop: int) -> int:
    """Return the end of an unknown code point's origin ``[last, stop)``, less what normalises to nothing behind it."""
    while stop - 1 > last and not processor.normalize(text[stop - 1]):
        stop -= 1
    return stop
