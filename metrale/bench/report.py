# SPDX-License-Identifier: MIT OR Apache-2.0
"""A run as JSON: what it holds, and how it is written and read again.

docs/bench.md lists the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from metrale.bench.cases import COLUMNS

NAME: Final = "metrale bench"
FORMAT: Final = 1
"""Changes when a key changes its meaning."""

NOT_TIMED: Final = {
    "step_ms": None,
    "total_ms": None,
    "one_token_ms": None,
    "tokens_per_s": None,
    "device_step_ms": None,
    "host_enqueue_ms": None,
    "floor_ms": None,
    "ratio_to_floor": None,
    "device_ratio_to_floor": None,
}
"""The figures of a case that was not timed."""

_KEYS: Final = ("model", "dtype", "axis", "cases", "problems", "peers")
_CASE_KEYS: Final = ("batch", "beams", "source_tokens", "new_tokens", "check", "peers", *NOT_TIMED)


def empty(
    model: Mapping[str, Any], axis: str, options: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a report without cases."""
    return {
        "benchmark": NAME,
        "format": FORMAT,
        "model": dict(model),
        "dtype": None,
        "axis": axis,
        "options": dict(options),
        "machine": dict(machine),
        "device": None,
        "floors": None,
        "cases": [],
        "peers": {},
        "problems": [],
    }


def to_text(report: Mapping[str, Any]) -> str:
    """Return a report as JSON."""
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write a report; a run that is killed while it does leaves the file as it was."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(to_text(report), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        When it holds something else.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


def load(path: Path) -> dict[str, Any]:
    """Return a report that `save` wrote.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        When it is none, or one of another format.
    """
    found = read_object(path)
    if found.get("benchmark") != NAME:
        raise ValueError(f"expected a report of {NAME}, got one of {found.get('benchmark')!r}")
    if found.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {found.get('format')!r}")
    missing = [key for key in _KEYS if key not in found]
    for index, case in enumerate(found.get("cases", [])):
        missing += [f"cases[{index}].{key}" for key in _CASE_KEYS if key not in case]
    if missing:
        raise ValueError(f"expected the keys of a report, and {', '.join(missing[:5])} is not there")
    if found["axis"] not in COLUMNS:
        raise ValueError(f"axis: expected one of {', '.join(COLUMNS)}, got {found['axis']!r}")
    return found
