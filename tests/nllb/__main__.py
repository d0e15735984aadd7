# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the property test of beam searches on a range of seeds: `python -m tests.nllb FIRST LAST`."""

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

from tests.nllb.beam_mixes import check, opened


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    options = parser.parse_args()
    failed: list[int] = []
    total: Counter[str] = Counter()
    began = time.perf_counter()
    seeds = range(options.first, options.last + 1)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as models:
        for seed in seeds:
            try:
                total += check(models, seed)
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
