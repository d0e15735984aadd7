# SPDX-License-Identifier: MIT OR Apache-2.0
"""A chart of a report: milliseconds against what was swept, beside the floor and the best of other systems.

It is drawn by matplotlib, which the extra ``bench`` brings; nothing else here needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from metrale.bench.cases import COLUMNS
from metrale.bench.tables import PEER_NAMES

PANELS: Final = {"step_ms": "ms per step", "total_ms": "ms of the whole call"}
_AXES: Final = {"batch": "batch size", "source": "source tokens", "produced": "tokens put out"}
_FIXED: Final = {"beams": "{} beams", "batch": "batch {}", "source_tokens": "{} source tokens", "new_tokens": "{} new"}
_MARKERS: Final = {"ctranslate2": "s", "transformers": "^"}


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any]) -> Any:
    """Return a matplotlib ``Figure`` of a report: a panel for steps and one for whole calls, over what was swept.

    Of each series there is metrale's median with its range, the floor (of steps), and each peer's best. A case that
    was not timed, or of which there is no step, is left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    figure.suptitle(f"{report['model']['name']}, {report['dtype']}, {(report['device'] or {}).get('name', '')}")
    groups = series(report)
    for axes, (key, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for index, (label, cases) in enumerate(groups.items()):
            _draw_series(axes, label, cases, COLUMNS[report["axis"]], key, f"C{index}")
        axes.set(xscale="log", yscale="log", xlabel=_AXES[report["axis"]], ylabel=title)
        ticks = sorted({case[COLUMNS[report["axis"]]] for case in report["cases"]})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG: the same figure gives the same bytes, and its text stays text."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "metrale"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def series(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the timed cases by what is the same in them, in the order of what was swept."""
    column = COLUMNS[report["axis"]]
    fixed = [key for key in _FIXED if key != column]
    timed = sorted((case for case in report["cases"] if case["total_ms"]), key=lambda case: case[column])
    varied = [key for key in fixed if key == "beams" or len({case[key] for case in timed}) > 1]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in timed:
        words = ["greedy" if key == "beams" and case[key] == 1 else _FIXED[key].format(case[key]) for key in varied]
        found.setdefault(", ".join(words), []).append(case)
    return found


def _draw_series(axes: Any, label: str, cases: Sequence[Mapping[str, Any]], column: str, key: str, colour: str) -> None:
    known = [case for case in cases if case[key]]
    x = [case[column] for case in known]
    ours = [case[key] for case in known]
    middle = [one["median"] for one in ours]
    if known:
        below = [one["median"] - one["min"] for one in ours]
        above = [one["max"] - one["median"] for one in ours]
        axes.errorbar(x, middle, yerr=[below, above], marker="o", capsize=3, color=colour, label=f"metrale, {label}")
    floors = [(case[column], case["floor_ms"]) for case in known if case["floor_ms"]]
    if key == "step_ms" and floors:
        axes.plot(*zip(*floors, strict=True), linestyle="--", marker="_", color=colour, label=f"floor, {label}")
    for peer, name in PEER_NAMES.items():
        theirs = [(case[column], case["peers"][peer][key]["best"]) for case in known if _has(case, peer, key)]
        if theirs:
            marker = _MARKERS[peer]
            axes.plot(
                *zip(*theirs, strict=True), marker=marker, linestyle=":", color=colour, label=f"{name}, best, {label}"
            )


def _has(case: Mapping[str, Any], peer: str, key: str) -> bool:
    return peer in case["peers"] and case["peers"][peer].get(key) is not None
