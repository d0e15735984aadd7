# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs of the command on the host that cost little, and what a peer would report beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from metrale.cli import main

SMALL: Final = ("--device", "host", "--shape", "tiny", "--batches", "1,3", "--beams", "2", "--quick", "--commit", "abc")
CASES: Final = [(1, 1), (3, 1), (1, 2), (3, 2)]
"""Batch and beams of each case, in order."""
SHORT: Final = ("--source-len", "6", "--new-tokens", "8")


def bench(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run ``metrale bench`` on random weights and return its exit code and its JSON."""
    out = folder / "out.json"
    status = main(["bench", *SMALL, *SHORT, "--json", str(out), *words])
    return status, json.loads(out.read_text(encoding="utf-8"))


def peers_file(folder: Path, **changes: Any) -> Path:
    """Write what peers would report of the runs above; ``changes`` go into CTranslate2's part."""

    def times(least: float) -> dict[str, Any]:
        spread = {"median": 2 * least, "min": least, "max": 3 * least, "n": 5}
        return {"step_ms": spread, "total_ms": spread, "one_token_ms": spread, "tokens_per_s": 1.0}

    tiny = {"cases": {"1": times(4.0), "64": times(9.0)}, "beams": {"3": times(6.0)}, "check": {"passed": True}}
    mine = {"versions": {"ctranslate2": "4"}, "shapes": {"tiny": tiny}, "errors": [], **changes}
    other = {"versions": {}, "shapes": {"tiny": {**tiny, "beams": {}}}, "errors": ["batch 3: gone"]}
    protocol = {"source_tokens": 6, "new_tokens": 8, "beams": 2, "dtype": "float32"}
    path = folder / "peers.json"
    report = {"benchmark": "peers", "protocol": protocol, "peers": {"ctranslate2": mine, "transformers": other}}
    path.write_text(json.dumps(report), encoding="utf-8")
    return path


def by_case(report: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the cases of a report by batch and beams."""
    return {(case["batch"], case["beams"]): case for case in report["cases"]}


def traced(path: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the lines of a trace by case."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        found.setdefault((line["batch"], line["beams"]), []).append(line)
    return found
