# SPDX-License-Identifier: MIT OR Apache-2.0
"""Values from a JSON file that somebody may have changed: each is what it has to be, or a ValueError says where not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from metrale.errors import told

_NAMES: Final[Mapping[type, str]] = {dict: "an object", list: "a list", str: "a string"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        When it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("expected a JSON object, got one that is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {told(found)}")
    return found


def require(place: str, value: object, kind: type) -> Any:
    """Return a value of type dict, list or str."""
    if not isinstance(value, kind):
        raise ValueError(f"{place}: expected {_NAMES[kind]}, got {told(value)}")
    return value


def require_number(place: str, value: object, least: float = 0) -> None:
    """Refuse what is no finite number of at least so much."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < least:  # type: ignore[operator]
        raise ValueError(f"{place}: expected a number of at least {least:g}, got {told(value)}")


def require_times(place: str, value: object, keys: Sequence[str] = ("median", "min", "max")) -> None:
    """Refuse what is no set of milliseconds. A difference of two noisy times may be below 0."""
    times = require(place, value, dict)
    for key in keys:
        require_number(f"{place}.{key}", times.get(key), least=-math.inf)
