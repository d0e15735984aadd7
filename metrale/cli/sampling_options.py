# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options that say how tokens are chosen."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final

from metrale.cli.failure import USAGE, Failure
from metrale.model import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    kind: type[int] | type[float]
    metavar: str
    help: str


_OPTIONS: Final = {
    "temperature": _Option(
        "--temperature", float, "T", "0 takes the likeliest token, more draws one, the more evenly the larger it is"
    ),
    "top_k": _Option("--top-k", int, "K", "draw from the K likeliest tokens; 0 is all"),
    "top_p": _Option("--top-p", float, "P", "draw from the likeliest tokens that together have this probability"),
    "min_p": _Option(
        "--min-p", float, "P", "draw from the tokens with at least this share of the likeliest one's probability"
    ),
    "seed": _Option("--seed", int, "N", "of the draws: the same seed and texts give the same output"),
    "repetition_penalty": _Option(
        "--repetition-penalty", float, "X", "above 1, tokens that are there already become less likely"
    ),
    "no_repeat_ngram_size": _Option("--no-repeat-ngram", int, "N", "no N tokens in a row come twice; 0 allows it"),
    "min_new_tokens": _Option("--min-new-tokens", int, "N", "least tokens of a translation, language included"),
}
"""By the fields of `SamplingParams`."""

_OF_DRAWS: Final = ("top_k", "top_p", "min_p")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--temperature`` and its like."""
    group = parser.add_argument_group("choice of tokens")
    for field, option in _OPTIONS.items():
        group.add_argument(
            option.name,
            dest=field,
            type=option.kind,
            default=getattr(GREEDY, field),
            metavar=option.metavar,
            help=f"{option.help} (default: %(default)s)",
        )


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Return what the options come to.

    Raises
    ------
    Failure
        When one has no effect, because nothing is drawn.
    InvalidInput
        When a value is out of range.
    """
    params = SamplingParams(**{field: getattr(args, field) for field in _OPTIONS})
    idle = [field for field in _OF_DRAWS if getattr(params, field) != getattr(GREEDY, field)]
    if idle and params.temperature == 0:
        raise Failure(USAGE, f"{_OPTIONS[idle[0]].name} has no effect without --temperature above 0")
    return params


def sampling_settings(params: SamplingParams) -> dict[str, object]:
    """Return the values by their options."""
    return {option.name: getattr(params, field) for field, option in _OPTIONS.items()}
