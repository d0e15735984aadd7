# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files and archives that are no checkpoint of PyTorch, damaged ones, and ones that lie about their entries."""

from __future__ import annotations

import os
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from metrale.checkpoint import FLOAT_DTYPES, open_checkpoint
from metrale.errors import CheckpointError
from tests.checkpoint.refusing import refusal
from tests.checkpoint.torch_files import Storage, Tensor, write_archive, write_bin

ONE = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M", "of the form that PyTorch saved before version 1.6"),
        (b"\0" * 257 + b"ustar\0", "of the form that PyTorch saved before version 1.6"),
        (b"<!DOCTYPE html>", "is not a file of torch.save (15 bytes)"),
        (pickle.dumps({"a": 1}), "is not a file of torch.save"),
        (b"PK\x03\x04", "is not a complete archive (4 bytes)"),
        (b"PK\x03\x04" + b"\0" * 100_000, "is not a complete archive"),
        (b"PK\x05\x06" + b"\0" * 18, "is not a file of torch.save"),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    assert reason in refusal(tmp_path / "a.bin")


def test_places_that_are_no_file(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "a.bin")
    os.mkfifo(tmp_path / "a.bin")  # opening it would block
    assert "is not a regular file" in refusal(tmp_path / "a.bin")
    assert "is not a regular file" in refusal(tmp_path)


