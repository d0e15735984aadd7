# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale translate``: a line of text in, a line of text out."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from contextlib import ExitStack, closing
from typing import Any, BinaryIO, Final, cast

from metrale.checkpoint import read_json_object
from metrale.cli.adapter_options import AdapterChoice, adapter_of, add_adapter_arguments
from metrale.cli.beam_options import add_beam_arguments, beam_settings, beams_of
from metrale.cli.console import Console
from metrale.cli.constraint_options import add_constraint_arguments, constraint_settings, constraints_of
from metrale.cli.destination import STANDARD, Destination, choose_destination
from metrale.cli.failure import DONE, USAGE, Failure
from metrale.cli.fingerprint import fingerprint
from metrale.cli.languages import english_of, list_languages, require_tokenizer
from metrale.cli.line_run import Asked, LineRun
from metrale.cli.lines import STANDARD_INPUT, Arguments, Lines, count_lines, open_input, regular_file
from metrale.cli.model_options import (
    ModelChoice,
    add_invariance_argument,
    add_model_arguments,
    add_order_argument,
    choose_model,
    device_of,
    limits_of,
)
from metrale.cli.sampling_options import add_sampling_arguments, sampling_of, sampling_settings
from metrale.cli.signals import Signals
from metrale.demo import DEMO_LANGUAGES
from metrale.nllb.languages import LANGUAGE_NAMES
from metrale.translator import Options, Translator

