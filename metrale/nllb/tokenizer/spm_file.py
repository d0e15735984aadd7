# SPDX-License-Identifier: MIT OR Apache-2.0
"""The file ``sentencepiece.bpe.model``: read whole or refused."""

from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor

from metrale.checkpoint import read_file
from metrale.errors import CheckpointError

MODEL_FILE = "sentencepiece.bpe.model"
MAX_MODEL_BYTES = 256 << 20

HEAD_PIECES = ("<unk>", "<s>", "</s>")
"""The first pieces of the model."""

OFFSET = 1
"""SentencePiece has three special pieces, NLLB four special tokens: its pieces move up by one."""


def load_model(path: Path) -> tuple[SentencePieceProcessor, list[str]]:
    """Return the processor and every piece's text, or raise CheckpointError."""
    data = read_file(path, MAX_MODEL_BYTES, "a SentencePiece model")
    if not data:
        raise CheckpointError(path, "is an empty file, expected a SentencePiece model")
    try:
        processor = SentencePieceProcessor(model_proto=data)
        numbers = list(range(len(processor)))
        pieces: list[str] = processor.id_to_piece(numbers)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"is not a whole SentencePiece model: {error}") from error
    if not _has_specs(data):
        raise CheckpointError(path, "is not a whole SentencePiece model: it ends before its last parts")
    if tuple(pieces[: len(HEAD_PIECES)]) != HEAD_PIECES:
        head = ", ".join(pieces[: len(HEAD_PIECES)])
        raise CheckpointError(path, f"expected the first pieces {', '.join(HEAD_PIECES)}, got {head}")
    if any(processor.is_byte(numbers)):
        raise CheckpointError(path, "has byte pieces, which the tokenizers of this family do not have")
    return processor, pieces


def _has_specs(data: bytes) -> bool:
    """Whether a ModelProto that parses has its trainer_spec (field 2) and normalizer_spec (field 3) too.

    A file cut between two pieces still parses; the specs come after all pieces. Without them, SentencePiece would take
    another algorithm and no normalisation, and every id from the languages on would be wrong.
    """
    seen: set[int] = set()
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 != 2:  # every field of ModelProto is a length-delimited message
            break
        seen.add(tag >> 3)
        size, position = _varint(data, position)
        position += size
    return {2, 3} <= seen


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