def test_archives_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_archive(path, [("weights.npy", b"abc")])
    assert "is an archive with 0 data.pkl" in refusal(path)
    write_archive(path, [("a/data.pkl", b"abc")])
    assert "is an archive with 0 data.pkl" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"")
        archive.writestr("b/data.pkl", b"")
    assert "is an archive with 2 data.pkl" in refusal(path)
    write_bin(path, {"w": ONE}, more={"constants.pkl": b"", "code/model.py": b""})
    assert "is a TorchScript archive" in refusal(path)
    write_bin(path, {"w": ONE}, byteorder="big")
    assert "byte order b'big', expected b'little'" in refusal(path)
    write_bin(path, {"w": ONE}, byteorder="l" * 17)
    assert "byteorder has 17 bytes" in refusal(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_entries_are_refused_with_advice(tmp_path: Path, method: int) -> None:
    write_bin(tmp_path / "a.bin", {"w": np.zeros(1 << 20, np.float32)}, compression=method)
    reason = refusal(tmp_path / "a.bin")
    assert "entry 'archive/data/0' is compressed" in reason
    assert "zip -0" in reason


DIRECTORY = b"PK\x01\x02"
END = b"PK\x05\x06"


class Archive:
    """An archive to change: its bytes, where its entries are in the directory, and where its end record is."""

    def __init__(self, path: Path) -> None:
        write_bin(path, {"v": ONE, "w": ONE}, root="r")
        self.data = bytearray(path.read_bytes())
        self.places = [match.start() for match in re.finditer(re.escape(DIRECTORY), self.data)]
        self.end = self.data.rindex(END)

    def put(self, at: int, form: str, value: int) -> None:
        struct.pack_into(form, self.data, at, value)

    def in_directory(self, entry: int, field: int, form: str, value: int) -> None:
        self.put(self.places[entry] + field, form, value)

    def header(self, entry: int) -> int:
        """Return where the header is that stands before an entry's bytes."""
        return int(struct.unpack_from("<I", self.data, self.places[entry] + 42)[0])

    def resize(self, entry: int, size: int) -> None:
        for field in (20, 24):
            self.in_directory(entry, field, "<I", size)

    def rename(self, entry: int, last: int) -> None:
        """Change the last character of the name of a storage's entry."""
        self.in_directory(entry, 46 + len("r/data/"), "<B", last)
        self.put(self.header(entry) + 30 + len("r/data/"), "<B", last)

    def room(self, entry: int) -> int:
        """Return how many bytes there are for an entry, before the next one's header."""
        at = self.header(entry)
        name, extra = struct.unpack_from("<HH", self.data, at + 26)
        return int(self.header(entry + 1) - at - 30 - name - extra)


V, W = 2, 3  # the entries of the two storages, behind data.pkl and byteorder
INCOMPLETE = "is not a complete archive"
MISPLACED = "is not where the list of entries says, or shares bytes with another"
ARCHIVES: Mapping[str, tuple[Callable[[Archive], object], str]] = {
    "an encrypted entry": (lambda a: a.in_directory(V, 8, "<H", 1), "entry 'r/data/0' is encrypted"),
    "two sizes": (lambda a: a.in_directory(V, 20, "<I", 23), "has two sizes, 24 and 23"),
    "an entry that reaches into the next one": (lambda a: a.resize(V, a.room(V) + 1), f"'r/data/0' {MISPLACED}"),
    "an entry that is far too long": (lambda a: a.resize(V, 0x7000_0000), f"'r/data/0' {MISPLACED}"),
    "the place of another": (lambda a: a.in_directory(W, 42, "<I", a.header(V)), MISPLACED),
    "a place behind the end": (lambda a: a.in_directory(W, 42, "<I", 0x7FFF_FFFF), MISPLACED),
    "a place in the directory": (lambda a: a.in_directory(W, 42, "<I", a.places[1]), MISPLACED),
    "another name at the entry": (lambda a: a.put(a.header(V) + 30 + 7, "<B", 57), f"'r/data/0' {MISPLACED}"),
    "a long name at the entry": (lambda a: a.put(a.header(V) + 26, "<H", 0xFFFF), f"'r/data/0' {MISPLACED}"),
    "no header at the entry": (lambda a: a.put(a.header(V), "<B", 0), f"'r/data/0' {MISPLACED}"),
    "a name twice": (lambda a: a.rename(W, 48), "entry 'r/data/0' is there twice"),
    "a directory that is too long": (lambda a: a.put(a.end + 12, "<I", 0x7FFF_FFFF), INCOMPLETE),
    "a directory somewhere else": (lambda a: a.put(a.end + 16, "<I", 0x7FFF_FFFF), MISPLACED),
    "a directory that is too short": (lambda a: a.put(a.end + 12, "<I", 40), INCOMPLETE),
    "a version of the future": (lambda a: a.in_directory(V, 6, "<H", 999), INCOMPLETE),
    "an extra field that is cut": (lambda a: a.in_directory(V, 30, "<H", 0xFFF0), INCOMPLETE),
    "no end": (lambda a: a.data.__delitem__(slice(a.end, None)), INCOMPLETE),
    "no directory": (lambda a: a.data.__delitem__(slice(a.places[0], a.end)), INCOMPLETE),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_lies(tmp_path: Path, name: str) -> None:
    change, reason = ARCHIVES[name]
    archive = Archive(tmp_path / "a.bin")
    change(archive)
    (tmp_path / "a.bin").write_bytes(archive.data)
    assert reason in refusal(tmp_path / "a.bin")


def test_a_directory_larger_than_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("r/data.pkl", b"")
        for number in range(1200):
            info = zipfile.ZipInfo(f"r/{number}")
            info.comment = b"c" * 8000
            archive.writestr(info, b"")
    assert "its list of entries has" in refusal(tmp_path / "a.bin")


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Bytes of the archive and the pickle change: what can still be read is within the file."""
    path = tmp_path / "pytorch_model.bin"
    storage = Storage(np.arange(40, dtype=np.float32))
    write_bin(path, {"a": Tensor(storage, (5, 8), (8, 1)), "b": Tensor(storage, (8, 5), (1, 8)), "c": ONE, "n": 5})
    whole = path.read_bytes()
    generator = random.Random(13)
    refusals = 0
    for _ in range(800):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(whole))] = generator.choice((generator.randrange(256), 0, 255, 46, 40))
        if generator.random() < 0.1:
            del damaged[generator.randrange(len(whole)) :]
        path.write_bytes(damaged)
        try:
            with open_checkpoint(tmp_path) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    if info.dtype in FLOAT_DTYPES:
                        assert checkpoint.read_rows(name, 0, info.rows).shape == info.shape
        except CheckpointError:
            refusals += 1
    assert refusals > 300
