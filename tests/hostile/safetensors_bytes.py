# SPDX-License-Identifier: MIT OR Apache-2.0
"""The safetensors format by its description: a writer that writes anything, and a judge of what is one."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any, Final

BITS: Final = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
}
MOST_DIMENSIONS: Final = 32
MOST_BYTES: Final = (1 << 63) - 1
READ: Final = ("F64", "F32", "F16", "BF16")


def assembled(header: Any, data: bytes, length: int | None = None) -> bytes:
    """Return a file; ``header`` is text, or what becomes JSON, and ``length`` what is said of its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def taken_apart(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a sound file."""
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def contents(file: bytes) -> dict[str, str] | None:
    """Return what stands for every tensor of a file, or None when it is no safetensors file.

    A tensor of a dtype that can be read is its dtype, its shape and the SHA-256 of its bytes; any other one its dtype.
    """
    try:
        (length,) = struct.unpack("<Q", file[:8])
        if length > len(file) - 8:
            return None
        header, data = json.loads(file[8 : 8 + length].decode("utf-8")), file[8 + length :]
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # the library takes null for none
        if not all(isinstance(value, str) for value in metadata.values()):
            return None
        if any("\ud800" <= char <= "\udfff" for name in header for char in name):  # no UTF-8 has such a name
            return None
        position, found = 0, {}
        for name, info in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
            start, stop = info["data_offsets"]
            count = reach = 1
            for extent in info["shape"]:
                if type(extent) is not int or extent < 0:
                    return None
                count, reach = count * extent, reach * max(extent, 1)
            if len(info["shape"]) > MOST_DIMENSIONS or reach * BITS[info["dtype"]] // 8 > MOST_BYTES:
                return None  # NumPy has no such array, though it takes no bytes
            if start != position or stop - start != count * BITS[info["dtype"]] // 8:
                return None
            position = stop
            found[name] = described(info["dtype"], info["shape"], data[start:stop])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return None
    return found if position == len(data) else None


def described(dtype: str, shape: list[int], data: bytes) -> str:
    """Return what stands for a tensor."""
    read = f"{shape} {hashlib.sha256(data).hexdigest()}" if dtype in READ else ""
    return f"{dtype.lower()} {read}".strip()
