# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sequence as bytes: a line of JSON that says what it is, then the keys and values that it has written.

The bytes fit any model of the same KV layout with room for the sequence, and are checked before anything changes.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from metrale.checks import integer
from metrale.errors import InvalidInput
from metrale.nllb.checks import token_ids
from metrale.nllb.limits import ModelShape

_FORMAT: Final = "metrale sequence 1"
_MOST_HEADER: Final = 1 << 20
_SAME: Final = ("format", "dtype", "d_model", "decoder_layers", "vocab")


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """What a sequence is, apart from its slot.

    Attributes
    ----------
    tokens : list of int
        Ids that its decoder has consumed.
    prompt_len, src_lang_id, tgt_lang_id : int
    source_len : int
        Source positions in ``kv``; the target's follow, one for each of ``tokens``.
    kv : bytes
    """

    tokens: list[int]
    prompt_len: int
    src_lang_id: int
    tgt_lang_id: int
    source_len: int
    kv: bytes

    def write(self, shape: ModelShape, writer: BinaryIO) -> None:
        """Write it to a binary stream."""
        header = {
            **_layout(shape),
            "tokens": self.tokens,
            "prompt_len": self.prompt_len,
            "src_lang_id": self.src_lang_id,
            "tgt_lang_id": self.tgt_lang_id,
            "source_len": self.source_len,
            "crc32": zlib.crc32(self.kv),
        }
        writer.write(json.dumps(header, separators=(",", ":")).encode() + b"\n")
        writer.write(self.kv)

    @classmethod
    def read(cls, shape: ModelShape, reader: BinaryIO) -> SavedSequence:
        """Read what `write` wrote, and no byte more.

        Raises
        ------
        InvalidInput
            When it is not a saved sequence, is cut or damaged, or belongs to a model of another layout.
        """
        header = _read_header(reader)
        layout = _layout(shape)
        for name in _SAME:
            if header.get(name) != layout[name]:
                raise InvalidInput(f"reader: {name}", repr(layout[name]), repr(header.get(name))[:80])
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= shape.limits.target_positions:
            most = shape.limits.target_positions
            raise InvalidInput("reader: tokens", f"1 to {most} decoder ids", repr(tokens)[:80])
        source_len = integer("reader: source_len", header.get("source_len"), 1, shape.limits.max_source_len)
        size = (source_len + len(tokens)) * shape.position_bytes
        saved = cls(
            tokens=token_ids("reader: tokens", tokens, shape.vocab),
            prompt_len=integer("reader: prompt_len", header.get("prompt_len"), 1, len(tokens)),
            src_lang_id=integer("reader: src_lang_id", header.get("src_lang_id"), 0, shape.vocab - 1),
            tgt_lang_id=integer("reader: tgt_lang_id", header.get("tgt_lang_id"), 0, shape.vocab - 1),
            source_len=source_len,
            kv=_read_exactly(reader, size),
        )
        if zlib.crc32(saved.kv) != header.get("crc32"):
            raise InvalidInput("reader", "keys and values that are as they were written", "damaged bytes")
        return saved


def _layout(shape: ModelShape) -> dict[str, Any]:
    config = shape.config
    values = (_FORMAT, shape.dtype, config.d_model, config.decoder_layers, shape.vocab)
    return dict(zip(_SAME, values, strict=True))


def _read_header(reader: BinaryIO) -> dict[str, Any]:
    if not callable(getattr(reader, "readline", None)):
        raise InvalidInput("reader", "an open binary file", reader)
    line = reader.readline(_MOST_HEADER)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not line.endswith(b"\n"):
        raise InvalidInput("reader", "what save_sequence_state wrote", repr(line[:40]))
    return header


def _read_exactly(reader: BinaryIO, size: int) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing:
        part = reader.read(missing)
        if not part:
            raise InvalidInput("reader", f"{size:,} bytes of keys and values", f"{size - missing:,} bytes")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
