# SPDX-License-Identifier: MIT OR Apache-2.0
"""Slots between files and the device, against a device that copies as late as it may: runs where no GPU is."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the module is CuPy's user")

from gpu_runtime.cuda import file_copies
from gpu_runtime.files import FileSpan


class Context:
    """Every context is current."""

    current = relaxed = staticmethod(nullcontext)


class Owner:
    """What stands for page-locked memory, full of nines."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.full(nbytes, 9, np.uint8)
        self.ptr = self.array.ctypes.data
        self.__array_interface__ = self.array.__array_interface__


class LateDevice:
    """CUDA's calls. A copy is done when somebody waits for it, and no sooner."""

    memcpyHostToDevice = 1

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, int]] = []
        self.events: dict[int, int] = {}
        self.made = 0
        self.failing = ""

    def _fail(self, call: str) -> None:
        if call == self.failing:
            self.failing = ""
            raise RuntimeError(f"{call} failed")

    def _run(self, count: int) -> None:
        for dst, src, nbytes in self.queue[:count]:
            ctypes.memmove(dst, src, nbytes)
        self.queue = [(0, 0, 0)] * min(count, len(self.queue)) + self.queue[count:]

    def memcpyAsync(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        self._fail("memcpyAsync")
        assert (kind, stream) == (1, 77)
        self.queue.append((dst, src, nbytes))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._fail("eventCreateWithFlags")
        self.made += 1
        self.events[self.made] = 0
        return self.made

    def eventRecord(self, event: int, stream: int) -> None:
        self.events[event] = len(self.queue)

    def eventSynchronize(self, event: int) -> None:
        self._run(self.events[event])

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def streamSynchronize(self, stream: int) -> None:
        self._run(len(self.queue))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(file_copies, "runtime", device)
    return device


CONTENT = np.random.default_rng(6).integers(0, 256, 50_000, dtype=np.uint8)


@pytest.mark.parametrize("slot", [1, 100, 4096, 1 << 20])
@pytest.mark.parametrize(("reads", "ahead"), [(1, 1), (3, 2), (10, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_slot_is_filled_again_only_when_it_was_copied(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slot: int, reads: int, ahead: int, seed: int
) -> None:
    monkeypatch.setattr(file_copies, "SLOT_BYTES", slot)
    monkeypatch.setattr(file_copies, "READS", reads)
    monkeypatch.setattr(file_copies, "AHEAD", ahead)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    rng = np.random.default_rng(seed)
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    (tmp_path / "other").write_bytes(CONTENT[::-1].tobytes())
    room, expected = np.zeros(60_000, np.uint8), np.zeros(60_000, np.uint8)
    base = room.ctypes.data
    locked: list[int] = []

    def lock(nbytes: int) -> Owner:
        locked.append(nbytes)
        return Owner(nbytes)

    with (tmp_path / "file").open("rb") as file, (tmp_path / "other").open("rb") as other:
        spans, at = [], 0
        for _ in range(30 if slot > 1 else 5):
            nbytes, first = int(rng.integers(1, 2000 if slot > 1 else 20)), int(rng.integers(0, 48_000))
            chosen, content = (file, CONTENT) if rng.integers(0, 2) else (other, CONTENT[::-1])
            spans.append(FileSpan(chosen.fileno(), first, nbytes, base + at))
            expected[at : at + nbytes] = content[first : first + nbytes]
            at += nbytes
        file_copies.copy_files(Context(), lock, spans, 77)  # type: ignore[arg-type]
    assert np.array_equal(room, expected)
    assert late.events == {}
    assert len(locked) == 1
    if slot == 100:
        assert locked[0] == slot * (reads + ahead)


def test_nothing_to_copy_takes_nothing(late: LateDevice) -> None:
    file_copies.copy_files(Context(), lambda nbytes: pytest.fail("locked"), [], 77)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["memcpyAsync", "eventCreateWithFlags", "read"])
def test_a_failure_waits_for_the_device_and_the_reads(
    late: LateDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    monkeypatch.setattr(file_copies, "SLOT_BYTES", 100)
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    room = np.zeros(50_000, np.uint8)
    late.failing = call
    with (tmp_path / "file").open("rb+") as file:
        spans = [FileSpan(file.fileno(), 0, 50_000, room.ctypes.data)]
        if call == "read":
            file.truncate(30_000)
        with pytest.raises((RuntimeError, EOFError), match=f"{call} failed|ends at byte 30000"):
            file_copies.copy_files(Context(), Owner, spans, 77)  # type: ignore[arg-type]
    assert late.events == {}
    assert not any(nbytes for _, _, nbytes in late.queue)
    if call == "read":
        assert np.array_equal(room[:29_900], CONTENT[:29_900])


@pytest.mark.parametrize(("gap", "reads"), [(0, 1), (4096, 1), (4097, 2)])
def test_a_large_gap_is_not_read(gap: int, reads: int) -> None:
    spans = [FileSpan(3, 0, 10, 0), FileSpan(3, 10 + gap, 10, 10)]
    assert len(list(file_copies.pieces(spans, 1 << 20))) == reads


def test_what_lies_together_is_read_at_once() -> None:
    """Neighbours, a small gap, a large one, spans that overlap, another file, and one that is cut."""
    spans = [
        FileSpan(3, 0, 10, 1000),
        FileSpan(3, 10, 10, 500),
        FileSpan(3, 24, 6, 600),
        FileSpan(3, 5, 20, 700),
        FileSpan(3, 9000, 4, 800),
        FileSpan(4, 9004, 4, 900),
        FileSpan(4, 9008, 250, 2000),
    ]

    def told(piece: Any) -> tuple[Any, ...]:
        return piece.descriptor, piece.offset, piece.nbytes, piece.copies

    assert [told(piece) for piece in file_copies.pieces(spans[::-1], 100)] == [
        (3, 0, 30, [(1000, 0, 10), (700, 5, 20), (500, 10, 10), (600, 24, 6)]),
        (3, 9000, 4, [(800, 0, 4)]),
        (4, 9004, 100, [(900, 0, 4), (2000, 4, 96)]),
        (4, 9104, 100, [(2096, 0, 100)]),
        (4, 9204, 54, [(2196, 0, 54)]),
    ]
