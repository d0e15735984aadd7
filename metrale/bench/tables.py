# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns aligned; all but the first are numbers."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *rows]
    return "\n".join(
        f"| {' | '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])} |" for line in lines
    )


def number(value: float | None) -> str:
    """Return a figure with three significant digits, or as a whole number; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ranged(values: Mapping[str, float] | None) -> str:
    """Return ``median [least..most]``."""
    if values is None:
        return "-"
    return f"{number(values['median'])} [{number(values['min'])}..{number(values['max'])}]"


def median(values: Mapping[str, float] | None) -> float | None:
    return None if values is None else values["median"]


PEER_NAMES = {"ctranslate2": "CTranslate2", "transformers": "transformers"}
"""How other systems are written, by their names in a report."""


def cases_table(report: Mapping[str, Any]) -> str:
    """Return the table of a report of `metrale.bench.report`: a line for each case, and two columns for each peer."""
    peers = [name for name in PEER_NAMES if any(name in case["peers"] for case in report["cases"])]
    rows = [[case_label(case), *_figures(case), *_beside(case, peers)] for case in report["cases"]]
    header = ["ms per step", "metrale", "device alone", "host enqueues", "floor", "/ floor", "whole call", "tokens/s"]
    for name in peers:
        header += [f"{PEER_NAMES[name]}, best (median)", "/ metrale"]
    return table(header, rows)


def case_label(case: Mapping[str, Any]) -> str:
    """Return a case in words."""
    how = "greedy" if case["beams"] == 1 else f"{case['beams']} beams"
    return f"batch {case['batch']}, {how}, {case['source_tokens']} to {case['new_tokens']} tokens"


def launches_table(part: Mapping[str, Any], key: str = "ops") -> str:
    """Return where the time of a pass goes, from a `metrale.bench.breakdown.summary`.

    ``key`` is "ops", the kinds of launches, what takes longest first; or "parts", those of a layer, in their order.
    """
    lines = part[key]
    if key == "ops":
        lines = sorted(lines, key=lambda row: -row["us"] * row["calls"])
    rows = [
        [
            *([row["op"], str(row["rows"])] if key == "ops" else [row["part"]]),
            str(row["calls"]),
            number(row["us"]),
            number(row["us"] * row["calls"]),
            number(row["floor_us"]),
            number(row["ratio"]),
            number((row["weight_bytes"] + row["activation_bytes"] + row["kv_bytes"]) / 1e6),
            number(row["flop"] / 1e9),
        ]
        for row in lines
    ]
    first = ["op", "rows"] if key == "ops" else ["part"]
    header = [*first, "calls", "us each", "us in all", "floor us", "ratio", "MB each", "GFLOP each"]
    sums = (
        f"{part['launches']} launches; sum of ops {number(part['sum_of_ops_ms'])} ms, as one graph "
        f"{number(part['graph_ms'])} ms, sum of floors {number(part['floor_ms'])} ms."
    )
    return f"{table(header, rows)}\n\n{sums}"


def layers_tables(report: Mapping[str, Any]) -> str:
    """Return a table of the parts of a step for each case that has them; empty for none."""
    return "\n\n".join(
        f"{case_label(case)}: a step half way\n\n{launches_table(case['layers'], 'parts')}"
        for case in report["cases"]
        if case["layers"] is not None
    )


def _figures(case: Mapping[str, Any]) -> list[str]:
    if case["total_ms"] is None:
        return ["not timed", *6 * ["-"]]
    return [
        ranged(case["step_ms"]),
        ranged(case["device_step_ms"]),
        number(median(case["host_enqueue_ms"])),
        number(case["floor_ms"]),
        number(case["ratio_to_floor"]),
        number(median(case["total_ms"])),
        number(case["tokens_per_s"]),
    ]


def _beside(case: Mapping[str, Any], peers: Sequence[str]) -> list[str]:
    cells = []
    for name in peers:
        theirs = case["peers"].get(name)
        step = theirs.get("step_ms") if theirs else None
        cells.append(f"{number(step['best'])} ({number(step['median'])})" if step else "-")
        cells.append(f"{number(theirs.get('ratio_best'))} ({number(theirs.get('ratio_median'))})" if theirs else "-")
    return cells
