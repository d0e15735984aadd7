# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which output is meant, and whether it may be written: asked before a model is loaded, done after."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from metrale.cli.failure import USAGE, Failure
from metrale.cli.journal import Journal, record_path
from metrale.cli.lines import Lines, count_lines, regular_file
from metrale.cli.output_file import OutputFile
from metrale.cli.record import Record
from metrale.cli.sinks import PlainFile, Sink, StandardOutput

Mode = Literal["new", "begin", "overwrite", "resume", "device", "finished"]
STANDARD: Final = "-"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the lines go.

    Attributes
    ----------
    path : path or None
        None is standard output.
    mode : Mode
        What is done with what is there. ``begin`` is for a file that is empty, and must still be when it is opened;
        ``device`` is anything that is not a regular file; ``finished`` says that there is nothing left to do.
    resumable : bool
        Whether the input can be read again, so that a record is worth keeping.
    """

    path: Path | None
    mode: Mode
    resumable: bool

    def open(self, source: object, fingerprint: Callable[[], Mapping[str, Any]]) -> Sink:
        """Open it for writing.

        Parameters
        ----------
        source : Lines or other
            The input, of which a resumed run reads the lines that are translated already.
        fingerprint : callable
            Called when a record is read or written.

        Raises
        ------
        Failure, OSError
            When it cannot be written, or not be gone on with.
        """
        if self.path is None:
            return StandardOutput()
        file = OutputFile(self.path, new=self.mode == "new")
        try:
            if self.mode == "begin" and (file.size or os.path.lexists(record_path(self.path))):
                raise Failure(USAGE, f"{self.path}: another process has written it meanwhile")
            if self.mode == "resume":
                assert isinstance(source, Lines)
                return Journal.resume(file, fingerprint(), source)
            if self.resumable and self.mode != "device":
                return Journal.begin(file, fingerprint())
            if self.mode == "overwrite":
                record_path(self.path).unlink(missing_ok=True)  # of what was there before
                file.truncate(0)
            return PlainFile(file)
        except BaseException:
            if self.mode == "new":
                self.path.unlink()
            file.close()
            raise


def choose_destination(args: argparse.Namespace, stream: BinaryIO | None) -> Destination:
    """Return the output that the options name.

    Parameters
    ----------
    args : argparse.Namespace
    stream : binary stream or None
        The input; None when the texts are arguments.

    Raises
    ------
    Failure
        When it exists and neither ``--overwrite`` nor ``--resume`` is given, is the input itself, or cannot be resumed.
    OSError
        When its folder does not exist.
    """
    status = None if stream is None else regular_file(stream)
    if args.output in (None, STANDARD):
        for option in ("overwrite", "resume"):
            if getattr(args, option):
                raise Failure(USAGE, f"--{option} needs --output FILE")
        if sys.stdout is not None and status is not None:
            target = regular_file(sys.stdout.buffer)
            _refuse_input(status, target, "standard output")
        return Destination(None, "new", resumable=False)
    if not args.output:
        raise Failure(USAGE, "--output: expected a file, got ''")
    if args.resume and status is None:
        raise Failure(USAGE, "--resume needs an input that can be read again: --input FILE, a regular file")
    path = Path(args.output)
    mode = _mode(path, args, status, stream)
    return Destination(path, mode, resumable=status is not None)


def _mode(path: Path, args: argparse.Namespace, source: os.stat_result | None, stream: BinaryIO | None) -> Mode:
    if not os.path.lexists(path):
        os.stat(path.parent)
        _require_record(path)
        return "new"
    status = os.stat(path)
    if source is not None:
        _refuse_input(source, status, str(path))
    if stat.S_ISDIR(status.st_mode):
        raise Failure(USAGE, f"--output: {path} is a folder")
    if not stat.S_ISREG(status.st_mode):
        if args.resume:
            raise Failure(USAGE, f"--resume: {path} is no regular file")
        return "device"
    _require_record(path)
    if args.overwrite:
        return "overwrite"
    if not args.resume:
        raise Failure(USAGE, f"--output: {path} exists; --overwrite replaces it, --resume goes on with it")
    if record_path(path).exists():
        return "resume"
    assert stream is not None
    return _without_record(path, stream)


def _require_record(path: Path) -> None:
    """Refuse an output beside which there is something else that has its record's name."""
    if os.path.lexists(record := record_path(path)):
        Record(record).close()


def _without_record(path: Path, stream: BinaryIO) -> Mode:
    """Return what to do with an output that has no record beside it: a finished one has none."""
    with open(path, "rb") as file:
        there, wanted = count_lines(file), count_lines(stream)
    if there == wanted:
        return "finished"
    if not os.path.getsize(path):
        return "begin"
    name = record_path(path).name
    raise Failure(
        USAGE,
        f"--resume: {path} has {there} lines for {wanted} of the input, and no record ({name}) says what they are made "
        "of; --overwrite begins anew",
    )


def _refuse_input(source: os.stat_result, target: os.stat_result | None, name: str) -> None:
    if target is not None and os.path.samestat(source, target):
        raise Failure(USAGE, f"--output: {name} is the input itself")
