# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale inspect``: what a checkpoint is, what is wrong with it, and the memory it takes, without loading it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from metrale.checkpoint import Checkpoint
from metrale.cli.console import BYTES, Console
from metrale.cli.failure import DONE, UNUSABLE, say
from metrale.cli.inspect_text import to_text
from metrale.cli.inspection import inspect_folder
from metrale.cli.model_options import add_model_arguments, choose_model, device_of, limits_of, take_folder
from metrale.cli.output import to_json, write_lines
from metrale.cli.value_check import tensor_bytes

_DESCRIPTION: Final = """\
Show a checkpoint's configuration, size, languages and files, the device memory that loading it with these options would
take, and everything that is wrong with it. Nothing is loaded. The exit code is 0 when it can be loaded, else 3."""


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        parents=[common],
        allow_abbrev=False,
        help="show a checkpoint, what is wrong with it, and the memory it takes",
        description=_DESCRIPTION,
    )
    parser.add_argument("folder", nargs="?", metavar="DIR", help="the same as --model DIR")
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object (sizes in bytes)")
    parser.add_argument("--languages", action="store_true", help="list all language codes (JSON always does)")
    parser.add_argument(
        "--check-values", action="store_true", help="also read all weights, and report NaNs and infinities by tensor"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    take_folder(args, "DIR")
    console = Console(quiet=False)
    model = choose_model(args, console.note)

    def watch(checkpoint: Checkpoint) -> Callable[[int], None]:
        if console.can_draw:
            console.draw(sum(tensor_bytes(checkpoint, name) for name in checkpoint.tensors), 0, BYTES)
        return console.advance

    with closing(console):
        report = inspect_folder(
            model.path, device_of(args), args.dtype, limits_of(args), watch if args.check_values else None
        )
    write_lines([to_json(report, indent=2)] if args.json else to_text(report, languages=args.languages))
    if report["ok"]:
        return DONE
    say(f"error: {_summary(report)}")
    return UNUSABLE


def _summary(report: dict[str, Any]) -> str:
    """Return the problem, or how many there are. One of the device alone is no fault of the folder."""
    first, *more = report["problems"]
    if more:
        return f"{report['model']}: {len(more) + 1} problems, which the output lists"
    problem = str(first["problem"])
    return problem if first["part"] == "device" else f"{report['model']}: {first['part']}: {problem}"
