# SPDX-License-Identifier: MIT OR Apache-2.0
"""An output that can be gone on with after its process was interrupted or killed, at whatever moment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

from metrale.cli.failure import USAGE, Failure
from metrale.cli.fingerprint import differences
from metrale.cli.lines import Lines
from metrale.cli.output_file import OutputFile
from metrale.cli.record import DIGEST_BYTES, Record, State

_SECONDS_BETWEEN_SYNCS: Final = 10.0
_CHUNK: Final = 1 << 20


def record_path(output: Path) -> Path:
    """Return where the record of an output lies."""
    return output.with_name(f"{output.name}.resume")


class Journal:
    """An output file together with its record: each line is put down in the record, then written.

    `begin` and `resume` make one, and close the file when they cannot.

    Attributes
    ----------
    lines, failed : int
        Lines in the output, and how many of them were not translated.
    dropped : int
        Whole lines at the end of the output that the record did not confirm.
    """

    resumable = True
    dropped = 0

    def __init__(self, file: OutputFile, record: Record, state: State, source: Any, output: Any) -> None:
        self._file = file
        self._record = record
        self._state = state
        self._source = source  # running digests, of the texts and of the output
        self._output = output
        self._synced = time.monotonic()

    @classmethod
    def begin(cls, file: OutputFile, fingerprint: Mapping[str, Any]) -> Journal:
        """Start with no line; what is in the file goes once the record says so."""
        record = Record.create(record_path(file.path), fingerprint)
        file.truncate(0)
        return cls(file, record, record.states[0], _digest(), _digest())

    @classmethod
    def resume(cls, file: OutputFile, fingerprint: Mapping[str, Any], lines: Lines) -> Journal:
        """Go on behind the lines that are in the file, and read as many from ``lines``.

        A last line that is not whole is dropped. Nothing is changed before everything has been checked.

        Raises
        ------
        Failure
            When the run was begun with other options or another model, or the output, or the lines of the input that it
            is made of, have changed.
        """
        record = Record(record_path(file.path))
        try:
            _check_fingerprint(file.path, record.fingerprint, fingerprint)
            state, output = _furthest(file, record)
            dropped = sum(chunk.count(b"\n") for chunk in _chunks(file, state.size, file.size))
            if dropped and not state.lines:  # nothing says that these are ours
                raise _changed(file.path)
            source = _read_again(lines, state, file.path)
        except BaseException:
            record.close()
            raise
        file.truncate(state.size)
        journal = cls(file, record, state, source, output)
        journal.dropped = dropped
        return journal

    @property
    def lines(self) -> int:
        return self._state.lines

    @property
    def failed(self) -> int:
        return self._state.failed

    def write(self, text: str, line: str, *, failed: bool) -> None:
        """Write the line that a text of the input came to.

        Raises
        ------
        OSError
            When it cannot be written; the lines before are whole, and it can be gone on from them.
        """
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        before = self._state
        self._source.update(_hashed(text))
        self._output.update(data)
        state = State(
            lines=before.lines + 1,
            size=before.size + len(data),
            failed=before.failed + failed,
            source=self._source.hexdigest(),
            output=self._output.hexdigest(),
        )
        self._record.note(state)
        self._file.append(data)
        self._state = state
        if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
            self._sync()

    def complete(self) -> None:
        """Say that all of the input is in the output; the record goes."""
        self._file.sync()
        self._record.remove()

    def close(self) -> None:
        """Bring everything to the disk and close."""
        try:
            self._sync()
        finally:
            self._record.close()
            self._file.close()

    def _sync(self) -> None:
        self._file.sync()
        self._record.settle(self._state)
        self._synced = time.monotonic()


def _check_fingerprint(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = differences(before, now)
    if found:
        raise Failure(USAGE, f"{path} cannot be gone on with: {'; '.join(found)} (--overwrite begins anew)")


def _furthest(file: OutputFile, record: Record) -> tuple[State, Any]:
    """Return the furthest recorded state that the output is in, and the running digest of its bytes."""
    for state in record.states:
        if state.size <= file.size:
            digest = _digest()
            for chunk in _chunks(file, 0, state.size):
                digest.update(chunk)
            if digest.hexdigest() == state.output:
                return state, digest
    raise _changed(file.path)


def _chunks(file: OutputFile, start: int, end: int) -> Iterator[bytes]:
    for position in range(start, end, _CHUNK):
        yield file.read(min(_CHUNK, end - position), position)


def _changed(path: Path) -> Failure:
    return Failure(USAGE, f"{path}: is not as it was written, and cannot be gone on with (--overwrite begins anew)")


def _read_again(lines: Lines, state: State, path: Path) -> Any:
    """Read the lines that are translated already, and return the running digest of them."""
    digest = _digest()
    for text in islice(lines, state.lines):
        digest.update(_hashed(text))
    if lines.count < state.lines or digest.hexdigest() != state.source:
        raise Failure(
            USAGE,
            f"{lines.name}: its first {state.lines} lines are not those that {path} was made of (--overwrite begins "
            "anew)",
        )
    return digest


def _hashed(text: str) -> bytes:
    return text.encode() + b"\n"


def _digest() -> Any:
    return blake2b(digest_size=DIGEST_BYTES)
