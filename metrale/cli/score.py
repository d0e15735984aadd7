# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale score``: a text and its translation in, how likely that is out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, BinaryIO, Final, cast

from metrale.cli.adapter_options import adapter_of, add_adapter_arguments
from metrale.cli.console import Console
from metrale.cli.failure import DONE, SOME_FAILED, USAGE, Failure
from metrale.cli.lines import STANDARD_INPUT, Lines, count_lines, open_input, regular_file
from metrale.cli.model_options import (
    add_invariance_argument,
    add_model_arguments,
    add_order_argument,
    choose_model,
    device_of,
    limits_of,
)
from metrale.cli.notices import Notices
from metrale.cli.output import to_json, write_lines
from metrale.errors import InvalidInput
from metrale.translator import Scored, Translator

_DESCRIPTION: Final = """\
Score translations that are there already: for each pair of a text and its translation, one line with its score, the
log-probability over the length, which counts the language and EOS. Pairs are the lines of two files, or lines of the
input with a tab between the two. A pair that cannot be scored, because its translation is longer than --max-new-tokens,
gives a blank line, with a warning."""
_EPILOG: Final = """\
With --json, each line is an object: source_text, target_text, source_lang, target_lang, score, token_ids (of the
target, EOS included), token_logprobs, truncated (whether the text was too long and only its beginning looked at),
adapter, error, unknown (what the model does not know of the two: start, stop, text, where). Exit codes: as those of
translate."""
_BATCHES_AT_A_TIME: Final = 2

Pair = tuple[str, str]


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "score",
        parents=[common],
        allow_abbrev=False,
        help="score translations that are there already",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--from", dest="source", metavar="CODE", required=True, help="language of the texts")
    parser.add_argument("--to", dest="target", metavar="CODE", required=True, help="language of the translations")
    parser.add_argument("--source-file", metavar="FILE", help="file with a text in each line")
    parser.add_argument("--target-file", metavar="FILE", help="file with their translations, line by line")
    parser.add_argument("--input", metavar="FILE", help="file of pairs with a tab in between (default: standard input)")
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors, and show no progress bar")
    add_model_arguments(parser)
    add_order_argument(parser)
    add_invariance_argument(parser)
    add_adapter_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    console = Console(quiet=args.quiet)
    model = choose_model(args, console.note)
    device, adapter = device_of(args), adapter_of(args)
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(stream)) for stream in _streams(args)] or [_standard_input()]
        lines = _lines(args, streams)
        adapted = {} if adapter is None else adapter.load_options
        languages = {"source": args.source, "target": args.target}
        flags = {"legacy_order": args.legacy_order, "batch_invariant": args.batch_invariant}
        options = {"device": device, "dtype": args.dtype, **flags, **limits_of(args), **languages, **adapted}
        translator = stack.enter_context(Translator(model.path, **options))
        stack.enter_context(closing(console))
        if console.can_draw and not (sys.stdout is not None and sys.stdout.isatty()):
            console.draw(count_lines(streams[0]) if regular_file(streams[0]) else None, 0)
        name = None if adapter is None else adapter.name
        done = failed = 0
        notices = Notices(console, "pair")
        stack.callback(notices.end)
        for chunk in _chunks(lines, _BATCHES_AT_A_TIME * args.max_batch):
            for pair, result in zip(chunk, _scored(translator, chunk, name), strict=True):
                done += 1
                failed += isinstance(result, InvalidInput)
                write_lines([_line(args, pair, result)])
                _warn(console, notices, done, result)
                console.advance()
    if failed:
        console.warn(f"{failed} of {done} pairs were not scored")
    return SOME_FAILED if failed else DONE


