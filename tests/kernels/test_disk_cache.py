# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiled kernels on disk: whole or not at all, from any number of processes, and done without where it cannot be."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_runtime.cuda import disk_cache

CONTENT = bytes(range(256)) * 8


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    assert disk_cache.load(folder, "a.ptx") is None
    disk_cache.store(folder, "a.ptx", CONTENT)
    disk_cache.store(folder, "b.ptx", b"")
    assert disk_cache.load(folder, "a.ptx") == CONTENT
    assert disk_cache.load(folder, "b.ptx") == b""
    disk_cache.store(folder, "a.ptx", b"new")
    assert disk_cache.load(folder, "a.ptx") == b"new"
    assert sorted(os.listdir(folder)) == ["a.ptx", "b.ptx"], "no temporary file stays"


def test_a_new_folder_is_its_owner_s_alone(tmp_path: Path) -> None:
    disk_cache.store(tmp_path / "cache", "a.ptx", CONTENT)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "the header alone": lambda data: data[: len(data) - len(CONTENT)],
    "half a header": lambda data: data[:20],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "one bit": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "a bit of the checksum": lambda data: data[:25] + bytes([data[25] ^ 1]) + data[26:],
    "zeros, as after a power cut": lambda data: bytes(len(data)),
    "another format": lambda data: CONTENT,
    "the header of an older format": lambda data: b"metrale kernel 0" + data[16:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_counts_as_missing_and_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    disk_cache.store(tmp_path, "a.ptx", CONTENT)
    path = tmp_path / "a.ptx"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert disk_cache.load(tmp_path, "a.ptx") is None
    disk_cache.store(tmp_path, "a.ptx", CONTENT)
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    folder = tmp_path / "file" / "cache"
    for name in ("a.ptx", "b.ptx"):
        assert disk_cache.load(folder, name) is None
        disk_cache.store(folder, name, CONTENT)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"kernel cache {folder}: " in record.getMessage()


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    disk_cache.store(tmp_path, "a.ptx", CONTENT)
    assert os.listdir(tmp_path) == []
    assert "No space left on device" in caplog.text


WRITER = """
import hashlib, sys, time
from pathlib import Path
from gpu_runtime.cuda import disk_cache
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
end = time.monotonic() + 1
while time.monotonic() < end:
    seed += 1000
    content = hashlib.sha256(str(seed).encode()).digest() * (1 + seed % 5000)
    disk_cache.store(folder, "a.ptx", content)
"""


def test_readers_never_see_a_part_of_what_others_write(tmp_path: Path) -> None:
    disk_cache.store(tmp_path, "a.ptx", CONTENT)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)]) for seed in range(3)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        content = disk_cache.load(tmp_path, "a.ptx")
        assert content is not None, "a reader found the file missing or damaged"
        seen.add(hashlib.sha256(content).digest())
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(seen) > 10, "the writers wrote while the reader read"
    assert os.listdir(tmp_path) == ["a.ptx"]
