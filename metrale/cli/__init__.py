# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ``metrale`` command: translate, score, inspect, convert, bench and doctor.

Exit codes: 0 done, 1 some texts were not translated or cases not timed, 2 wrong usage or input, 3 a model or device
that cannot be used, 4 a fault in metrale itself, 130 interrupted, 143 terminated. Errors are one line, on standard
error.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import metrale
from metrale.cli import bench, convert, doctor, inspect, score, translate
from metrale.cli.failure import DONE, INTERRUPTED, USAGE, Failure, describe, say
from metrale.cli.output import discard_stdout


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise Failure(USAGE, f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str or None
        The arguments after the command's name; None takes those of this process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments  # also for the errors of a command line that cannot be parsed
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough: `metrale ... | head -1`
        discard_stdout()
        return DONE
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, message = describe(error)
        say(f"error: {message}")
        return code


def _run(arguments: list[str]) -> int:
    parser = _build_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        args = parser.parse_args(arguments)
    except SystemExit as done:  # --help and --version
        sys.stdout.flush()
        return int(done.code or DONE)
    quiet = getattr(args, "quiet", False)
    with _log(args.debug, quiet), warnings.catch_warnings():  # it also puts the function back that shows them
        warnings.showwarning = _show_warning
        if quiet:
            warnings.simplefilter("ignore")
        code: int = args.run(args)
    sys.stdout.flush()
    return code


class _Aloud(logging.Handler):
    """Prints log messages as the command's own warnings are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _log(debug: bool, quiet: bool) -> Iterator[None]:
    """Show log messages in a ``with`` block: warnings and errors; errors, if ``quiet``; with ``debug`` all of them."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
        yield
        return
    handler = _Aloud(logging.ERROR if quiet else logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a library's warning as the command's own ones are printed."""
    say(f"warning: {message}")


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="metrale",
        allow_abbrev=False,
        description=metrale.__doc__,
        epilog="Exit codes: 0 done, 1 some texts were not translated or cases not timed, 2 wrong usage or input, 3 a "
        "model or device that cannot be used, 4 a fault in metrale itself, 130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"metrale {metrale.__version__}")
    parser.add_argument("--debug", action="store_true", help="show log messages, and where an error comes from")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (translate, score, inspect, convert, bench, doctor):
        command.add_parser(commands, common)
    return parser
