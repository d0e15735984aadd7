# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the engine's property test on a range of seeds: `python -m tests.engine FIRST LAST [--crowd]`."""

from __future__ import annotations

import os

# The products are small, and BLAS threads wait by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.engine.crowd import Crowd
from tests.engine.simulation import Simulation
from tests.reference.tiny import write_tiny


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--crowd", action="store_true", help="threads and event loops, instead of one thread")
    options = parser.parse_args()
    kind = Crowd if options.crowd else Simulation
    failed: list[int] = []
    total: Counter[str] = Counter()
    began = time.perf_counter()
    seeds = range(options.first, options.last + 1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny(Path(folder) / "model", 21)
        for seed in seeds:
            try:
                total += kind(checkpoint, seed).run()
            except Exception:
                failed.append(seed)
                print(f"seed {seed}:", file=sys.stderr)
                traceback.print_exc()
    seconds = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {seconds / max(1, len(seeds)):.2f} s each: {dict(total)}")
    print(f"failed: {', '.join(map(str, failed)) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