_DESCRIPTION: Final = """\
Translate each TEXT, or each line of the input, to one line of the output, in order. Both are UTF-8; a line that is not
ends the run with exit code 2, after the lines before it. A blank line gives a blank line, and so does one that cannot
be translated, with a warning. Put -- before a TEXT that starts with a dash."""
_EPILOG: Final = """\
With --json, each line is an object: text, source_text, source_lang, target_lang, token_ids, score (null without
--scores), finish_reason (eos, length, timeout or error), truncated, error, unknown (parts of the text that the model
does not know: start, stop, text, where), repeats (whether the translation is a loop); with --adapter also adapter;
with --scores, --n-best or --attention also hypotheses, the best first, each with text, token_ids (EOS and special
tokens included), score and token_logprobs; with --attention also attention, a row for each of the best one's
token_ids. An output made of a file has a record beside it, FILE.resume, until it is whole. Exit codes: 0 all is
translated, 1 some texts failed, 2 wrong usage, input or output, 3 a model or device that cannot be used, 4 a fault
in metrale itself, 130 interrupted, 143 terminated."""


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "translate",
        parents=[common],
        allow_abbrev=False,
        help="translate lines of text",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text to translate (default: lines of the input)")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="CODE",
        help="language of the texts (default: src_lang of the model's tokenizer_config.json, else English)",
    )
    parser.add_argument(
        "--to",
        dest="target",
        metavar="CODE",
        help="language to translate to (default: tgt_lang of tokenizer_config.json, fra_Latn for the demo model)",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="compute scores (log-probability over length); without --json, each line is score, tab, text",
    )
    parser.add_argument(
        "--attention",
        action="store_true",
        help="with --json: what each token attends to in the source, the mean over the decoder's layers and heads",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="most time for a line, counted from its reading; one that takes longer counts as not translated, and is "
        "written as far as it came",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors, and show no progress bar")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar, also on a terminal")
    parser.add_argument("--list-languages", action="store_true", help="list the model's language codes and stop")
    _add_file_arguments(parser)
    add_model_arguments(parser)
    add_order_argument(parser)
    add_invariance_argument(parser)
    add_sampling_arguments(parser)
    add_beam_arguments(parser)
    add_constraint_arguments(parser)
    add_adapter_arguments(parser)
    parser.set_defaults(run=run)


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--input", metavar="FILE", help="file to read (default, and -: standard input)")
    group.add_argument("--output", metavar="FILE", help="file to write, a new one (default, and -: standard output)")
    existing = group.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    existing.add_argument(
        "--resume", action="store_true", help="go on with an output that is not whole; begin it when there is none"
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    console = Console(quiet=args.quiet)
    model = choose_model(args, console.note)
    if args.list_languages:
        list_languages(model.path, as_json=args.json)
        return DONE
    device = device_of(args)
    sampling, beams, adapter = sampling_of(args), beams_of(args), adapter_of(args)
    if args.attention and not args.json:
        raise Failure(USAGE, "--attention has no effect without --json")
    with ExitStack() as stack:
        stream = _open_input(args, stack)
        destination = choose_destination(args, stream)
        if destination.mode == "finished":
            console.note(
                f"{destination.path} is finished: it has as many lines as the input (nothing else could be compared)"
            )
            return DONE
        languages = _languages(args, model, console)
        require_tokenizer(model.path)
        constraints = constraints_of(args, model.path)
        asked = _asked(args, languages, adapter, {"sampling": sampling, **beams, **constraints})
        texts = _texts(args, console, stream)
        bar = _wants_bar(args, console, destination, stream)
        total = count_lines(stream) if bar and stream is not None and regular_file(stream) else None
        signals = stack.enter_context(Signals())
        translator = stack.enter_context(_load(args, model, device, languages, adapter))
        translator.check_options(**asked.terms, **asked.options)  # before an output is touched
        settings = _settings(args, asked)
        folder = None if adapter is None else adapter.folder
        sink = destination.open(texts, lambda: fingerprint(translator.model, model.path, settings, folder))
        stack.enter_context(closing(sink))
        stack.enter_context(closing(console))
        if sink.dropped:
            console.warn(f"{sink.dropped} lines at the end of {destination.path} are not confirmed, and made again")
        if sink.lines:
            console.note(f"going on after {sink.lines} lines of {destination.path}")
        if bar:
            console.draw(total, sink.lines)
        return LineRun(args, texts, sink, console, signals).run(translator, asked)


def _open_input(args: argparse.Namespace, stack: ExitStack) -> BinaryIO | None:
    """Return the stream that lines are read from, or None when there are texts on the command line."""
    if args.texts:
        if args.input is not None:
            raise Failure(USAGE, "--input: expected no file when a TEXT is given")
        return None
    if args.input not in (None, STANDARD):
        return stack.enter_context(open_input(args.input, "--input"))
    if sys.stdin is None:
        raise Failure(USAGE, "standard input is closed, and no TEXT is given")
    return cast(BinaryIO, sys.stdin.buffer)


def _texts(args: argparse.Namespace, console: Console, stream: BinaryIO | None) -> Lines | Arguments:
    if stream is None:
        return Arguments(args.texts)
    if stream.isatty():
        console.note("type a line, then Enter; Ctrl-D at the start of a line ends")
    return Lines(stream, STANDARD_INPUT if args.input in (None, STANDARD) else args.input)


def _load(
    args: argparse.Namespace,
    model: ModelChoice,
    device: str,
    languages: tuple[str, str],
    adapter: AdapterChoice | None,
) -> Translator:
    source, target = languages
    adapted = {} if adapter is None else adapter.load_options
    return Translator(
        model.path,
        device=device,
        dtype=args.dtype,
        source=source,
        target=target,
        legacy_order=args.legacy_order,
        batch_invariant=args.batch_invariant,
        **limits_of(args),
        **adapted,
    )


def _asked(
    args: argparse.Namespace, languages: tuple[str, str], adapter: AdapterChoice | None, options: Options
) -> Asked:
    more: Options = {
        "return_scores": args.scores,
        "return_attention": args.attention,
        "timeout": args.timeout,
    }
    return Asked(*languages, args.target_prefix, None if adapter is None else adapter.name, {**options, **more})


def _settings(args: argparse.Namespace, asked: Asked) -> dict[str, object]:
    """Return the options that lines follow from."""
    limits = ("max_source_len", "max_new_tokens", "timeout")
    flags = ("json", "scores", "attention", "legacy_order", "batch_invariant")
    return {
        "--from": asked.source,
        "--to": asked.target,
        "--adapter": asked.adapter,
        **{f"--{name.replace('_', '-')}": getattr(args, name) for name in (*limits, *flags)},
        **sampling_settings(asked.options["sampling"]),
        **beam_settings(args),
        **constraint_settings(args, asked.options),
    }


def _wants_bar(args: argparse.Namespace, console: Console, destination: Destination, stream: BinaryIO | None) -> bool:
    """Return whether to show progress: of lines that nobody types, when they do not appear on a terminal themselves."""
    if args.no_progress or stream is None or not console.can_draw:
        return False
    if destination.path is None and sys.stdout is not None and sys.stdout.isatty():
        return False
    return not stream.isatty()


def _languages(args: argparse.Namespace, model: ModelChoice, console: Console) -> tuple[str, str]:
    """Return the codes asked for, or those of the checkpoint; whether the model has them is for the model to say."""
    path = model.path / "tokenizer_config.json"
    config = read_json_object(path) if path.exists() else {}
    defaults = {key: value for key, value in config.items() if isinstance(value, str) and value}
    source = args.source if args.source is not None else defaults.get("src_lang") or english_of(model.path)
    target = defaults.get("tgt_lang") if args.target is None else args.target
    if target is None:
        raise Failure(USAGE, f"--to is required: {model.path} names no target language of its own")
    if args.target is None:
        console.note(f"no --to is given: translating from {source} to {target}")
    unknown = [code for code in (source, target) if code not in DEMO_LANGUAGES and code in LANGUAGE_NAMES]
    if model.is_demo and unknown:
        console.warn(f"the demo model never learnt {', '.join(unknown)}; it knows {', '.join(DEMO_LANGUAGES)}")
    return str(source), str(target)
