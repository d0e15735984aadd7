# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale convert``: a checkpoint, as safetensors and in another element type if that is wanted, in a new folder."""

from __future__ import annotations

import argparse
import re
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from gpu_runtime import dtypes
from metrale.checkpoint import FLOAT_DTYPES, Shard, open_checkpoint, plan_shards, require_folder, save_shards
from metrale.cli.console import BYTES, Console
from metrale.cli.failure import DONE, SIGNALLED, say
from metrale.cli.model_folder import copy_others, files_beside, new_folder, require_new, require_space
from metrale.cli.output import to_json, write_lines
from metrale.cli.signals import Signals
from metrale.nllb.config import NllbConfig
from metrale.nllb.weights import match_weights

KEEP: Final = "keep"
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_OF_1024: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)")


class _Stopped(Exception):
    """A signal came."""


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "convert",
        parents=[common],
        allow_abbrev=False,
        help="write a checkpoint as safetensors",
        description="Write the checkpoint in folder SRC, of pytorch_model.bin or safetensors, to a new folder DST as "
        "safetensors, with its configuration and tokenizer. DST appears when it is whole.",
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint folder")
    parser.add_argument("output", metavar="DST", help="new folder; one that is there must be empty")
    parser.add_argument(
        "--dtype",
        default=KEEP,
        choices=(*map(dtypes.long_name, dtypes.FLOAT_TYPES), KEEP),
        help="element type to store, rounded to nearest even (default: keep, each tensor as it is)",
    )
    parser.add_argument(
        "--shard-size",
        type=_size,
        default=_size("5GB"),
        metavar="SIZE",
        help="most bytes of weights in one file: 500MB, 5GB, 2GiB (default: 5GB)",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object about what was written")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors, and show no progress bar")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar, also on a terminal")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = (_UNITS | _UNITS_OF_1024).get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size above 0 such as 500MB, 5GB or 2GiB, got {text!r}")
    return int(match[1]) * unit


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    console = Console(quiet=args.quiet)
    source, output = require_folder(args.source), require_new(args.output)
    dtype = None if args.dtype == KEEP else dtypes.short_name(args.dtype)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(source))
        weights = match_weights(NllbConfig.from_dir(source), checkpoint)
        wanted = dict.fromkeys(weights.sources.values())  # of tied matrices, one
        shards = plan_shards(
            [info for name, info in checkpoint.tensors.items() if name in wanted], dtype, args.shard_size
        )
        others = files_beside(source)
        require_space(output, sum(shard.nbytes for shard in shards) + sum(path.stat().st_size for path in others))
        signals = stack.enter_context(Signals())
        stop = threading.Event()
        signals.arm(stop.set)
        stack.enter_context(closing(console))
        if console.can_draw and not args.no_progress:
            console.draw(sum(shard.nbytes for shard in shards), 0, BYTES)

        def advance(count: int) -> None:
            if stop.is_set():
                raise _Stopped
            console.advance(count)

        try:
            with new_folder(output) as folder:
                save_shards(checkpoint, shards, folder, advance)
                copy_others(others, folder, args.dtype if dtype else None)
                advance(0)
        except _Stopped:
            console.close()
            say(f"interrupted; {output} was not written")
            assert signals.received is not None
            return SIGNALLED + signals.received
    left_out = sorted(checkpoint.tensors.keys() - wanted)
    _report(args, output, shards, [path.name for path in others], left_out)
    return DONE


def _report(
    args: argparse.Namespace, output: Path, shards: list[Shard], copied: list[str], left_out: list[str]
) -> None:
    stored = sorted({str(FLOAT_DTYPES[tensor.dtype]) for shard in shards for tensor in shard.tensors})
    report = {
        "source": args.source,
        "output": str(output),
        "tensors": sum(len(shard.tensors) for shard in shards),
        "stored_dtypes": stored,
        "bytes": sum(shard.nbytes for shard in shards),
        "weights": [shard.name for shard in shards],
        "copied": copied,
        "left_out": left_out,
    }
    if args.json:
        write_lines([to_json(report, indent=2)])
    elif not args.quiet:
        files = f"{len(shards)} file{'' if len(shards) == 1 else 's'}"
        write_lines(
            [f"{output}: {report['tensors']:,} tensors as {', '.join(stored)}, {report['bytes']:,} bytes in {files}"]
        )
