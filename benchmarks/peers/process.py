# SPDX-License-Identifier: MIT OR Apache-2.0
"""A peer's process: its command line, and how it reports."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from metrale.bench.protocol import NEW_TOKENS, RUNS, SOURCE_TOKENS, TOLERANCE, Lengths, beam_batches, measure


def arguments(description: str | None) -> argparse.Namespace:
    """Read a peer's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="checkpoints")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float16", choices=tuple(TOLERANCE))
    parser.add_argument("--batches", default="1,8,64", help="batch sizes")
    parser.add_argument("--beams", type=int, default=0, help="also measure beam search with so many beams")
    parser.add_argument("--beam-batches", help="batch sizes of beam search (default: those of the shape's name)")
    parser.add_argument("--runs", "--repeats", type=int, default=RUNS, help="timed calls (default: %(default)s)")
    parser.add_argument("--source-len", type=int, default=SOURCE_TOKENS, help="tokens of each source")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens put out")
    parser.add_argument("--check", action="store_true", help="compare with the logits.npz in each folder")
    options = parser.parse_args()
    options.models = [(name, Path(folder)) for name, _, folder in (pair.partition("=") for pair in options.models)]
    options.batches = [int(batch) for batch in options.batches.split(",")]
    if options.beam_batches is not None:
        options.beam_batches = [int(batch) for batch in options.beam_batches.split(",")]
    options.lengths = Lengths(options.source_len, options.new_tokens)
    return options


def time_cases(name: str, peer: Any, options: argparse.Namespace) -> None:
    """Time every case of one checkpoint and report it; an error of one stops no other.

    Parameters
    ----------
    name : str
        Of the checkpoint.
    peer : object
        Its ``sources(count, lengths)`` makes what its ``generate(sources, new_tokens, beams=)`` takes.
    options : Namespace
        As `arguments` gives them.
    """
    for batch in options.batches:
        with reporting_errors(shape=name, batch=batch):
            report(shape=name, batch=batch, result=_timed(peer, batch, 1, options))
    for batch in _searched(name, options):
        with reporting_errors(shape=name, beams=options.beams, batch=batch):
            report(shape=name, beams=options.beams, batch=batch, result=_timed(peer, batch, options.beams, options))


def _timed(peer: Any, batch: int, beams: int, options: argparse.Namespace) -> dict[str, Any]:
    call = partial(peer.generate, peer.sources(batch, options.lengths), beams=beams)
    return measure(call, batch, options.runs, options.lengths.new)


def _searched(name: str, options: argparse.Namespace) -> Sequence[int]:
    """Return the batches for which beam search is measured on a checkpoint."""
    if options.beams and options.beam_batches is not None:
        return list(options.beam_batches)
    return beam_batches(name, options.beams)


def report(**fields: Any) -> None:
    """Print one result as a line of JSON."""
    print(json.dumps(fields), flush=True)


@contextmanager
def reporting_errors(**where: Any) -> Iterator[None]:
    """Report an exception, with what it happened to, and go on after the context."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report(**where, error=f"{type(error).__name__}: {error}"[:2000])
