# SPDX-License-Identifier: MIT OR Apache-2.0
"""Changes of inputs that keep what a reader looks at first: JSON stays JSON, and most values are what readers know."""

from __future__ import annotations

import json
import random
from typing import Any, Final

NASTY: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        16,
        255,
        256,
        65535,
        1 << 31,
        (1 << 31) - 1,
        1 << 32,
        1 << 63,
        (1 << 64) - 1,
    ),
    *(
        1 << 64,
        -(1 << 63),
        10**30,
        10**400,
        0.0,
        -0.0,
        1.5,
        -1.5,
        1e-300,
        1e300,
        "",
        "x",
        "\0",
        "\ud800",
        "é",
        "<s>",
        "F32",
        "BF16",
    ),
    *(
        "never",
        "m2m_100",
        "../x",
        "/etc/passwd",
        "x" * 5000,
        [],
        {},
        [[]],
        [{}],
        {"": {}},
        [1, 2],
        ["a"],
        [[1], [2]],
        {"a": 1},
    ),
)
"""Values that readers like least."""


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return some bytes flipped, cut, doubled, or put in the place of others."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            case 1 if found:
                found[at % len(found)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
            case 2:
                del found[at : at + draw.choice((1, 2, 8, 64))]
            case 3:
                found[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
            case 4:
                size = draw.choice((1, 4, 16, 64))
                source = draw.randrange(len(found) + 1)
                found[at:at] = found[source : source + size]
            case _:
                del found[at if draw.random() < 0.1 else len(found) :]
    return bytes(found)


def changed_json(text: bytes, draw: random.Random) -> bytes:
    """Return JSON with some of its values changed; other bytes when it is none."""
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return changed_bytes(text, draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = changed_value(value, draw)
    try:
        found = json.dumps(value).encode()
    except (ValueError, RecursionError):
        return text
    return changed_bytes(found, draw) if draw.random() < 0.15 else found


def changed_value(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """Return a JSON value of which one part is another one."""
    if isinstance(value, dict) and value and (depth == 0 or draw.random() < 0.8):
        key = draw.choice(list(value))
        found = dict(value)
        match draw.randrange(8):
            case 0:
                del found[key]
            case 1:
                found[draw.choice(("x", "", "\0", f"{key}x", key[:-1]))] = found[key]
            case 2:
                found[draw.choice(list(value))] = found[key]
            case _:
                found[key] = changed_value(found[key], draw, depth + 1)
        return found
    if isinstance(value, list) and value and draw.random() < 0.8:
        items, at = list(value), draw.randrange(len(value))
        match draw.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, draw.choice(NASTY))
            case 2:
                items[at:at] = items[:1]
            case _:
                items[at] = changed_value(items[at], draw, depth + 1)
        return items
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice((-1, 1, -value, value, 1 << 31, -(1 << 63), 4, -4))
    if isinstance(value, str) and draw.random() < 0.4:
        return changed_bytes(value.encode("utf-8", "surrogatepass"), draw).decode("utf-8", "replace")
    return draw.choice(NASTY)
