# SPDX-License-Identifier: MIT OR Apache-2.0
"""JSON files from outside: one object each, of bounded size, strict in what it accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, NoReturn

from metrale.checkpoint.paths import read_file
from metrale.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20

MAX_JSON_VALUES: Final = 4 << 20
"""Commas, colons and opened brackets of a file: three bytes of it can take a hundred as objects. The largest file of a
checkpoint, a tokenizer of 256,000 pieces with all their merges, has less than half as many."""


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Read a UTF-8 file that holds one JSON object.

    Parameters
    ----------
    path : Path
        The file.
    max_bytes : int
        The largest file, in bytes, that is read at all.

    Raises
    ------
    CheckpointError
        When the file is missing, too large, not UTF-8, not JSON, nested too deeply, not an object, has too many values
        or a key twice, or holds a number that is not finite.
    """
    data = read_file(path, max_bytes, "JSON")
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > MAX_JSON_VALUES:
        raise CheckpointError(path, f"is JSON with too many values: more than {MAX_JSON_VALUES} are not read")
    try:
        value: object = json.loads(
            data.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_twins,
        )
    except RecursionError:
        raise CheckpointError(path, "is JSON nested too deeply") from None
    except ValueError as error:  # also bad UTF-8, and integers of thousands of digits
        raise CheckpointError(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"holds a JSON {_json_type(value)}, expected an object")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Of two values for a key, other readers may take the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twin[:80]!r} is there twice")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "array" if isinstance(value, list) else "string" if isinstance(value, str) else "number"
