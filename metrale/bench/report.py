# SPDX-License-Identifier: MIT OR Apache-2.0
"""A run as JSON: what it holds, and how it is written and read again.

docs/bench.md lists the keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from metrale.bench.cases import COLUMNS
from metrale.bench.json_values import read_object, require, require_number, require_times
from metrale.errors import told

NAME: Final = "metrale bench"
FORMAT: Final = 1
"""Changes when a key changes its meaning."""

NOT_TIMED: Final = {
    "step_ms": None,
    "total_ms": None,
    "one_token_ms": None,
    "first_call_ms": None,
    "tokens_per_s": None,
    "device_step_ms": None,
    "host_enqueue_ms": None,
    "floor_ms": None,
    "ratio_to_floor": None,
    "device_ratio_to_floor": None,
}
"""The figures of a case that was not timed."""

NOT_MEASURED: Final = {"engine_busy": None, "layers": None}
"""What a case need not have: reports of before have none of it."""

_KEYS: Final[Mapping[str, type]] = {
    "model": dict,
    "dtype": str,
    "axis": str,
    "device": dict,
    "cases": list,
    "problems": list,
    "peers": dict,
}
_TIMES: Final = ("step_ms", "total_ms", "one_token_ms", "device_step_ms", "host_enqueue_ms")
_LAUNCH_SUMS: Final = ("launches", "sum_of_ops_ms", "graph_ms", "floor_ms")
_LAUNCH_FIGURES: Final = ("calls", "us", "floor_us", "ratio", "weight_bytes", "activation_bytes", "kv_bytes", "flop")
_COUNTS: Final = ("batch", "beams", "source_tokens", "new_tokens")


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
        raise ValueError(f"expected a report of {NAME}, got one of {told(found.get('benchmark'))}")
    if found.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {told(found.get('format'))}")
    for key, kind in _KEYS.items():
        require(key, found.get(key), kind)
    require("model.name", found["model"].get("name"), str)
    if found["axis"] not in COLUMNS:
        raise ValueError(f"axis: expected one of {', '.join(COLUMNS)}, got {told(found['axis'])}")
    for index, case in enumerate(found["cases"]):
        _check_case(f"cases[{index}]", case)
        found["cases"][index] = {**NOT_MEASURED, **case}
    return found


def _check_case(place: str, case: object) -> None:
    """Refuse, with ValueError, what a table or a chart could not show."""
    entry = require(place, case, dict)
    for key in _COUNTS:
        require_number(f"{place}.{key}", entry.get(key), least=1)
    require(f"{place}.peers", entry.get("peers"), dict)
    for key in NOT_TIMED:
        if key not in entry:
            raise ValueError(f"{place}.{key}: expected it to be there")
        if entry[key] is not None and key in _TIMES:
            require_times(f"{place}.{key}", entry[key])
        elif entry[key] is not None:
            require_number(f"{place}.{key}", entry[key])
    if entry.get("layers") is not None:
        _check_layers(f"{place}.layers", entry["layers"])
    for peer, theirs in entry["peers"].items():
        for key in ("step_ms", "total_ms"):
            times = require(f"{place}.peers.{peer}", theirs, dict).get(key)
            if times is not None:
                require_times(f"{place}.peers.{peer}.{key}", times, ("best", "median"))
        for key in ("ratio_best", "ratio_median"):
            if theirs.get(key) is not None:
                require_number(f"{place}.peers.{peer}.{key}", theirs[key], least=-math.inf)


def _check_layers(place: str, layers: object) -> None:
    entry = require(place, layers, dict)
    for key in _LAUNCH_SUMS:
        require_number(f"{place}.{key}", entry.get(key), least=-math.inf)
    for index, row in enumerate(require(f"{place}.parts", entry.get("parts"), list)):
        here = f"{place}.parts[{index}]"
        require(f"{here}.part", require(here, row, dict).get("part"), str)
        for key in _LAUNCH_FIGURES:
            require_number(f"{here}.{key}", row.get(key), least=-math.inf)
