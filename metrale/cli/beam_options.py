# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options of beam search."""

from __future__ import annotations

import argparse
from typing import Final

from metrale.cli.failure import USAGE, Failure
from metrale.model import BeamParams, EarlyStopping
from metrale.translator import Options

_EARLY: Final[dict[str, EarlyStopping]] = {"false": False, "true": True, "never": "never"}
_OF_SEARCH: Final = {"length_penalty": 1.0, "early_stopping": "false", "n_best": 1}


def add_beam_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--beam`` and its like."""
    group = parser.add_argument_group("beam search")
    group.add_argument(
        "--beam",
        type=int,
        default=1,
        metavar="N",
        help="hypotheses that are followed at once; each takes one of the --max-batch lanes (default: %(default)s)",
    )
    group.add_argument(
        "--n-best",
        type=int,
        default=_OF_SEARCH["n_best"],
        metavar="N",
        help="hypotheses of a text in the output of --json (default: %(default)s)",
    )
    group.add_argument(
        "--length-penalty",
        type=float,
        default=_OF_SEARCH["length_penalty"],
        metavar="X",
        help="a hypothesis scores its log-probability over its length to this power; larger prefers longer ones "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--early-stopping",
        choices=tuple(_EARLY),
        default=_OF_SEARCH["early_stopping"],
        help="end when nothing that is followed can beat what is finished at its present length (false), as soon as N "
        "hypotheses are finished (true), or when nothing can at any length (never) (default: %(default)s)",
    )


def beams_of(args: argparse.Namespace) -> Options:
    """Return what the options come to, as keyword arguments of the translator.

    Raises
    ------
    Failure
        When one has no effect, or there are too few lanes.
    InvalidInput
        When a value is out of range.
    """
    idle = [name for name, default in _OF_SEARCH.items() if getattr(args, name) != default]
    if idle and args.beam == 1:
        raise Failure(USAGE, f"--{idle[0].replace('_', '-')} has no effect without --beam above 1")
    early = _EARLY[args.early_stopping]
    BeamParams(args.beam, args.length_penalty, early, args.n_best)
    if args.n_best > 1 and not args.json:
        raise Failure(USAGE, "--n-best has no effect without --json: a line of text has room for the best one alone")
    if args.beam > 1 and args.temperature:
        raise Failure(USAGE, "--temperature has no effect with --beam: beam search draws nothing")
    if args.max_batch < args.beam:
        raise Failure(
            USAGE, f"--max-batch: expected at least {args.beam}, a lane for each --beam, got {args.max_batch}"
        )
    return {
        "num_beams": args.beam,
        "num_return_sequences": args.n_best,
        "length_penalty": args.length_penalty,
        "early_stopping": early,
    }


def beam_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the values by their options."""
    return {f"--{name.replace('_', '-')}": getattr(args, name) for name in ("beam", *_OF_SEARCH)}