def _streams(args: argparse.Namespace) -> list[BinaryIO]:
    """Return the files that are named, open: none, one with pairs, or two."""
    if (args.source_file is None) != (args.target_file is None):
        raise Failure(USAGE, "--source-file and --target-file need each other")
    if args.source_file is None:
        return [] if args.input in (None, "-") else [open_input(args.input, "--input")]
    if args.input is not None:
        raise Failure(USAGE, "--input: expected no file when --source-file is given")
    first = open_input(args.source_file, "--source-file")
    try:
        return [first, open_input(args.target_file, "--target-file")]
    except BaseException:
        first.close()
        raise


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise Failure(USAGE, "standard input is closed, and no file is given")
    return cast(BinaryIO, sys.stdin.buffer)


def _lines(args: argparse.Namespace, streams: list[BinaryIO]) -> list[Lines]:
    """Return the lines of each stream."""
    one = STANDARD_INPUT if args.input in (None, "-") else args.input
    names = [one] if len(streams) == 1 else [args.source_file, args.target_file]
    return [Lines(stream, name) for stream, name in zip(streams, names, strict=True)]


def _pairs(lines: list[Lines]) -> Iterator[Pair]:
    """Yield the pairs as they are read.

    Raises
    ------
    Failure
        At a line that is no pair, and at the end when one file has more lines than the other.
    """
    sources, targets = lines[0], lines[-1]
    if len(lines) == 1:
        for text in sources:
            source, *rest = text.split("\t")
            if len(rest) != 1:
                raise Failure(USAGE, f"{sources.name}, line {sources.count}: expected a text, a tab, its translation")
            yield source, rest[0]
        return
    for source in sources:
        target = next(targets, None)
        if target is None:
            raise Failure(USAGE, f"{targets.name}: has {targets.count} lines, fewer than {sources.name}")
        yield source, target
    if next(targets, None) is not None:
        raise Failure(USAGE, f"{targets.name}: has more lines than the {sources.count} of {sources.name}")


def _chunks(lines: list[Lines], size: int) -> Iterator[list[Pair]]:
    """Yield pairs, so many at a time, fewer when the next one would be waited for.

    Those before a line that is no pair come before its error.
    """
    chunk: list[Pair] = []
    try:
        for pair in _pairs(lines):
            chunk.append(pair)
            if len(chunk) == size or any(one.waits for one in lines):
                yield chunk
                chunk = []
    except Failure as error:
        yield chunk
        raise error from None
    yield chunk


def _scored(translator: Translator, chunk: list[Pair], adapter: str | None) -> list[Scored | InvalidInput]:
    """Return what pairs come to, or why one cannot be scored."""
    sources, targets = [pair[0] for pair in chunk], [pair[1] for pair in chunk]
    try:
        return list(translator.score(sources, targets, adapter=adapter))
    except InvalidInput as error:
        if len(chunk) == 1:
            return [error]
    return [one for pair in chunk for one in _scored(translator, [pair], adapter)]


def _line(args: argparse.Namespace, pair: Pair, result: Scored | InvalidInput) -> str:
    if not args.json:
        return "" if isinstance(result, InvalidInput) else format(result.score, ".4f")
    fields: dict[str, Any] = {"source_text": pair[0], "target_text": pair[1]}
    fields |= {"source_lang": args.source, "target_lang": args.target}
    fields |= dict.fromkeys(("score", "token_ids", "token_logprobs", "truncated", "adapter", "error", "unknown"))
    found = {"error": _reason(result)} if isinstance(result, InvalidInput) else result.to_dict()
    return to_json({**fields, **found})


def _reason(error: InvalidInput) -> str:
    return f"{error.argument.partition('[')[0].removesuffix('s')}: expected {error.expected}, got {error.got}"


def _warn(console: Console, notices: Notices, number: int, result: Scored | InvalidInput) -> None:
    if isinstance(result, InvalidInput):
        console.warn(f"pair {number}: not scored: {_reason(result)}")
        return
    notices.unknown(f"pair {number}", result.unknown)
    if result.truncated:
        console.warn(f"pair {number}: only the beginning of its text was looked at (--max-source-len)")
