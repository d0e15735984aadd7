# SPDX-License-Identifier: MIT OR Apache-2.0
"""Other systems' results on the same cases, from the JSON that `benchmarks.peers` (or `benchmarks.gpu_speed`) wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metrale.bench.json_values import read_object, require, require_number, require_times


def read(path: Path) -> dict[str, Any]:
    """Return what a file of peers' results holds.

    Raises
    ------
    OSError
        When it cannot be read.
    ValueError
        When it holds something else.
    """
    found = read_object(path)
    protocol = require("protocol", found.get("protocol"), dict)
    protocol.setdefault("beams", 0)  # a file from before beam search was measured
    for key in ("source_tokens", "new_tokens", "beams"):
        require_number(f"protocol.{key}", protocol.get(key))
    require("protocol.dtype", protocol.get("dtype"), str)
    for peer, result in require("peers", found.get("peers"), dict).items():
        _check_result(f"peers.{peer}", result)
    return found


def _check_result(place: str, result: object) -> None:
    entry = require(place, result, dict)
    for key, kind in (("versions", dict), ("shapes", dict), ("errors", list)):
        require(f"{place}.{key}", entry.get(key), kind)
    for name, shape in entry["shapes"].items():
        where = f"{place}.shapes.{name}"
        check = require(where, shape, dict).get("check")
        if check is not None:
            require(f"{where}.check", check, dict)
        for part in ("cases", "beams"):
            for batch, case in require(f"{where}.{part}", shape.get(part, {}), dict).items():
                _check_times(f"{where}.{part}.{batch}", case)


def _check_times(place: str, case: object) -> None:
    entry = require(place, case, dict)
    require_times(f"{place}.total_ms", entry.get("total_ms"))
    if entry.get("step_ms") is not None:
        require_times(f"{place}.step_ms", entry["step_ms"])


def attach(report: dict[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Put peers' results beside the cases of a report that they belong to.

    Parameters
    ----------
    report : dict
        As `metrale.bench.report` has it; changed.
    found : mapping
        What `read` returned.

    Returns
    -------
    list of str
        What a reader of the report should know: another type, an error, a check that failed, nothing that fits.
    """
    notes = []
    name, protocol = report["model"]["name"], found["protocol"]
    if protocol["dtype"] != report["dtype"]:
        notes.append(f"the peers computed in {protocol['dtype']}, and this run in {report['dtype']}")
    for peer, result in found["peers"].items():
        notes += [f"{peer}: {error}" for error in result["errors"]]
        shape = result["shapes"].get(name)
        if shape is None:
            notes.append(f"{peer}: there is nothing of {name}, but of {', '.join(result['shapes']) or 'no model'}")
            continue
        check = shape.get("check")
        if check is None or check.get("passed") is not True:
            notes.append(f"{peer}: its results were not compared with ours, or differ: {check}")
        report["peers"][peer] = {"versions": result["versions"], "check": check}
        pairs = list(_matched(report, shape, protocol))
        for case, theirs in pairs:
            case["peers"][peer] = _beside(case, theirs)
        if not pairs:
            notes.append(f"{peer}: none of its cases is one of this run")
    return notes


def _matched(
    report: Mapping[str, Any], shape: Mapping[str, Any], protocol: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield each case of the report that was timed and that the peer has, and the peer's."""
    for case in report["cases"]:
        same = all(case[key] == protocol[key] for key in ("source_tokens", "new_tokens"))
        theirs = None
        if case["beams"] == 1:
            theirs = shape.get("cases", {}).get(str(case["batch"]))
        elif case["beams"] == protocol["beams"]:
            theirs = shape.get("beams", {}).get(str(case["batch"]))
        if same and theirs is not None and case["total_ms"] is not None:
            yield case, theirs


def _beside(case: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a peer's figures, and how many times as long as ours they are: of a step, or of a call without any."""
    key = "step_ms" if case["step_ms"] and theirs.get("step_ms") else "total_ms"
    return {
        "step_ms": _best(theirs.get("step_ms")),
        "total_ms": _best(theirs["total_ms"]),
        "tokens_per_s": theirs.get("tokens_per_s"),
        "ratio_best": _ratio(theirs[key]["min"], case[key]["min"]),
        "ratio_median": _ratio(theirs[key]["median"], case[key]["median"]),
    }


def _ratio(theirs: float, ours: float) -> float | None:
    """Return how many times as long theirs is; None where noise left no time of ours."""
    return round(theirs / ours, 3) if ours > 0 else None


def _best(spread: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if spread is None else {"best": spread["min"], "median": spread["median"], "n": spread.get("n")}
