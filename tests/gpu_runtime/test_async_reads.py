# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads by the C library's threads: what they read, how they fail, and that nothing is written after they are left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.cuda import async_reads
from gpu_runtime.cuda.async_reads import AsyncReads

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts open files as Linux lists them")

CONTENT = np.random.default_rng(3).integers(0, 256, 300_001, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(CONTENT.tobytes())
    with path.open("rb+") as opened:
        yield opened.fileno()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _every_descriptor_is_closed(file: int) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def test_many_reads_in_order(file: int) -> None:
    """Odd places and sizes, 20 at a time, finished in the order in which they were begun."""
    rng = np.random.default_rng(5)
    spans = [(int(start), int(rng.integers(0, 300_001 - start))) for start in rng.integers(0, 300_001, 100)]
    buffers = [np.zeros(size, np.uint8) for _, size in spans]
    with AsyncReads() as reads:
        for index, ((start, _), out) in enumerate(zip(spans, buffers, strict=True)):
            reads.start(file, start, out)
            if index >= 20:
                reads.finish()
                first, size = spans[index - 20]
                assert np.array_equal(buffers[index - 20], CONTENT[first : first + size])
                assert len(reads) == 20
        while len(reads):
            reads.finish()
    for (start, size), out in zip(spans, buffers, strict=True):
        assert np.array_equal(out, CONTENT[start : start + size])


def test_a_file_that_ends_too_early(file: int) -> None:
    with AsyncReads() as reads:
        reads.start(file, 299_991, np.zeros(20, np.uint8))
        reads.start(file, 0, np.zeros(20, np.uint8))
        with pytest.raises(EOFError, match="ends at byte 300001, where 10 more should be"):
            reads.finish()
        reads.finish()  # the others go on


def test_a_file_that_is_cut_while_it_is_read(file: int) -> None:
    with AsyncReads() as reads:
        os.ftruncate(file, 100)
        reads.start(file, 90, np.zeros(20, np.uint8))
        with pytest.raises(EOFError, match="ends at byte 100, where 10 more should be"):
            reads.finish()


def test_a_file_that_is_closed(file: int) -> None:
    own = os.dup(file)
    os.close(own)
    with AsyncReads() as reads:
        reads.start(own, 7, np.zeros(100, np.uint8))
        with pytest.raises(OSError, match="descriptor"):
            reads.finish()
    assert len(reads) == 0


def test_a_folder(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with AsyncReads() as reads:
        reads.start(descriptor, 0, np.zeros(8, np.uint8))
        with pytest.raises(OSError, match="directory"):
            reads.finish()
    os.close(descriptor)


def refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no descriptor left, no thread, or no library that reads so."""

    def dup(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    class NoThreads:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return (lambda request: -1) if name == "aio_read" else getattr(library, name)

    library = async_reads._C
    if call == "dup":
        monkeypatch.setattr(os, "dup", dup)
    elif call == "library":
        monkeypatch.setattr(async_reads, "_C", None)
    else:
        monkeypatch.setattr(async_reads, "_C", NoThreads())


@pytest.mark.parametrize("call", ["dup", "aio_read", "library"])
def test_what_cannot_be_begun_is_read_in_its_turn(file: int, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    out = np.zeros(1000, np.uint8)
    with AsyncReads() as reads:
        with monkeypatch.context() as patch:
            refused(call, patch)
            reads.start(file, 5, out)
        assert not out.any()
        reads.finish()
        assert np.array_equal(out, CONTENT[5:1005])
        with monkeypatch.context() as patch:
            refused(call, patch)
            reads.start(file, 300_000, out)
        with pytest.raises(EOFError, match="ends at byte 300001, where 999 more should be"):
            reads.finish()


class Slow:
    """The library, where a read is in progress the first three times that it is asked; Ctrl-C may come meanwhile."""

    def __init__(self, library: Any, interrupts: int) -> None:
        self._library = library
        self._interrupts = interrupts
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def aio_error(self, request: Any) -> int:
        self.asked += 1
        return errno.EINPROGRESS if self.asked <= 3 else int(self._library.aio_error(request))

    def aio_suspend(self, *_: Any) -> None:
        self._interrupts -= 1
        if self._interrupts >= 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupts", [0, 1, 2])
def test_leaving_waits_for_what_is_being_read(file: int, monkeypatch: pytest.MonkeyPatch, interrupts: int) -> None:
    """Also when Ctrl-C comes meanwhile, which is raised afterwards."""
    slow = Slow(async_reads._C, interrupts)
    monkeypatch.setattr(async_reads, "_C", slow)
    out = np.zeros(100, np.uint8)
    reads = AsyncReads()
    with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext(), reads:
        reads.start(file, 9, out)
    assert slow.asked > 3
    assert len(reads) == 0
    assert np.array_equal(out, CONTENT[9:109])
