# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts through a translator and on to an output, one line for each, until they end or somebody stops it."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from metrale.cli.console import Console
from metrale.cli.failure import DONE, SIGNALLED, SOME_FAILED, UNUSABLE, USAGE, Failure, say
from metrale.cli.lines import Arguments, Lines
from metrale.cli.notices import Notices
from metrale.cli.output import discard_stdout, one_line, to_json
from metrale.cli.signals import Signals
from metrale.cli.sinks import Sink
from metrale.nllb.admission import FRAME_LEN
from metrale.translator import Options, Translation, Translator

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
    "unknown",
    "repeats",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """How every text is translated.

    Attributes
    ----------
    source, target : str
        Language codes.
    prefix, adapter : str or None
    options : Options
    """

    source: str
    target: str
    prefix: str | None
    adapter: str | None
    options: Options

    @property
    def terms(self) -> dict[str, Any]:
        """All but the options, as keyword arguments of the translator."""
        return {
            "source": self.source,
            "target": self.target,
            "target_prefix": self.prefix,
            "adapter": self.adapter,
        }


class LineRun:
    """One run over all texts: writes results, warns of what went wrong, ends as it has to.

    Parameters
    ----------
    args : argparse.Namespace
    source : Lines or Arguments
        The texts.
    sink : Sink
        Where their lines go. It may have lines of an earlier run; ``source`` is behind their texts then.
    console : Console
    signals : Signals
    """

    def __init__(
        self,
        args: argparse.Namespace,
        source: Lines | Arguments,
        sink: Sink,
        console: Console,
        signals: Signals,
    ) -> None:
        self._args = args
        self._source = source
        self._sink = sink
        self._console = console
        self._signals = signals
        self._unit = "text" if args.texts else "line"
        self._notices = Notices(console, self._unit)
        self._texts: deque[str] = deque()  # those that are being translated

    def run(self, translator: Translator, asked: Asked) -> int:
        """Translate everything and return the exit code.

        Raises
        ------
        Failure
            When the input is not UTF-8, after the lines before it, or the output cannot be written.
        """
        stream = translator.stream(self._read(), **asked.terms, first_index=self._sink.lines, **asked.options)
        try:
            with closing(stream):
                self._signals.arm(stream.cancel)
                for result in stream:
                    if result.finish_reason == "cancelled" or not self._put(result):
                        break
        except Exception:
            self._console.close()
            self._notices.end()
            if self._sink.resumable:
                self._console.note(f"{self._lines(self._sink.lines)} written; --resume goes on")
            raise
        return self._end()

    def _read(self) -> Iterator[str]:
        """Yield the texts and keep them, for their results to meet them again. On the stream's thread."""
        for text in self._source:
            self._texts.append(text)
            yield text

    def _put(self, result: Translation) -> bool:
        """Write a result; return False when nobody reads on and the run was stopped anyway."""
        text = self._texts.popleft()
        failed = result.finish_reason in ("error", "timeout")
        try:
            self._sink.write(text, self._line(text, result), failed=failed)
        except BrokenPipeError:
            if self._signals.received is None:
                raise
            discard_stdout()
            return False
        except OSError as error:
            where = "standard output" if error.filename is None else error.filename
            raise Failure(USAGE, f"{where}: {error.strerror}, after {self._lines(self._sink.lines)}") from error
        self._warn(f"{self._unit} {self._sink.lines}", result)
        self._console.advance()
        return True

    def _end(self) -> int:
        """Say how it ended, and return the exit code."""
        self._console.close()
        self._notices.end()
        done = self._sink.lines
        if not (self._source.ended and done == self._source.count):
            if self._signals.received is None:
                raise Failure(UNUSABLE, f"the engine was stopped after {self._lines(done)}")
            say(f"interrupted after {self._lines(done)}{'; --resume goes on' if self._sink.resumable else ''}")
            return SIGNALLED + self._signals.received
        self._sink.complete()
        if self._sink.failed:
            self._console.warn(f"{self._sink.failed} of {self._lines(done)} were not translated")
        return SOME_FAILED if self._sink.failed else DONE

    def _line(self, text: str, result: Translation) -> str:
        if self._args.json:
            fields = {**result.to_dict(), "source_text": text}
            return to_json({key: fields.get(key) for key in (*_JSON_KEYS, *_keys_on_request(self._args))})
        line = one_line(result.text)
        if not self._args.scores:
            return line
        return f"{'' if result.score is None else format(result.score, '.4f')}\t{line}"

    def _warn(self, place: str, result: Translation) -> None:
        self._notices.unknown(place, result.unknown, of_prefix=True)
        if result.finish_reason == "error":
            self._console.warn(f"{place}: not translated: {result.error}")
            return
        if result.truncated:
            most = self._args.max_source_len - FRAME_LEN
            self._console.warn(f"{place}: only its first {most} tokens were translated (--max-source-len)")
        if result.finish_reason == "timeout":
            self._console.warn(f"{place}: not finished within {self._args.timeout:g} s (--timeout)")
        if result.finish_reason == "length" or self._end_was_forced(result):
            most = self._args.max_new_tokens
            self._console.warn(f"{place}: the translation was stopped at {most} tokens (--max-new-tokens)")
        if result.repeats:
            self._notices.repeats(place)

    def _end_was_forced(self, result: Translation) -> bool:
        """Return whether EOS, by --forced-eos, comes where there was room for nothing else."""
        ids = result.hypotheses[0].token_ids if result.hypotheses else ()
        return bool(self._args.forced_eos) and len(ids) + 1 >= self._args.max_new_tokens  # and the language

    def _lines(self, count: int) -> str:
        return f"{count} {self._unit}{'' if count == 1 else 's'}"


def _keys_on_request(args: argparse.Namespace) -> Iterator[str]:
    if args.adapter:
        yield "adapter"
    if args.scores or args.attention or args.n_best > 1:
        yield "hypotheses"
    if args.attention:
        yield "attention"
