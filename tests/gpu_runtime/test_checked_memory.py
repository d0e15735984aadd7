# SPDX-License-Identifier: MIT OR Apache-2.0
"""What checked memory holds before it is written and after it is freed, and when damage is told."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime import DevicePtr, InvalidPointer, OutOfMemory, dtypes
from gpu_runtime.errors import GuardViolation, UninitializedRead
from gpu_runtime.host import HostBackend, poison, quarantine
from tests.gpu_runtime.checked import dropped, filled, made, opened, read

PATTERNS = (poison.FRESH, poison.FREED, poison.OUTPUT, poison.SCRATCH)


def peek(ptr: int, dtype: str, count: int) -> Any:
    """Return what the memory at an address holds, as a debugger would see it."""
    size = dtypes.itemsize(dtype)
    return np.frombuffer(ctypes.string_at(int(ptr), count * size), dtype=dtypes.NUMPY[dtype])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_is_nan_as_a_float_and_out_of_range_as_an_index_or_an_address(pattern: int) -> None:
    span = np.zeros(64, dtype=np.uint8)
    poison.fill(span, pattern)
    for dtype in dtypes.FLOAT_TYPES:
        assert np.isnan(span.view(dtypes.NUMPY[dtype]).astype(np.float32)).all(), dtype
    assert (span.view(np.int32) > 1 << 30).all()
    assert (span.view(np.int64) > 1 << 62).all()
    assert (span.view(np.uint64) > 1 << 62).all(), "no canonical address"


def test_patterns_are_told_apart() -> None:
    assert len(set(PATTERNS)) == len(PATTERNS)
    assert {byte for pattern in PATTERNS for byte in pattern.to_bytes(2, "little")} == set(poison.BYTES)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 31])
def test_patterns_and_their_changes(pattern: int, size: int) -> None:
    span = np.zeros(size, dtype=np.uint8)
    poison.fill(span, pattern)
    assert span.tobytes() == (pattern.to_bytes(2, "little") * size)[:size]
    assert poison.changed(span, pattern) is None
    for place in {0, size // 2, size - 1}:
        kept, span[place] = span[place], span[place] ^ 1
        found = poison.changed(span, pattern)
        assert found is not None
        assert found.tolist() == [place]
        span[place] = kept
    for itemsize in (1, 2, 4, 8):
        if size % itemsize == 0:
            assert set(span.view(f"<u{itemsize}").tolist()) == {poison.element(pattern, itemsize)} or itemsize == 1


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("nbytes", [1, 7, 64, 4097])
def test_fresh_memory_is_poisoned(managed: bool, nbytes: int) -> None:
    with opened() as gpu:
        ptr = gpu.alloc_managed(nbytes) if managed else gpu.alloc(nbytes)
        assert peek(ptr, "u8", nbytes).tobytes() == (b"\xff\x7f" * nbytes)[:nbytes]
        gpu.free(ptr)
        assert peek(ptr, "u8", nbytes).tobytes() == (b"\xfe\x7f" * nbytes)[:nbytes], "and it is kept in quarantine"


def test_page_locked_memory_comes_as_zeros_and_counts_as_written() -> None:
    with opened() as gpu:
        memory = gpu.alloc_host_pinned(16)
        assert not memory.array.any()
        assert read(gpu, memory.address, 16) == bytes(16)
        memory.array[3] = 9
        assert read(gpu, memory.address, 16) == bytes([0, 0, 0, 9]) + bytes(12)
        gpu.free_host_pinned(memory)
        assert memory.array.tobytes() == b"\xfe\x7f" * 8


# quarantine


def test_an_address_is_not_used_again_while_its_block_is_in_quarantine() -> None:
    with opened() as gpu:
        freed: set[int] = set()
        for _ in range(300):
            ptr = gpu.alloc(64)
            assert int(ptr) not in freed
            freed.add(int(ptr))
            gpu.free(ptr)


def test_quarantine_takes_nothing_from_the_device() -> None:
    with opened(memory_limit=1000) as gpu:
        for _ in range(50):
            gpu.free(gpu.alloc(1000))
            assert gpu.free_memory() == 1000


def storage_bytes(nbytes: int) -> int:
    """Bytes that a block takes in quarantine, with its redzones."""
    return nbytes + 2 * 256


@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_oldest_block_leaves_first_and_is_looked_at(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "QUARANTINE_BYTES", room * storage_bytes(64))
    gpu = opened()
    victim = gpu.alloc(64, tag="victim")
    gpu.free(victim)
    ctypes.memset(int(victim), 1, 4)
    others = [gpu.alloc(64) for _ in range(room)]
    for other in others[:-1]:
        gpu.free(other)
    with pytest.raises(
        GuardViolation, match=r"free: 4 bytes written after the free, the first is byte 0 of .*for victim"
    ):
        gpu.free(others[-1])
    assert gpu.live_alloc_count() == 0, "the block that was to be freed is freed"
    gpu.close()


def test_a_block_that_is_larger_than_the_quarantine_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it drive out the others; what is said of it stays."""
    monkeypatch.setattr(quarantine, "QUARANTINE_BYTES", 2 * storage_bytes(64))
    with opened() as gpu:
        small, large = gpu.alloc(64), gpu.alloc(1 << 16, tag="large")
        gpu.free(small)
        gpu.free(large)
        assert peek(small, "u8", 2).tobytes() == b"\xfe\x7f"
        with pytest.raises(InvalidPointer, match=r"use after free of byte 0 of 65,536 bytes .* for large"):
            read(gpu, large, 8)


