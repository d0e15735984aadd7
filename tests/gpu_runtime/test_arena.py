# SPDX-License-Identifier: MIT OR Apache-2.0
"""Regions of an arena and rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import Arena, DevicePtr, InvalidPointer, Layout, LogitsArena
from gpu_runtime.backend import GpuBackend

BASE = DevicePtr(0x7F00_0000_0000)


def layout_of(**sizes: Any) -> Layout:
    layout = Layout()
    for name, nbytes in sizes.items():
        layout.add(name, nbytes)
    return layout


def test_layout() -> None:
    layout = layout_of(a=1, b=256, c=257, empty=0, d=np.int16(5))
    assert dict(layout.offsets) == {"a": 0, "b": 256, "c": 512, "empty": 1024, "d": 1024}
    assert layout.nbytes == 1280
    assert all(type(offset) is int for offset in (*layout.offsets.values(), layout.nbytes))


def test_layout_sizes_do_not_wrap() -> None:
    layout = layout_of(a=np.int32((1 << 31) - 1), b=np.int32((1 << 31) - 1))
    assert layout.nbytes == 1 << 32


@pytest.mark.parametrize("nbytes", [1.0, "1", None, True])
def test_layout_refuses_other_types(nbytes: Any) -> None:
    with pytest.raises(TypeError, match="layout: a: expected an integer"):
        layout_of(a=nbytes)


def test_layout_refuses_a_name_twice_and_a_negative_size() -> None:
    layout = layout_of(a=8)
    with pytest.raises(ValueError, match="expected a new name, got 'a' again"):
        layout.add("a", 8)
    with pytest.raises(ValueError, match="layout: b: expected at least 0"):
        layout.add("b", -1)
    assert layout.nbytes == 256


def test_layout_is_changed_by_add_alone() -> None:
    offsets: Any = layout_of(a=8).offsets
    with pytest.raises(TypeError):
        offsets["a"] = 4


def test_arena(gpu: GpuBackend) -> None:
    layout = layout_of(a=10, b=20)
    arena = Arena(gpu, layout, "scratch")
    layout.add("later", 8)
    (entry,) = gpu.alloc_report()
    assert (entry.ptr, entry.nbytes, entry.tag) == (arena.base, 512, "scratch")
    assert entry.site.startswith(f"{__file__}:")
    assert (arena["a"], arena["b"]) == (arena.base, arena.base + 256)
    assert type(arena["b"]) is DevicePtr
    for name in ("c", "later"):
        with pytest.raises(KeyError):
            arena[name]
    arena.free()
    arena.free()
    assert gpu.live_bytes() == 0
    with pytest.raises(InvalidPointer, match="freed"):
        arena["a"]


def test_empty_arena(gpu: GpuBackend) -> None:
    arena = Arena(gpu, Layout(), "nothing")
    assert not arena.base.is_null
    arena.free()


@pytest.mark.parametrize(("vocab", "padded"), [(1, 64), (64, 64), (65, 128), (256_206, 256_256)])
def test_rows_are_padded(vocab: int, padded: int) -> None:
    assert LogitsArena.padded(vocab) == padded
    for dtype, size in (("f32", 4), ("f16", 2), ("bf16", 2)):
        arena = LogitsArena(BASE, 2, vocab, dtype)
        assert (arena.row_elements, arena.row_bytes) == (padded, padded * size)


def test_rows_past_32_bits() -> None:
    arena = LogitsArena(BASE, 8400, 256_206, "f32")
    last: Any = np.int32(8399)
    assert arena.row(last) == BASE + 8399 * 256_256 * 4
    assert type(arena.row(0)) is DevicePtr
    for index in (0, 1, 2097, 8399):
        assert arena.index(arena.row(index)) == index
    assert arena.index(int(arena.row(8000)), 400) == 8000


@pytest.mark.parametrize("index", [-1, 4, 1 << 40])
def test_rows_outside(index: int) -> None:
    with pytest.raises(InvalidPointer, match=r"expected an index in \[0, 4\)"):
        LogitsArena(BASE, 4, 10, "f32").row(index)


@pytest.mark.parametrize("index", [1.0, None, "0", True])
def test_row_index_is_an_integer(index: Any) -> None:
    with pytest.raises(TypeError, match="logits row"):
        LogitsArena(BASE, 4, 10, "f32").row(index)


@pytest.mark.parametrize("address", [BASE - 256, BASE + 1, BASE + 255, BASE + 4 * 256, 0])
def test_addresses_that_are_no_row(address: int) -> None:
    with pytest.raises(InvalidPointer, match="expected the address of one of 4 rows of 256 bytes"):
        LogitsArena(BASE, 4, 10, "f32").index(address)


@pytest.mark.parametrize("count", [0, -1, 3])
def test_counts_past_the_end(count: int) -> None:
    arena = LogitsArena(BASE, 4, 10, "f32")
    with pytest.raises(InvalidPointer, match="expected 1 to 2 rows from row 2"):
        arena.index(arena.row(2), count)


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "error"),
    [
        (0, 1, "f32", ValueError),
        (1, 0, "f32", ValueError),
        (-1, 1, "f32", ValueError),
        (1, 1, "float32", ValueError),
        (1, 1, "i32", ValueError),
        (1.0, 1, "f32", TypeError),
        (True, 1, "f32", TypeError),
    ],
)
def test_arguments_are_checked(rows: Any, vocab: Any, dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="logits: "):
        LogitsArena(BASE, rows, vocab, dtype)
