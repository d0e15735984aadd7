# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options that say what a translation begins with, ends with, and may not contain."""

from __future__ import annotations

import argparse
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

from metrale.cli.failure import USAGE, Failure
from metrale.cli.languages import tokenizer_of
from metrale.cli.lines import Lines, open_input
from metrale.translator import Options


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--target-prefix`` and its like."""
    group = parser.add_argument_group("constraints")
    group.add_argument(
        "--target-prefix", metavar="TEXT", help="what every translation begins with; it counts as part of it"
    )
    group.add_argument(
        "--bad-words",
        metavar="FILE",
        help="words and phrases that may not occur, one a line (UTF-8), each just as it is written and tokenised there",
    )
    group.add_argument(
        "--suppress-tokens", type=_ids, default=(), metavar="IDS", help="token ids that are never chosen: 17,250"
    )
    group.add_argument(
        "--forced-eos", action="store_true", help="end a translation that reaches --max-new-tokens with EOS"
    )


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ids with commas between them, got {text!r}") from None


def constraints_of(args: argparse.Namespace, model: Path) -> Options:
    """Return what the options come to, as keyword arguments of the translator, without the prefix.

    Parameters
    ----------
    args : argparse.Namespace
    model : path
        The checkpoint's folder, whose tokenizer makes ids of bad words.

    Raises
    ------
    Failure
        When the file of bad words has none, or the prefix is blank.
    CheckpointError
        When the folder's tokenizer cannot be read.
    OSError
        When the file cannot be.
    """
    if args.target_prefix is not None and not args.target_prefix.strip():
        raise Failure(USAGE, f"--target-prefix: expected a text, got {args.target_prefix!r}")
    words: list[list[int]] | None = None
    if args.bad_words is not None:
        tokenizer = tokenizer_of(model)
        with closing(open_input(args.bad_words, "--bad-words")) as file:
            words = [ids for ids in map(tokenizer.encode, Lines(file, args.bad_words)) if ids]
        if not words:
            raise Failure(USAGE, f"--bad-words: {args.bad_words} has no words")
    return {
        "bad_words_ids": words,
        "suppress_tokens": args.suppress_tokens or None,
        "forced_eos": args.forced_eos,
    }


def constraint_settings(args: argparse.Namespace, constraints: Options) -> dict[str, object]:
    """Return the values by their options; of bad words their number, and a digest of their ids."""
    words = constraints["bad_words_ids"]
    digest = None
    if words is not None:
        digest = f"{len(words)} phrases, {blake2b(repr(words).encode(), digest_size=16).hexdigest()}"
    return {
        "--target-prefix": args.target_prefix,
        "--bad-words": digest,
        "--suppress-tokens": ",".join(map(str, args.suppress_tokens)) or None,
        "--forced-eos": args.forced_eos,
    }
