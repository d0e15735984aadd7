# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes a checkpoint with random weights, for use with another program.

python -m benchmarks.shapes 600M FOLDER [--dtype float16]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from metrale.bench.shapes import SHAPES, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    options = parser.parse_args()
    start = time.perf_counter()
    size = write_checkpoint(options.folder, SHAPES[options.shape], options.dtype)
    print(f"{options.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
