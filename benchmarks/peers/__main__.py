# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs CTranslate2 and transformers on checkpoints, and writes what they reported for `metrale bench --peers FILE`.

    python -m benchmarks.peers --out peers.json --shape 600M
    python -m benchmarks.peers --out peers.json --device cpu --dtype float32 demo_model=metrale/demo_model

Each runs in a process of its own, and in an environment of its own if `--python` names one; that one needs what metrale
needs as well. Their results are compared with metrale's first. Each case has five timed calls or more; `min` is the
best of them, and `median` the median. The exit status is 1 when anything went wrong; `problems` says what.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import metrale
from benchmarks.peers import runner
from metrale.bench.check import forced_logits
from metrale.bench.machine import GPU_PACKAGES, describe, read_smi
from metrale.bench.protocol import CHECK_SOURCES, CHECK_STEPS, NEW_TOKENS, RUNS, SOURCE_TOKENS, TOLERANCE
from metrale.bench.shapes import SHAPES, work_folder, write_checkpoint

LOGITS: Final = "logits.npz"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="NAME=FOLDER", help="checkpoints, by the names metrale bench gives"
    )
    parser.add_argument("--shape", action="append", default=[], choices=tuple(SHAPES), help="random weights")
    parser.add_argument("--out", type=Path, required=True, help="write the JSON here")
    parser.add_argument("--peers", default="ct2,hf", help="of ct2 and hf")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=FILE", help="ct2=... or hf=...: its Python"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float16", choices=tuple(TOLERANCE))
    parser.add_argument("--batches", default="1,8,64", help="batch sizes, greedy and with beams")
    parser.add_argument("--beams", type=int, default=4, help="width of the beam searches; 0: none")
    parser.add_argument("--runs", type=int, default=RUNS, help="timed calls of each case (default: %(default)s)")
    parser.add_argument("--source-len", type=int, default=SOURCE_TOKENS, help="tokens of each source")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens put out")
    parser.add_argument("--seconds", type=float, default=600, help="the most that each of them may take")
    parser.add_argument("--commit", help="the commit, where git is not there to say")
    options = parser.parse_args(words)
    try:
        options.peers = [runner.SHORT_NAMES[name] for name in options.peers.split(",")]
        pairs = (pair.partition("=") for pair in options.python)
        options.python = {runner.SHORT_NAMES[name]: file for name, _, file in pairs}
    except KeyError as error:
        parser.error(f"--peers and --python take {' and '.join(runner.SHORT_NAMES)}, got {error}")
    options.models = {name: Path(folder) for name, _, folder in (pair.partition("=") for pair in options.models)}
    if not options.models and not options.shape:
        parser.error("expected a checkpoint, NAME=FOLDER, or --shape")
    return options


def linked(folder: Path, place: Path) -> Path:
    """Make a folder with links to a checkpoint's files, beside which nothing is written then, and return it."""
    place.mkdir(parents=True)  # a name may be an id of the Hub, with a slash in it
    for path in folder.resolve().iterdir():
        if path.name != LOGITS:
            (place / path.name).symlink_to(path)
    return place


def keep_logits(folder: Path, options: argparse.Namespace) -> None:
    """Write metrale's logits to a file in a folder, for a peer to compare its own with."""
    limits: dict[str, Any] = {
        "max_batch": CHECK_SOURCES,
        "max_source_len": SOURCE_TOKENS,
        "max_new_tokens": CHECK_STEPS + 2,
    }
    with metrale.load(folder, "host" if options.device == "cpu" else "cuda", options.dtype, **limits) as model:
        np.savez(folder / LOGITS, logits=forced_logits(model))


def measure(folders: dict[str, Path], options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run each peer on all folders."""
    for name in options.peers:
        arguments = [
            *(f"{shape}={folder}" for shape, folder in folders.items()),
            *("--device", options.device, "--dtype", options.dtype, "--batches", options.batches, "--check"),
            *("--beams", str(options.beams), "--beam-batches", options.batches, "--runs", str(options.runs)),
            *("--source-len", str(options.source_len), "--new-tokens", str(options.new_tokens)),
        ]
        result = runner.run(name, arguments, options.seconds, options.python.get(name, sys.executable))
        report["peers"][name] = result
        report["problems"] += runner.problems_of(name, result)


def main(words: Sequence[str] | None = None) -> int:
    """Run the peers and return the exit status."""
    options = parse(words)
    report: dict[str, Any] = {
        "benchmark": "peers",
        "protocol": {
            "source_tokens": options.source_len,
            "new_tokens": options.new_tokens,
            "beams": options.beams,
            "dtype": options.dtype,
            "runs": options.runs,
        },
        "machine": describe("metrale", "numpy", *GPU_PACKAGES, commit=options.commit),
        "nvidia_smi": read_smi() if options.device == "cuda" else None,
        "peers": {},
        "problems": [],
    }
    with tempfile.TemporaryDirectory(dir=work_folder(options.shape, options.dtype) if options.shape else None) as place:
        work = Path(place)
        folders = {name: linked(folder, work / name) for name, folder in options.models.items()}
        for shape in options.shape:
            folders[shape] = work / shape
            write_checkpoint(folders[shape], SHAPES[shape], options.dtype)
        for folder in folders.values():
            keep_logits(folder, options)
        measure(folders, options, report)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for problem in report["problems"]:
        print(problem, file=sys.stderr)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
