# SPDX-License-Identifier: MIT OR Apache-2.0
"""The small file beside an output that says what it is made of, and how far it has come."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from metrale.cli.failure import USAGE, Failure
from metrale.cli.output_file import sync_folder

FORMAT: Final = "metrale resume record 1"
DIGEST_BYTES: Final = 16
_SETTLED: Final = 2
_SLOTS: Final = 3
_NUMBER: Final = 20
_CHECK_BYTES: Final = 8
_SLOT_CHARACTERS: Final = 3 * (_NUMBER + 1) + 2 * (2 * DIGEST_BYTES + 1) + 2 * _CHECK_BYTES + 1
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class State:
    """How far an output has come.

    Attributes
    ----------
    lines, size, failed : int
        Lines in the output, the bytes they take, and how many of them were not translated.
    source : str
        Digest of the texts of that many lines of the input, each with LF.
    output : str
        Digest of those bytes.
    """

    lines: int
    size: int
    failed: int
    source: str
    output: str


class Record:
    """A JSON line with the fingerprint, then three slots of fixed size for states.

    The state of ``n`` lines goes to slot ``n % 2`` before line ``n`` is written. So whenever the process is killed, one
    of the two says how far the output has come. A machine that loses its power may keep a file's newer bytes and lose
    another's: for that, the third slot has a state whose output is known to be on the disk.

    Parameters
    ----------
    path : path
        An existing record; `create` makes one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fingerprint, self.states = _parse(path, _contents(path))
        self.fingerprint: Mapping[str, Any] = fingerprint
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._slots = os.fstat(self._fd).st_size - _SLOTS * _SLOT_CHARACTERS

    @classmethod
    def create(cls, path: Path, fingerprint: Mapping[str, Any]) -> Record:
        """Write the record of an output that has no line yet, whole or not at all, in the place of an earlier one.

        Raises
        ------
        Failure
            When there is something else of that name.
        """
        if os.path.lexists(path):
            _parse(path, _contents(path))
        header = json.dumps({"format": FORMAT, "fingerprint": fingerprint}) + "\n"
        beginning = _slot(State(0, 0, 0, empty_digest(), empty_digest()))
        descriptor, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # a name that nothing has
        try:
            with open(descriptor, "wb") as file:
                file.write((header + _SLOTS * beginning).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        sync_folder(path.parent)
        return cls(path)

    def note(self, state: State) -> None:
        """Put down the state that the output is about to have."""
        self._write(state.lines % _SETTLED, state)

    def settle(self, state: State) -> None:
        """Put down a state that the output has on the disk itself."""
        self._write(_SETTLED, state)
        os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the file: the output is whole."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, slot: int, state: State) -> None:
        data = _slot(state).encode("ascii")
        try:
            written = os.pwrite(self._fd, data, self._slots + slot * _SLOT_CHARACTERS)
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise
        assert written == len(data), "the file has its size already"


def empty_digest() -> str:
    """Return the digest of no bytes at all."""
    return blake2b(digest_size=DIGEST_BYTES).hexdigest()


def _contents(path: Path) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
        return b""
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES)


def _parse(path: Path, data: bytes) -> tuple[Mapping[str, Any], list[State]]:
    """Return the fingerprint, and the states in its slots that are whole, the furthest first."""
    header, _, rest = data.partition(b"\n")
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):
        content = None
    known = isinstance(content, dict) and content.get("format") == FORMAT
    if not known or not isinstance(content.get("fingerprint"), dict) or len(rest) != _SLOTS * _SLOT_CHARACTERS:
        raise Failure(USAGE, f"{path}: is no record of metrale translate; move it away, or choose another --output")
    slots = rest.decode("ascii", "replace").splitlines()
    states = {state for slot in slots if (state := _state(slot)) is not None}
    return content["fingerprint"], sorted(states, key=lambda state: state.lines, reverse=True)


def _slot(state: State) -> str:
    lines, size, failed, *digests = astuple(state)
    text = " ".join([*(f"{number:{_NUMBER}}" for number in (lines, size, failed)), *digests])
    return f"{text} {_check(text)}\n"


def _state(slot: str) -> State | None:
    text, _, check = slot.rpartition(" ")
    if check != _check(text):
        return None
    lines, size, failed, source, output = text.split()
    return State(int(lines), int(size), int(failed), source, output)


def _check(text: str) -> str:
    return blake2b(text.encode(), digest_size=_CHECK_BYTES).hexdigest()
