# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sequence as bytes: a line of JSON that says what it is, the keys and values that it has written, and a CRC of both.

The bytes fit any model of the same KV layout with room for the sequence, and are checked before anything changes.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from metrale.checks import integer
from metrale.errors import InvalidInput, told
from metrale.nllb.checks import token_ids
from metrale.nllb.limits import ModelShape

_FORMAT: Final = "metrale sequence 2"
_MOST_HEADER: Final = 1 << 20
_CHECKSUM_BYTES: Final = 4
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
    adapter : str or None
        Digest of the adapter that ``kv`` was made with.
    kv : bytes
    """

    tokens: list[int]
    prompt_len: int
    src_lang_id: int
    tgt_lang_id: int
    source_len: int
    adapter: str | None
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
            "adapter": self.adapter,
        }
        line = json.dumps(header, separators=(",", ":")).encode() + b"\n"
        for part in (line, self.kv, _checksum(line, self.kv)):
            _write_all(writer, part)

    @classmethod
    def read(cls, shape: ModelShape, reader: BinaryIO) -> SavedSequence:
        """Read what `write` wrote, and no byte more.

        Raises
        ------
        InvalidInput
            When it is not a saved sequence, is cut or damaged, or belongs to a model of another layout.
        """
        line, header = _read_header(reader)
        layout = _layout(shape)
        for name in _SAME:
            if header.get(name) != layout[name]:
                raise InvalidInput(f"reader: {name}", told(layout[name]), told(header.get(name)))
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= shape.limits.target_positions:
            most = shape.limits.target_positions
            raise InvalidInput("reader: tokens", f"1 to {most} decoder ids", told(tokens))
        source_len = integer("reader: source_len", header.get("source_len"), 1, shape.limits.max_source_len)
        size = (source_len + len(tokens)) * shape.position_bytes
        saved = cls(
            tokens=token_ids("reader: tokens", tokens, shape.vocab),
            prompt_len=integer("reader: prompt_len", header.get("prompt_len"), 1, len(tokens)),
            src_lang_id=integer("reader: src_lang_id", header.get("src_lang_id"), 0, shape.vocab - 1),
            tgt_lang_id=integer("reader: tgt_lang_id", header.get("tgt_lang_id"), 0, shape.vocab - 1),
            source_len=source_len,
            adapter=_adapter(header.get("adapter")),
            kv=_read_exactly(reader, size),
        )
        if _read_exactly(reader, _CHECKSUM_BYTES) != _checksum(line, saved.kv):
            raise InvalidInput("reader", "bytes that are as they were written", "damaged ones")
        return saved


def _adapter(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise InvalidInput("reader: adapter", "the digest of an adapter, or none", told(value))


def _layout(shape: ModelShape) -> dict[str, Any]:
    config = shape.config
    values = (_FORMAT, shape.dtype, config.d_model, config.decoder_layers, shape.vocab)
    return dict(zip(_SAME, values, strict=True))


def _checksum(line: bytes, kv: bytes) -> bytes:
    return zlib.crc32(kv, zlib.crc32(line)).to_bytes(_CHECKSUM_BYTES, "little")


def _write_all(writer: BinaryIO, data: bytes) -> None:
    """Write all of ``data``: a raw file may take a part of it at a time."""
    rest = memoryview(data)
    while rest:
        taken = writer.write(rest)
        if not isinstance(taken, int) or not 0 < taken <= len(rest):
            raise InvalidInput("writer", "an open binary file that takes what is written", writer)
        rest = rest[taken:]


def _read_header(reader: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    if not callable(getattr(reader, "readline", None)):
        raise InvalidInput("reader", "an open binary file", reader)
    line = reader.readline(_MOST_HEADER)
    if not isinstance(line, bytes):
        raise InvalidInput("reader", "an open binary file", reader)
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not line.endswith(b"\n"):
        raise InvalidInput("reader", "what save_sequence_state wrote", told(line[:40]))
    return line, header


def _read_exactly(reader: BinaryIO, size: int) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing:
        part = reader.read(missing)
        if not part or len(part) > missing:
            got = f"{size - missing + len(part or b''):,} bytes"
            raise InvalidInput("reader", f"{size:,} bytes more, after the ones before", got)
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