def test_call_sites_outlive_the_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "QUARANTINE_BYTES", 0)
    with opened() as gpu:
        ptr = made(gpu, tag="early")
        dropped(gpu, ptr)
        with pytest.raises(
            InvalidPointer, match=r"freed twice: .* for early, allocated at .* in made, freed at .* in drop"
        ):
            dropped(gpu, ptr)


def test_of_blocks_that_were_freed_at_one_address_the_last_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "QUARANTINE_BYTES", 0)
    with opened() as gpu:
        at: dict[int, str] = {}
        for turn in range(1000):  # the allocator hands out the same address soon
            ptr = gpu.alloc(64, tag=f"turn {turn}.")
            gpu.free(ptr)
            if int(ptr) in at:
                break
            at[int(ptr)] = f"turn {turn}."
        with pytest.raises(InvalidPointer, match=rf"for turn {turn}\.,"):
            read(gpu, ptr, 8)


# damage


@pytest.mark.parametrize("offset", [-1, -200, 100, 300])
def test_scanning_tells_of_damage_and_leaves_it(offset: int) -> None:
    gpu = opened()
    ptr = gpu.alloc(100, tag="victim")
    ctypes.memset(int(ptr) + offset, 0x11, 1)
    for _ in range(2):
        assert [entry.tag for entry in gpu.scan_redzones()] == ["victim"]
    with pytest.raises(GuardViolation, match=r"1 byte overwritten, the nearest .* for victim"):
        gpu.free(ptr)
    assert gpu.live_alloc_count() == 0
    gpu.close()  # it was told once


def test_damage_that_was_repaired_is_not_told() -> None:
    with opened() as gpu:
        ptr = gpu.alloc(100)
        ctypes.memset(int(ptr) + 100, 0x11, 256)
        gpu.poison_redzones()
        gpu.free(ptr)


def test_all_damage_that_one_call_finds_is_in_one_error() -> None:
    gpu = opened()
    ptrs = [gpu.alloc(100, tag=f"block {index}") for index in range(3)]
    for ptr in (ptrs[0], ptrs[2]):
        ctypes.memset(int(ptr) - 4, 0x11, 4)
        ctypes.memset(int(ptr) + 110, 0x11, 1)
    with pytest.raises(GuardViolation) as found:
        gpu.sweep_unreleased()
    lines = str(found.value).splitlines()
    assert [re.findall(r"for (block \d)", line) for line in lines] == [["block 0"], ["block 2"]]
    for line in lines:
        assert line.startswith(
            "sweep_unreleased: 4 bytes overwritten, the nearest 1 byte before the first byte and "
            "1 byte overwritten, the nearest 11 bytes past the last byte of 100 bytes"
        )
    assert gpu.live_alloc_count() == 0
    gpu.close()


