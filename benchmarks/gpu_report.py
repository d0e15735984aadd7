# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables in Markdown from the JSON of `benchmarks.gpu_speed`: `python -m benchmarks.gpu_report FILE [--ops]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metrale.bench.tables import launches_table, median, number, ranged, table

Report = Mapping[str, Any]

PEERS = ("ctranslate2", "transformers")


def found(report: Any, *path: str) -> Any:
    """Return what lies at a path of keys, or None where one of them is missing."""
    for key in path:
        if not isinstance(report, Mapping) or key not in report:
            return None
        report = report[key]
    return report


def cases(report: Report) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield shape, batch and case for each shape and batch that anybody has measured."""
    peers = found(report, "peers") or {}
    for shape, entry in report["shapes"].items():
        names = [*(found(entry, "cases") or {})]
        for peer in peers.values():
            names += [name for name in found(peer, "shapes", shape, "cases") or {} if name not in names]
        for name in sorted(names, key=int):
            yield shape, name, found(entry, "cases", name) or {}


def steps_table(report: Report) -> str:
    """Milliseconds of a decode step, beside the peers' and the floor."""
    rows = []
    for shape, batch, case in cases(report):
        peers = {name: found(report, "peers", name, "shapes", shape, "cases", batch, "step_ms") for name in PEERS}
        ours = found(case, "wall", "step_ms")
        theirs = median(peers["ctranslate2"])
        rows.append(
            [
                f"{shape} batch {batch}",
                ranged(ours),
                ranged(found(case, "device", "step_device_ms")),
                number(median(found(case, "wall", "host_enqueue_ms"))),
                number(found(case, "decode", "graph_ms")),
                number(found(case, "decode", "floor_ms")),
                ranged(peers["ctranslate2"]),
                ranged(peers["transformers"]),
                number(theirs / ours["median"] if theirs and ours else None),
                number(found(case, "wall", "tokens_per_s")),
            ]
        )
    header = ["ms per decode step", "metrale", "device alone", "host enqueues", "as one graph", "floor", "CTranslate2"]
    return table([*header, "transformers", "CTranslate2 / metrale", "tokens/s"], rows)


def prefill_table(report: Report) -> str:
    """Milliseconds until the first token, beside the peers', and of the encoder alone."""
    rows = []
    for shape, batch, case in cases(report):
        peers = {name: found(report, "peers", name, "shapes", shape, "cases", batch, "one_token_ms") for name in PEERS}
        rows.append(
            [
                f"{shape} batch {batch}",
                ranged(found(case, "wall", "one_token_ms")),
                number(median(found(case, "device", "prefill_device_ms"))),
                number(found(case, "encoder", "graph_ms")),
                number(found(case, "encoder", "floor_ms")),
                number(median(peers["ctranslate2"])),
                number(median(peers["transformers"])),
            ]
        )
    for shape, entry in report["shapes"].items():
        long = found(entry, "encoder_64x64")
        if long:
            graph, floor = number(long["graph_ms"]), number(long["floor_ms"])
            rows.append([f"{shape} encoder, 64 x 64 tokens", "-", "-", graph, floor, "-", "-"])
    header = ["ms", "metrale, first token", "device alone", "encoder as one graph", "encoder floor"]
    return table([*header, "CTranslate2, first token", "transformers, first token"], rows)


def serving_table(report: Report) -> str:
    """Milliseconds of the steps that the engine makes, the host a step ahead; empty when they were not measured."""
    rows = []
    for shape, batch, case in cases(report):
        serving = found(case, "serving")
        if serving:
            rows.append(
                [
                    f"{shape} batch {batch}",
                    ranged(serving["engine"]["step_ms"]),
                    ranged(serving["fed"]["step_ms"]),
                    ranged(serving["step_device_ms"]),
                    ranged(serving["host_enqueue_ms"]),
                    number(serving["busy"]),
                    number(median(found(serving, "busy_by_events", "share"))),
                    str(serving["graph_launches_per_step"]),
                    number(serving["engine"]["tokens_per_s"]),
                ]
            )
    header = ["ms per step, a step ahead", "engine", "model's calls", "device alone", "host enqueues", "busy"]
    return table([*header, "busy by events", "graphs", "tokens/s"], rows) if rows else ""


def beams_table(report: Report) -> str:
    """Milliseconds of a step of beam search, beside the peers' and the floor; empty when nobody has measured any."""
    rows = []
    for shape, entry in report["shapes"].items():
        theirs = {name: found(report, "peers", name, "shapes", shape, "beams") or {} for name in PEERS}
        ours = found(entry, "beams") or {}
        for batch in sorted({*ours, *(name for cases in theirs.values() for name in cases)}, key=int):
            case = ours.get(batch, {})
            steps = [found(theirs[name], batch, "step_ms") for name in PEERS]
            step, first = found(case, "wall", "step_ms"), median(steps[0])
            parts = [case[part] for part in ("decode", "select") if part in case]
            rows.append(
                [
                    f"{shape} batch {batch}, {report['protocol']['beams']} beams",
                    ranged(step),
                    ranged(found(case, "device", "step_device_ms")),
                    number(median(found(case, "device", "host_enqueue_ms"))),
                    number(sum(part["graph_ms"] for part in parts) if parts else None),
                    number(sum(part["floor_ms"] for part in parts) if parts else None),
                    *map(ranged, steps),
                    number(first / step["median"] if first and step else None),
                    number(found(case, "wall", "tokens_per_s")),
                ]
            )
    header = ["ms per step of beam search", "metrale", "device alone", "host enqueues", "as graphs", "floor"]
    return table([*header, "CTranslate2", "transformers", "CTranslate2 / metrale", "tokens/s"], rows) if rows else ""


def _tables(part: Mapping[str, Any]) -> str:
    """Return the tables of one pass: by kind of launch, and by part of a layer where the report has that."""
    return "\n\n".join(launches_table(part, key) for key in ("ops", "parts") if key in part)


def ops_tables(report: Report) -> str:
    """Where the time of every pass goes."""
    parts = []
    for shape, batch, case in cases(report):
        for part, title in (("decode", "decode step"), ("encoder", "encoder")):
            if part in case:
                parts.append(f"### {shape}, batch {batch}: {title}\n\n{_tables(case[part])}")
    for shape, entry in report["shapes"].items():
        for batch, case in (found(entry, "beams") or {}).items():
            for part, title in (("decode", "decoder pass"), ("select", "selection")):
                if part in case:
                    where = f"{shape}, batch {batch}, {case['beams']} beams"
                    parts.append(f"### {where}: {title}\n\n{_tables(case[part])}")
        if "encoder_64x64" in entry:
            parts.append(f"### {shape}: encoder, 64 x 64 tokens\n\n{_tables(entry['encoder_64x64'])}")
    return "\n\n".join(parts)


def summary(report: Report) -> str:
    """All comparisons, and what went wrong."""
    problems = "".join(f"\n- {problem}" for problem in report["problems"])
    parts = [steps_table(report), serving_table(report), prefill_table(report), beams_table(report)]
    return "\n\n".join(filter(None, [*parts, f"Problems:{problems}" if problems else ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ops", action="store_true", help="also where the time of each pass goes")
    options = parser.parse_args()
    report = json.loads(options.file.read_text(encoding="utf-8"))
    print(summary(report) + (f"\n\n{ops_tables(report)}" if options.ops else ""))


if __name__ == "__main__":
    main()
