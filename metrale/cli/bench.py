# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale bench``: how fast a model is here, checked before it is timed, beside its floor and other systems."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from gpu_runtime import dtypes
from gpu_runtime.config import Config
from metrale.bench import chart, peer_results, report
from metrale.bench.cases import plan
from metrale.bench.machine import GPU_PACKAGES, describe
from metrale.bench.protocol import Lengths
from metrale.bench.shapes import SHAPES, work_folder, write_checkpoint
from metrale.bench.tables import case_label, cases_table, layers_tables, number
from metrale.cli.bench_options import STDOUT, add_arguments, batches_of, beams_of, check, runs_of
from metrale.cli.console import Console
from metrale.cli.failure import DONE, SOME_FAILED, USAGE, Failure, say
from metrale.cli.model_options import choose_model, device_of, take_folder
from metrale.cli.output import write_lines
from metrale.cli.signals import unwinding
from metrale.factory import device_name, element_type

_DESCRIPTION: Final = """\
Measure the milliseconds of a decode step, greedy and with beams, and how close that is to what the device allows.
Every result is checked before it is timed; of a case whose check fails nothing is timed, and the exit code is 1."""

_OPTIONS: Final = ("device", "dtype", "shape", "source_len", "new_tokens", "sweep", "quick")
"""The options that the JSON has as they were given."""


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "bench",
        parents=[common],
        allow_abbrev=False,
        help="measure how fast a model is on this machine",
        description=_DESCRIPTION,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    check(args)
    console = Console(quiet=args.quiet)
    peers = [_read("--peers", name, peer_results.read) for name in args.peers]
    with closing(console), unwinding():
        found = _read("--from", args.saved, report.load) if args.saved is not None else _measure(args, console)
    if args.saved is not None and args.layers and not any(case["layers"] for case in found["cases"]):
        raise Failure(USAGE, f"--layers: {args.saved} has none, as it was written without --layers")
    for one in peers:
        for note in peer_results.attach(found, one):
            console.note(note)
    _show(args, found)
    for problem in found["problems"]:
        say(f"error: {problem}")
    return SOME_FAILED if found["problems"] else DONE


def _read(option: str, name: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Read a file of JSON; what is wrong with it names the option."""
    try:
        return read(Path(name))
    except ValueError as error:
        raise Failure(USAGE, f"{option}: {name}: {error}") from None


def _show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the tables, or the JSON, and what else is asked for."""
    if args.json == STDOUT:
        write_lines([report.to_text(found).rstrip("\n")])
    else:
        parts = layers_tables(found) if args.layers else ""
        write_lines([*cases_table(found).splitlines(), *(["", *parts.splitlines()] if parts else [])])
        if args.json is not None:
            report.save(found, Path(args.json))
    if args.chart is not None:
        chart.save(chart.draw(found), Path(args.chart))


def _measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all cases; what there is of the JSON is in its file after each of them."""
    from metrale.bench.running import Run, open_named  # other commands need not wait for all that it imports

    take_folder(args, "MODEL")
    device = device_of(args)
    chosen = None if args.shape is not None else choose_model(args, console.note).path
    start = time.perf_counter()
    with open_named(device_name(device), console.note) as gpu:
        dtype = dtypes.long_name(element_type(args.dtype, gpu))
        found = _outset(args, args.shape if chosen is None else _name(args, chosen), gpu.kind())

        def keep() -> None:
            found["seconds"] = round(time.perf_counter() - start, 1)
            if args.json not in (None, STDOUT):
                report.save(found, Path(args.json))

        keep()  # a place where nothing can be written is found before anything is measured
        lengths = Lengths(args.source_len, args.new_tokens)
        cases = plan(batches_of(args, gpu.kind()), beams_of(args), lengths, args.sweep)
        with _trace(args.trace) as trace, _folder(args.shape, dtype, chosen) as folder:
            if console.can_draw and not args.no_progress:
                console.draw(len(cases), 0, " cases")
            profiles = args.layers or trace is not None
            run = Run(
                gpu,
                folder,
                dtype,
                cases,
                runs_of(args),
                found,
                batch_invariant=bool(args.batch_invariant),
                profiles=profiles,
                trace=trace,
            )
            with closing(run.entries(console.note)) as entries:
                for entry in entries:
                    console.note(_said(found["model"]["name"], entry))
                    console.advance()
                    keep()
        keep()
    return found


def _name(args: argparse.Namespace, folder: Path) -> str:
    """Return what a model is called: its folder's name, or its id on the Hub, whose folder is named as a revision."""
    given = args.model if args.model is not None else Config.from_env().model
    return folder.resolve().name if given is None or Path(given).is_dir() else str(given)


def _outset(args: argparse.Namespace, name: str, kind: str) -> dict[str, Any]:
    """Return the report of a run that is about to begin on a device of this kind."""
    options = {option: getattr(args, option) for option in _OPTIONS}
    options |= {"runs": runs_of(args), "batches": batches_of(args, kind), "beams": beams_of(args)}
    options["batch_invariant"] = bool(args.batch_invariant)
    machine = describe("metrale", "numpy", *GPU_PACKAGES, commit=args.commit)
    model = {"name": name, "random_weights": args.shape is not None}
    return report.empty(model, args.sweep or "batch", options, machine)


def _said(name: str, entry: Mapping[str, Any]) -> str:
    """Return one case in a line."""
    step, call = entry["step_ms"], entry["total_ms"]
    what = f"{number(step['median'])} ms a step" if step else f"{number(call['median'])} ms" if call else "not timed"
    return f"{name}, {case_label(entry)}: {what}"


@contextmanager
def _trace(name: str | None) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Give what writes a line of JSON to the file of this name, from its start; None for no name."""
    if name is None:
        yield None
        return
    with open(name, "w", encoding="utf-8", buffering=1) as file:  # by lines: a run that is interrupted has some
        yield lambda line: print(json.dumps(line, ensure_ascii=False), file=file)


@contextmanager
def _folder(shape: str | None, dtype: str, chosen: Path | None) -> Iterator[Path]:
    """Give the model's folder: the one that was chosen, or one with random weights, which is gone after the context."""
    if shape is None:
        assert chosen is not None
        yield chosen
        return
    with TemporaryDirectory(dir=work_folder([shape], dtype)) as place:
        folder = Path(place, shape)
        write_checkpoint(folder, SHAPES[shape], dtype)
        yield folder