def test_damage_to_a_block_in_quarantine_is_told_apart_from_damage_before_the_free() -> None:
    gpu = opened()
    ptr = gpu.alloc(64)
    gpu.free(ptr)
    ctypes.memset(int(ptr) + 64, 0x11, 1)
    with pytest.raises(GuardViolation, match="close: 1 byte overwritten, the nearest 1 byte past the last byte of 64"):
        gpu.close()
    gpu.close()


def test_close_frees_everything_although_it_raises() -> None:
    gpu = opened()
    memory = gpu.alloc_host_pinned(8)
    ctypes.memset(memory.address + 8, 0x11, 1)
    ctypes.memset(int(gpu.alloc(8)) - 1, 0x11, 1)
    with pytest.raises(GuardViolation) as found:
        gpu.close()
    assert len(str(found.value).splitlines()) == 2
    gpu.close()


# reports


def test_a_place_is_told_by_the_nearest_block() -> None:
    with opened() as gpu:
        ptrs = sorted(gpu.alloc(64, tag=f"block {index}") for index in range(3))
        tags = {entry.ptr: entry.tag for entry in gpu.alloc_report()}
        for address, text in (
            (ptrs[0] - 8, f"8 bytes before 64 bytes at {int(ptrs[0]):#x} for {tags[ptrs[0]]}"),
            (ptrs[1] + 64, f"the end of 64 bytes at {int(ptrs[1]):#x} for {tags[ptrs[1]]}"),
            (ptrs[2] + 65, f"1 byte past the end of 64 bytes at {int(ptrs[2]):#x} for {tags[ptrs[2]]}"),
        ):
            with pytest.raises(InvalidPointer, match=f"the nearest is {text}"):
                read(gpu, address, 4)
        gpu.sweep_unreleased()


def test_a_place_where_nothing_is() -> None:
    with opened() as gpu, pytest.raises(InvalidPointer, match=r"got 0x1000: nothing is allocated; used at .* in read"):
        read(gpu, 0x1000, 4)


def test_page_locked_memory_that_is_freed_twice() -> None:
    with opened() as gpu:
        memory = gpu.alloc_host_pinned(8)
        gpu.free_host_pinned(memory)
        with pytest.raises(
            InvalidPointer, match=r"use after free of byte 0 of 8 bytes .*, freed at .*test_page_locked"
        ):
            gpu.free_host_pinned(memory)


def test_out_of_memory_is_as_without_checks() -> None:
    calls: list[Callable[[HostBackend], Any]] = [
        lambda gpu: gpu.alloc(1 << 62),
        lambda gpu: gpu.alloc_host_pinned(1 << 62),
    ]
    for call in calls:
        with opened(memory_limit=1 << 80) as gpu:
            with pytest.raises(OutOfMemory):
                call(gpu)
            assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
            gpu.free(gpu.alloc(64))


def test_without_check_nothing_of_this_happens() -> None:
    with HostBackend() as gpu:
        ptr = gpu.alloc(64)
        read(gpu, ptr, 64)
        ctypes.memset(int(ptr) + 64, 0x11, 1)
        gpu.free(ptr)


def test_the_error_of_an_unwritten_read_leaves_the_backend_usable() -> None:
    with opened() as gpu:
        ptr = made(gpu)
        for _ in range(2):
            with pytest.raises(UninitializedRead):
                read(gpu, ptr)
        gpu.memset(ptr, 3, 32)
        assert read(gpu, ptr) == b"\x03" * 32
        gpu.free(ptr)


def test_errors_survive_pickling() -> None:
    import pickle

    with opened() as gpu:
        with pytest.raises(UninitializedRead) as found:
            read(gpu, made(gpu))
        again = pickle.loads(pickle.dumps(found.value))
        assert (type(again), str(again)) == (UninitializedRead, str(found.value))
        gpu.sweep_unreleased()


@pytest.mark.parametrize("address", [1, 2, 3, 63])
def test_spans_of_any_alignment(address: int) -> None:
    with opened() as gpu:
        ptr = filled(gpu, 128)
        target = DevicePtr(int(ptr) + address)
        gpu.copy_h2d(b"abc", target)
        assert read(gpu, target, 3) == b"abc"
        gpu.free(ptr)
