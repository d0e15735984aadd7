# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies from files to the device: what arrives, what is refused, and what they come after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, InvalidPointer
from gpu_runtime.errors import DeviceError
from gpu_runtime.files import read_exactly
from tests.ops.harness import download

CONTENT = np.random.default_rng(4).integers(0, 256, (2, 300_001), dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Two open files."""
    descriptors = []
    for number, content in enumerate(CONTENT):
        path = tmp_path / f"file{number}"
        path.write_bytes(content.tobytes())
        descriptors.append(os.open(path, os.O_RDONLY))
    yield descriptors
    for descriptor in descriptors:
        with closing(os.fdopen(descriptor, "rb")):
            pass


@pytest.fixture
def target(gpu: GpuBackend) -> int:
    ptr = gpu.alloc(700_000)
    gpu.memset(ptr, 0, 700_000)
    return ptr


def drawn(seed: int) -> list[tuple[int, int, int, int]]:
    """Return spans of both files, some of no bytes, that lie anywhere in them and nowhere together on the device."""
    rng = np.random.default_rng(seed)
    spans, at = [], 0
    for _ in range(40):
        file, nbytes = int(rng.integers(0, 2)), int(rng.choice([0, 1, 7, 256, 5000, 30_000]))
        spans.append((file, int(rng.integers(0, 300_002 - nbytes)), nbytes, at))
        at += nbytes + int(rng.integers(0, 3))
    return spans


@pytest.mark.parametrize("seed", range(5))
def test_spans_arrive(gpu: GpuBackend, files: list[int], target: int, seed: int) -> None:
    expected = np.zeros(700_000, np.uint8)
    spans = drawn(seed)
    for file, offset, nbytes, at in spans:
        expected[at : at + nbytes] = CONTENT[file, offset : offset + nbytes]
    gpu.copy_files_h2d((files[file], offset, nbytes, target + at) for file, offset, nbytes, at in spans)
    assert np.array_equal(download(gpu, target, expected), expected)


def test_one_span_is_larger_than_what_is_read_at_once(gpu: GpuBackend, tmp_path: Path, device: Any) -> None:
    """And the rest of it lies in many reads."""
    count = 900_000 if device.is_host else 70 << 20
    content = np.arange(count, dtype=np.uint64).astype(np.uint8)
    (tmp_path / "large").write_bytes(content.tobytes())
    ptr = gpu.alloc(count)
    with (tmp_path / "large").open("rb") as file:
        gpu.copy_files_h2d([(file.fileno(), 3, count - 3, ptr)])
    assert np.array_equal(download(gpu, ptr, content[3:]), content[3:])


@pytest.mark.parametrize(
    ("span", "error", "words"),
    [
        ((0, -1, 8, 0), ValueError, r"spans\[1\]: offset"),
        ((0, 0, -8, 0), ValueError, r"spans\[1\]: nbytes"),
        ((-1, 0, 8, 0), ValueError, r"spans\[1\]: descriptor"),
        ((0, 0.5, 8, 0), TypeError, r"spans\[1\]: offset"),
        ((0, 299_994, 8, 0), EOFError, r"spans\[1\]: expected a span that ends by byte 300001"),
        ((0, 0, 8, 699_996), InvalidPointer, "copy_files_h2d: dst"),
    ],
)
def test_wrong_spans_are_refused_before_anything_is_copied(
    gpu: GpuBackend, files: list[int], target: int, span: Any, error: type[Exception], words: str
) -> None:
    descriptor, offset, nbytes, at = span
    wrong = (files[0] if descriptor == 0 else descriptor, offset, nbytes, target + at)
    with pytest.raises(error, match=words):
        gpu.copy_files_h2d([(files[0], 0, 8, target), wrong])
    assert not download(gpu, target, CONTENT[0][:8]).any()


def test_a_descriptor_that_is_not_open(gpu: GpuBackend, tmp_path: Path, target: int) -> None:
    with (tmp_path / "x").open("wb+") as file:
        number = file.fileno()
    with pytest.raises(OSError, match="descriptor"):
        gpu.copy_files_h2d([(number, 0, 8, target)])


def test_a_folder_is_no_file(gpu: GpuBackend, tmp_path: Path, target: int) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="directory"):
            gpu.copy_files_h2d([(descriptor, 0, 1, target)])
    finally:
        os.close(descriptor)
    gpu.memset(target, 1, 8)  # and the backend works on


def test_a_file_that_is_read_bit_by_bit(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pipe or a network's file may be."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rooms, offset: read(file, (rooms[0][:7],), offset))
    out = np.zeros(100, np.uint8)
    read_exactly(files[0], 20, out)
    assert np.array_equal(out, CONTENT[0][20:120])
    with pytest.raises(EOFError, match="ends at byte 300001, where 3 more should be"):
        read_exactly(files[0], 299_904, out)


def test_it_comes_after_the_work_on_its_stream(gpu: GpuBackend, files: list[int], target: int) -> None:
    stream = gpu.create_stream()
    for _ in range(20):
        gpu.memset_async(target, 9, 700_000, stream)
    gpu.copy_files_h2d([(files[0], 0, 1000, target)], stream)
    found = download(gpu, target, CONTENT[0][:2000])
    assert np.array_equal(found[:1000], CONTENT[0][:1000])
    gpu.destroy_stream(stream)


def test_a_capturing_stream_is_refused(gpu: GpuBackend, files: list[int], target: int) -> None:
    gpu.begin_capture()
    with pytest.raises(DeviceError, match="captur"):
        gpu.copy_files_h2d([(files[0], 0, 8, target)])
    gpu.abort_capture_if_active()


def test_copies_are_traced(gpu: GpuBackend, files: list[int], target: int) -> None:
    with gpu.launch_trace() as trace:
        gpu.copy_files_h2d([(files[0], 0, 8, target), (files[1], 0, 0, target), (files[1], 5, 9, target + 16)])
    assert [(record.kind, record.name, record.nbytes) for record in trace] == [
        ("copy", "h2d", 8),
        ("copy", "h2d", 9),
        ("wait", "stream", 0),
    ]
