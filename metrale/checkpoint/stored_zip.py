# SPDX-License-Identifier: MIT OR Apache-2.0
"""A zip archive whose entries are stored as they are, so that any part of one can be read from its place."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np

from metrale.checkpoint.file_bytes import FileBytes
from metrale.errors import CheckpointError

MAX_DIRECTORY_BYTES: Final = 8 << 20
"""Largest list of entries that is read; an entry takes about 100 bytes of it."""

_MOST_PROBLEMS: Final = 20
"""A damaged archive of many entries is not described to its end."""

_SIGNATURE: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_ENCRYPTED: Final = 1
_UTF8: Final = 0x800


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an entry's bytes are in the file."""

    start: int
    size: int


class StoredZip:
    """An open archive. Checksums are not looked at: parts of entries have none.

    Parameters
    ----------
    path : Path
        A regular file.

    Attributes
    ----------
    bytes : FileBytes
        The file.
    entries : mapping of str to Entry
    size : int
        Bytes of the file.

    Raises
    ------
    CheckpointError
        When the file cannot be read, is no complete archive, or has entries that are compressed, encrypted, named
        twice, or that share bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = FileBytes(path)
        try:
            self.entries: Mapping[str, Entry] = MappingProxyType(self._read_directory())
        except BaseException:
            self.bytes.close()
            raise

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return an entry, when it has ``max_bytes`` at most.

        Raises
        ------
        CheckpointError
            When there is no such entry, it is larger, or the file has become shorter.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(self.path, f"is an archive without {name}")
        if entry.size > max_bytes:
            raise CheckpointError(self.path, f"{name} has {entry.size} bytes; {max_bytes} at most are read")
        return self._read_at(entry.start, entry.size)

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self.bytes.close()

    def _read_at(self, position: int, size: int) -> bytes:
        data = np.empty(size, np.uint8)
        self.bytes.read(position, data)
        return data.tobytes()

    def _read_directory(self) -> dict[str, Entry]:
        try:
            with self.path.open("rb", buffering=0) as file:
                self.size = os.fstat(file.fileno()).st_size
                with zipfile.ZipFile(cast("Any", _Bounded(file))) as archive:
                    infos, end = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, struct.error) as error:
            raise CheckpointError(self.path, f"is not a complete archive ({self.size} bytes): {error}") from error
        problems: list[str] = []
        entries: dict[str, Entry] = {}
        for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
            entry = self._entry(info, end, problems)
            if info.orig_filename in entries:
                problems.append(f"entry {info.orig_filename!r} is there twice")
            if entry is not None:
                entries[info.orig_filename] = entry
            end = info.header_offset
            if len(problems) == _MOST_PROBLEMS:
                break
        if problems:
            raise CheckpointError(self.path, problems)
        return entries

    def _entry(self, info: zipfile.ZipInfo, end: int, problems: list[str]) -> Entry | None:
        """Return where an entry is that must end before ``end``, or add what is wrong with it."""
        name = info.orig_filename
        if info.flag_bits & _ENCRYPTED:
            problems.append(f"entry {name!r} is encrypted")
        elif info.compress_type != zipfile.ZIP_STORED:
            problems.append(
                f"entry {name!r} is compressed, which torch.save never does: unpack the archive and pack it again "
                "without compression (zip -0), or save it anew"
            )
        elif info.file_size != info.compress_size:
            problems.append(f"entry {name!r} has two sizes, {info.file_size} and {info.compress_size}")
        elif (start := self._data_start(info, end)) is None or start + info.file_size > end:
            problems.append(f"entry {name!r} is not where the list of entries says, or shares bytes with another")
        else:
            return Entry(start, info.file_size)
        return None

    def _data_start(self, info: zipfile.ZipInfo, end: int) -> int | None:
        """Return where the bytes of an entry start, by the header before them; None when that is another entry's."""
        at = info.header_offset
        if not 0 <= at <= end - _LOCAL_HEADER.size:
            return None
        signature, *_, name_size, extra_size = _LOCAL_HEADER.unpack(self._read_at(at, _LOCAL_HEADER.size))
        start = int(at + _LOCAL_HEADER.size + name_size + extra_size)
        if signature != _SIGNATURE or start > end:
            return None
        name = self._read_at(at + _LOCAL_HEADER.size, name_size)
        written = name.decode("utf-8" if info.flag_bits & _UTF8 else "cp437", "replace")
        return start if written == info.orig_filename else None


class _Bounded:
    """A file for `zipfile.ZipFile`, which would read a list of entries of any size."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its list of entries has {size} bytes; {MAX_DIRECTORY_BYTES} at most are read")
        return self._file.read(MAX_DIRECTORY_BYTES if size < 0 else size) or b""
