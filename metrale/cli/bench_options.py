# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options of ``metrale bench``, and what is refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from metrale.bench import chart
from metrale.bench.cases import SWEEPS
from metrale.bench.protocol import NEW_TOKENS, RUNS, SOURCE_TOKENS
from metrale.bench.shapes import SHAPES
from metrale.cli.failure import USAGE, Failure
from metrale.cli.model_options import add_choice_arguments, add_invariance_argument
from metrale.model import MAX_BEAMS

STDOUT: Final = "-"
QUICK_RUNS: Final = 2
_LEAST_SOURCE: Final = 3  # a language, a word, EOS
_OF_MEASURING: Final = (
    *("model", "folder", "shape", "batches", "beams", "sweep", "runs", "commit", "trace"),
    "batch_invariant",
)
"""Options that are None unless they are given, and have no meaning when nothing is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model DIR")
    add_choice_arguments(parser)
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights in the shape of a published model, instead of a model"
    )
    parser.add_argument(
        "--batches", type=_numbers, metavar="N,N", help="batch sizes (default: 1,8,64 on a GPU, 1,8 on the host)"
    )
    parser.add_argument(
        "--beams", type=_beams, metavar="N", help="width of the beam searches, 0: none (default: 4; 0 with --sweep)"
    )
    parser.add_argument("--source-len", type=int, default=SOURCE_TOKENS, metavar="N", help=_help("tokens of a source"))
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=_help("tokens put out"))
    parser.add_argument(
        "--sweep",
        choices=tuple(SWEEPS),
        help="go through batch sizes 1 to 256, sources of 8 to 1,000 tokens, or 1 to "
        "500 tokens put out; the last two at batch 1 unless --batches says more",
    )
    add_invariance_argument(parser)
    parser.set_defaults(batch_invariant=None)
    parser.add_argument("--runs", type=int, metavar="N", help=f"timed calls of each case (default: {RUNS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RUNS} timed calls, unless --runs says more")
    parser.add_argument("--json", metavar="FILE", help="write all of it as JSON; - is standard output, without a table")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="show for each part of a layer how long it takes in a step, beside its floor",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write every launch of a step of each case, in order, as a line of JSON"
    )
    parser.add_argument("--chart", metavar="FILE.svg", help="draw ms per step (needs the extra bench)")
    parser.add_argument(
        "--peers",
        action="append",
        default=[],
        metavar="FILE",
        help="show what other systems reported to python -m benchmarks.peers; may be given more than once",
    )
    parser.add_argument("--from", dest="saved", metavar="FILE", help="measure nothing: show what --json wrote")
    parser.add_argument("--commit", help="the commit that is measured, where git is not there to say")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors, and show no progress bar")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar, also on a terminal")


def _help(what: str) -> str:
    return f"{what} (default: %(default)s)"


def _numbers(text: str) -> list[int]:
    """Read batch sizes: in order, each once."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between them, got {text!r}")
    return sorted({int(word) for word in words})


def _beams(text: str) -> int:
    if not text.isdecimal() or int(text) == 1 or int(text) > MAX_BEAMS:
        raise argparse.ArgumentTypeError(f"expected 2 to {MAX_BEAMS}, or 0 for none, got {text!r}")
    return int(text)


def check(args: argparse.Namespace) -> None:
    """Refuse, with `Failure`, what would only come to nothing after minutes of measuring."""
    model = args.model is not None or args.folder is not None
    if args.shape is not None and model:
        raise Failure(USAGE, "--shape: expected none when a MODEL is given")
    if args.saved is not None:
        for name in _OF_MEASURING:
            if getattr(args, name) is not None:
                option = "MODEL" if name == "folder" else f"--{name.replace('_', '-')}"
                raise Failure(USAGE, f"{option}: expected none with --from, as nothing is measured")
    least = {"source_len": _LEAST_SOURCE, "new_tokens": 1, "runs": 1}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise Failure(USAGE, f"--{name.replace('_', '-')}: expected at least {low}, got {value}")
    if args.chart is not None:
        _check_chart(args.chart)


def _check_chart(name: str) -> None:
    if not name.endswith(".svg"):
        raise Failure(USAGE, f"--chart: expected a file whose name ends with .svg, got {name!r}")
    if not chart.is_available():
        raise Failure(USAGE, "--chart: matplotlib is not installed: pip install 'metrale[bench]'")
    if not Path(name).absolute().parent.is_dir():
        raise Failure(USAGE, f"--chart: {Path(name).parent} is no folder")


def runs_of(args: argparse.Namespace) -> int:
    """Return how many timed calls a case has."""
    if args.runs is not None:
        return int(args.runs)
    return QUICK_RUNS if args.quick else RUNS


def batches_of(args: argparse.Namespace, kind: str) -> list[int]:
    """Return the batch sizes on a device of this kind."""
    if args.batches is not None:
        return list(args.batches)
    if args.sweep is not None:
        return list(SWEEPS["batch"]) if args.sweep == "batch" else [1]
    return [1, 8] if kind == "host" else [1, 8, 64]


def beams_of(args: argparse.Namespace) -> int:
    """Return the width of the searches, 0 for none."""
    if args.beams is not None:
        return int(args.beams)
    return 4 if args.sweep is None else 0
