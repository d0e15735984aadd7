# SPDX-License-Identifier: MIT OR Apache-2.0
"""How exact the host backend is on the demo model: against float64, beside transformers, and among neighbours.

Run `python -m benchmarks.host_accuracy [--output FILE]` in the root of the repository. It uses the float64 forward,
the golden cases and the recorded errors of transformers that the tests use; every case is decoded with the golden ids
fed, so that errors are compared on the same inputs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import metrale
from benchmarks import ROOT
from gpu_runtime.host import HostBackend
from metrale.bench.machine import describe
from tests.nllb.decoding import DEMO, GOLDEN, LIMITS, exact, forced, forced_together, greedy, relative
from tests.reference.nllb_float64 import NllbFloat64

SIZES = (7, 32)
GROUPS = 24
RECORDED = ROOT / "tests" / "data" / "transformers_bf16.json"


def against_float64(dtype: str, reference: list[NDArray[np.float64]], recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the errors over all golden cases, as the recorded file defines them, and how many ids are equal.

    Where transformers' errors in the same type are recorded, also how the cases compare one by one.
    """
    with metrale.load(DEMO, HostBackend(), dtype, max_batch=1, **LIMITS) as model:
        rows = [forced(model, case).astype(np.float64) for case in GOLDEN]
        equal = sum(greedy(model, case) == case.ids for case in GOLDEN)
    errors = [relative(ours, theirs) for ours, theirs in zip(rows, reference, strict=True)]
    largest = max(np.abs(ours - theirs).max() for ours, theirs in zip(rows, reference, strict=True))
    result: dict[str, Any] = {
        "max_rel": _short(largest / max(np.abs(theirs).max() for theirs in reference)),
        "worst_case": _short(max(errors)),
        "median_case": _short(float(np.median(errors))),
        "greedy_ids_equal": f"{equal} of {len(GOLDEN)}",
    }
    if dtype in recorded["cases"][0]:
        theirs = [case[dtype]["cached"]["max_rel"] for case in recorded["cases"]]
        ratios = np.array(errors) / np.array(theirs)
        result["case_by_case_over_transformers"] = {
            "worst": _short(float(ratios.max())),
            "median": _short(float(np.median(ratios))),
            "cases_above_1.2": int((ratios > 1.2).sum()),
            "cases_below_1/1.2": int((ratios < 1 / 1.2).sum()),
        }
    return result


def among_neighbours() -> dict[str, Any]:
    """Return what the logits of a sequence owe to the rest of its batch, in float32, over random groups."""
    rng = np.random.default_rng(1)
    errors: list[float] = []
    by_row: list[float] = []
    with metrale.load(DEMO, HostBackend(), "float32", max_batch=max(SIZES), **LIMITS) as model:
        alone = [forced(model, case) for case in GOLDEN]
        for size in SIZES:
            for _ in range(GROUPS):
                group = rng.permutation(len(GOLDEN))[:size]
                together = forced_together(model, [GOLDEN[i] for i in group])
                for i, rows in zip(group, together, strict=True):
                    errors.append(relative(rows, alone[i]))
                    by_row.append(max(map(relative, rows, alone[i])))
    return {
        "groups": f"{GROUPS} each of {' and '.join(map(str, SIZES))}",
        "sequences": len(errors),
        "worst": _short(max(errors)),
        "p99": _short(float(np.quantile(errors, 0.99))),
        "median": _short(float(np.median(errors))),
        "by_row": {
            "worst": _short(max(by_row)),
            "p99": _short(float(np.quantile(by_row, 0.99))),
            "median": _short(float(np.median(by_row))),
            "sequences_above_2e-6": sum(error > 2e-6 for error in by_row),
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the JSON report here")
    options = parser.parse_args()
    judge = NllbFloat64.load(DEMO)
    reference = [exact(judge, case) for case in GOLDEN]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    report = {
        "against_float64": {
            name: against_float64(name, reference, recorded) for name in ("float32", "float16", "bfloat16")
        },
        "transformers_against_float64": {name: recorded["overall"][name]["cached"] for name in ("float32", "bfloat16")},
        "transformers": recorded["meta"]["transformers"],
        "among_neighbours_float32": among_neighbours(),
        "blas": {name: os.environ.get(name) for name in ("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS")},
        "machine": describe("metrale", "numpy", "ml_dtypes"),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
