# SPDX-License-Identifier: MIT OR Apache-2.0
"""SentencePiece models as the bytes of a protocol buffer, taken apart and put together without the library."""

from __future__ import annotations

from collections.abc import Iterator

Field = tuple[int, int, bytes]
"""Number, wire type and content of a field: of a length-delimited one without its length."""

PIECE, TRAINER, NORMALIZER = 1, 2, 3


def varint(value: int) -> bytes:
    """Return a number as protocol buffers have it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place behind it."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a sound message."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == 2:
            size, at = read_varint(data, at)
            end = at + size
        elif kind == 0:
            end = read_varint(data, at)[1]
        else:
            end = at + {1: 8, 5: 4}[kind]
        yield tag >> 3, kind, data[at:end]
        at = end


def message(parts: Iterator[Field] | list[Field]) -> bytes:
    """Return a message."""
    return b"".join(
        varint(number << 3 | kind) + (varint(len(content)) if kind == 2 else b"") + content
        for number, kind, content in parts
    )


def replaced(data: bytes, number: int, inner: int, content: bytes | None, kind: int = 2) -> bytes:
    """Return a message in whose field ``number`` the field ``inner`` is another one, or is not there."""
    found = []
    for one in fields(data):
        if one[0] == number:
            rest = [part for part in fields(one[2]) if part[0] != inner]
            found.append((number, 2, message([*rest, *([] if content is None else [(inner, kind, content)])])))
        else:
            found.append(one)
    return message(found)
