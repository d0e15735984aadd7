# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale translate``: a line of text in, a line of text out."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from metrale.checkpoint import read_json_object
from metrale.cli.failure import DONE, SOME_FAILED, UNUSABLE, USAGE, Failure, say
from metrale.cli.lines import read_windows, windows_of
from metrale.cli.model_options import ModelChoice, add_model_arguments, choose_model, device_of, limits_of
from metrale.cli.output import Counter, one_line, to_json, write_lines
from metrale.demo import DEMO_LANGUAGES
from metrale.nllb.admission import FRAME_LEN
from metrale.nllb.languages import LANGUAGE_NAMES
from metrale.nllb.tokenizer import MODEL_FILE, NllbTokenizer
from metrale.translator import Translation, Translator

_BATCHES_PER_WINDOW: Final = 8
_JSON_KEYS: Final = (
    "text",
    "source_text",
    "source_lang",
    "target_lang",
    "token_ids",
    "score",
    "finish_reason",
    "truncated",
    "error",
)
_DESCRIPTION: Final = """\
Translate each TEXT, or each line of standard input, to one line of standard output, in order. Input and output are
UTF-8; a line that is not valid UTF-8 ends the run with exit code 2, after the lines before it. A blank line gives a
blank line, and so does one that cannot be translated, with a warning. Put -- before a TEXT that starts with a dash."""
_EPILOG: Final = """\
With --json, each line is an object: text, source_text, source_lang, target_lang, token_ids, score (null without
--scores), finish_reason (eos, length or error), truncated, error. Exit codes: 0 all is translated, 1 some texts failed,
2 wrong usage or input, 3 a model or device that cannot be used, 4 a fault in metrale itself, 130 interrupted."""


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
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text to translate (default: lines of standard input)")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="CODE",
        help="language of the texts (default: src_lang of the model's tokenizer_config.json, else eng_Latn)",
    )
    parser.add_argument(
        "--to",
        dest="target",
        metavar="CODE",
        help="language to translate to (default: tgt_lang of tokenizer_config.json, fra_Latn for the demo model)",
    )
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    parser.add_argument(
        "--scores",
        action="store_true",
        help="compute scores (mean log-probability of a token); without --json, each line is score, tab, text",
    )
    parser.add_argument("--list-languages", action="store_true", help="list the model's language codes and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    model = choose_model(args)
    if args.list_languages:
        _list_languages(model.path, as_json=args.json)
        return DONE
    device = device_of(args)
    if not args.texts and sys.stdin is None:
        raise Failure(USAGE, "standard input is closed, and no TEXT is given")
    source, target = _languages(args, model)
    if not (model.path / MODEL_FILE).exists():
        raise Failure(UNUSABLE, f"{model.path}: holds no tokenizer ({MODEL_FILE})")
    with Translator(model.path, device=device, dtype=args.dtype, source=source, target=target, **limits_of(args)) as tr:
        return _Run(tr, args, source, target).all_windows()


def _languages(args: argparse.Namespace, model: ModelChoice) -> tuple[str, str]:
    """Return the codes asked for, or those of the checkpoint; whether the model has them is for the model to say."""
    path = model.path / "tokenizer_config.json"
    config = read_json_object(path) if path.exists() else {}
    defaults = {key: value for key, value in config.items() if isinstance(value, str) and value}
    source = defaults.get("src_lang", "eng_Latn") if args.source is None else args.source
    target = defaults.get("tgt_lang") if args.target is None else args.target
    if target is None:
        raise Failure(USAGE, f"--to is required: {model.path} names no target language of its own")
    if args.target is None:
        say(f"note: no --to is given: translating from {source} to {target}")
    unknown = [code for code in (source, target) if code not in DEMO_LANGUAGES and code in LANGUAGE_NAMES]
    if model.is_demo and unknown:
        say(f"warning: the demo model never learnt {', '.join(unknown)}; it knows {', '.join(DEMO_LANGUAGES)}")
    return str(source), str(target)


def _list_languages(path: Path, *, as_json: bool) -> None:
    pairs = [(code, LANGUAGE_NAMES.get(code, "")) for code in NllbTokenizer.from_dir(path).languages]
    if as_json:
        write_lines([to_json({"code": code, "name": name}) for code, name in pairs])
    else:
        write_lines([f"{code}  {name}".rstrip() for code, name in pairs])


class _Run:
    """One run over all texts: counts lines, writes results, warns of what went wrong."""

    def __init__(self, translator: Translator, args: argparse.Namespace, source: str, target: str) -> None:
        self._translator = translator
        self._args = args
        self._languages = source, target
        self._unit = "text" if args.texts else "line"
        self._size = _BATCHES_PER_WINDOW * args.max_batch
        self._counter = Counter(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
        self._done = 0
        self._failed = 0

    def all_windows(self) -> int:
        """Translate everything and return the exit code."""
        for window in self._windows():
            # a window that is not full is the whole input, or waits for somebody who types: nothing to count
            counter = self._counter if self._done or len(window) == self._size else None
            try:
                results = self._translate(window, counter)
            finally:
                if counter is not None:
                    counter.clear()
            write_lines([self._line(text, result) for text, result in zip(window, results, strict=True)])
            for number, result in enumerate(results, self._done + 1):
                self._warn(f"{self._unit} {number}", result)
            self._done += len(window)
        if self._failed:
            say(f"warning: {self._failed} of {self._done} {self._unit}s were not translated")
        return SOME_FAILED if self._failed else DONE

    def _windows(self) -> Iterator[list[str]]:
        if self._args.texts:
            return windows_of(self._args.texts, self._size)
        if sys.stdin.isatty():
            say("note: type a line, then Enter; Ctrl-D at the start of a line ends")
        return read_windows(cast(io.BufferedIOBase, sys.stdin.buffer), self._size)

    def _translate(self, window: list[str], counter: Counter | None) -> list[Translation]:
        source, target = self._languages
        before = self._done
        return self._translator.translate(
            window,
            source,
            target,
            max_new_tokens=self._args.max_new_tokens,
            return_scores=self._args.scores,
            progress=None if counter is None else lambda finished: counter.show(before + finished),
        )

    def _line(self, text: str, result: Translation) -> str:
        if self._args.json:
            fields = {**result.to_dict(), "source_text": text}
            return to_json({key: fields[key] for key in _JSON_KEYS})
        line = one_line(result.text)
        if not self._args.scores:
            return line
        return f"{'' if result.score is None else format(result.score, '.4f')}\t{line}"

    def _warn(self, place: str, result: Translation) -> None:
        if result.finish_reason == "error":
            self._failed += 1
            say(f"warning: {place}: not translated: {result.error}")
            return
        if result.truncated:
            most = self._args.max_source_len - FRAME_LEN
            say(f"warning: {place}: only its first {most} tokens were translated (--max-source-len)")
        if result.finish_reason == "length":
            most = self._args.max_new_tokens
            say(f"warning: {place}: the translation was stopped at {most} tokens (--max-new-tokens)")
