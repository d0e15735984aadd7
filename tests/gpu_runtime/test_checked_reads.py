# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which bytes count as written: against a model that keeps a flag for each byte, and the ways it is cut short."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import UninitializedRead
from gpu_runtime.host import HostBackend
from gpu_runtime.host.shadow import Block, Region, Shadow
from gpu_runtime.ledger import Allocation
from gpu_runtime.pointer import DevicePtr
from tests.gpu_runtime.checked import counts_of, filled, launch, made, opened, read, table_of

Array = np.ndarray[Any, np.dtype[Any]]


def block_of(nbytes: int) -> Block:
    storage = np.zeros(nbytes, dtype=np.uint8)
    entry = Allocation(DevicePtr(4096), nbytes, "", "nowhere")
    return Block(entry, storage, storage, Shadow(nbytes), host_visible=False)


SHAPES = [
    ((4,), (1,)),
    ((3, 4), (4, 1)),
    ((3, 4), (6, 1)),
    ((1, 4), (9, 1)),
    ((3, 1), (5, 1)),
    ((2, 3, 2), (12, 4, 1)),
    ((2, 3, 2), (6, 2, 1)),
    ((2, 3, 2), (2, 5, 1)),
    ((3, 4), (0, 1)),
    ((1, 1, 1), (7, 7, 7)),
]


@pytest.mark.parametrize(("shape", "strides"), SHAPES)
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
@pytest.mark.parametrize("start", [0, 8])
def test_a_region_is_the_bytes_of_a_view(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, start: int
) -> None:
    size = np.dtype(dtype).itemsize
    block = block_of(256)
    array: Array = np.ndarray(shape, dtype, block.data, start, tuple(one * size for one in strides))
    region = Region.of("view", block, start, array)
    expected = [
        start + sum(place * step * size for place, step in zip(index, strides, strict=True)) + byte
        for index in itertools.product(*map(range, shape))
        for byte in range(size)
    ]
    assert [region.offset(byte) for byte in range(len(expected))] == expected
    assert region.end == max(expected) + 1
    assert region.within(np.arange(256, dtype=np.uint8)).reshape(-1).tolist() == expected
    names = [region.element(byte) for byte in range(0, len(expected), size)]
    assert names == [str(list(index)) for index in itertools.product(*map(range, shape))]
    block.shadow.write(region)
    whole = Region.span("whole", block, 0, 256)
    assert np.flatnonzero(~block.shadow.unwritten(whole)).tolist() == sorted(set(expected))
    assert block.shadow.covers(region)
    assert not block.shadow.covers(whole)


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_writes_and_copies(seed: int) -> None:
    """What a read finds unwritten is what a flag for each byte says, after every kind of write and copy."""
    rng = np.random.default_rng(seed)
    sizes = (64, 96, 40)
    with opened() as gpu:
        ptrs = [made(gpu, size) for size in sizes]
        model = [np.zeros(size, dtype=bool) for size in sizes]

        def span(index: int) -> tuple[int, int]:
            first, last = sorted(rng.integers(0, sizes[index] + 1, 2).tolist())
            return first, last - first

        for _ in range(150):
            index = int(rng.integers(len(sizes)))
            start, count = span(index)
            match rng.integers(6):
                case 0:
                    gpu.memset(ptrs[index] + start, 1, count)
                    model[index][start : start + count] = True
                case 1:
                    gpu.copy_h2d(bytes(count), ptrs[index] + start)
                    model[index][start : start + count] = True
                case 2:
                    gpu.mark_written(ptrs[index] + start, count)
                    model[index][start : start + count] = True
                case 3:
                    copy_rows(gpu, rng, ptrs, model)
                case 4 if rng.random() < 0.1:  # a new block in its place
                    gpu.free(ptrs[index])
                    ptrs[index] = made(gpu, sizes[index])
                    model[index][:] = False
                case _:
                    check_read(gpu, ptrs[index] + start, model[index][start : start + count])
        gpu.sweep_unreleased()


def copy_rows(gpu: HostBackend, rng: np.random.Generator, ptrs: list[Any], model: list[Array]) -> None:
    """Copy rows of one block to another, here and in the model."""
    source, target = rng.permutation(len(ptrs))[:2].tolist()
    width, height = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    pitches = rng.integers(width, 12, 2).tolist()
    gpu.copy_d2d_2d_async(ptrs[source] + 1, pitches[0], ptrs[target] + 2, pitches[1], width, height)
    for row in range(height):
        flags = model[source][1 + row * pitches[0] :][:width]
        model[target][2 + row * pitches[1] :][:width] = flags


def check_read(gpu: HostBackend, ptr: int, flags: Array) -> None:
    missing = int((~flags).sum())
    if missing:
        first = int((~flags).argmax())
        with pytest.raises(UninitializedRead, match=rf"never written: {missing} of .* in element \[{first}\]"):
            read(gpu, ptr, len(flags))
    else:
        read(gpu, ptr, len(flags))


def test_more_spans_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runtime.host.shadow._MOST_KNOWN", 3)
    with opened() as gpu:
        ptr = made(gpu, 64)
        gpu.memset(ptr, 1, 60)
        for start in (*range(40), *range(40)):
            read(gpu, ptr + start, 8)
        with pytest.raises(UninitializedRead):
            read(gpu, ptr + 40, 21)
        gpu.free(ptr)


@pytest.mark.parametrize("whole", [False, True])
def test_a_span_is_looked_at_again_after_unwritten_bytes_are_copied_over_it(whole: bool) -> None:
    with opened() as gpu:
        ptr, blank = made(gpu, 65), made(gpu, 64)
        gpu.memset(ptr, 1, 65 if whole else 64)
        read(gpu, ptr, 64)
        gpu.copy_d2d(blank, ptr + 8, 1)
        with pytest.raises(UninitializedRead, match=r"1 of 64 bytes, the first in element \[8\]"):
            read(gpu, ptr, 64)
        gpu.memset(ptr + 8, 0, 1)
        read(gpu, ptr, 64)
        gpu.sweep_unreleased()


def test_rows_of_another_stride_are_other_rows() -> None:
    with opened() as gpu:
        x, out = made(gpu, 96), made(gpu)
        for start in (0, 32):
            gpu.memset(x + start, 1, 16)
        launch(gpu, x=x, out=out, x_stride=8)
        with pytest.raises(UninitializedRead, match=r"16 of 32 bytes, the first in element \[1, 0\]"):
            launch(gpu, x=x, out=out, x_stride=12)
        gpu.sweep_unreleased()


def grown(gpu: HostBackend, ptr: int, counts: list[int]) -> None:
    """Gather the first rows, of 16 bytes each, of two spans of 64 bytes."""
    launch(gpu, x=filled(gpu), table=table_of(gpu, [ptr, ptr + 64]), counts=counts_of(gpu, counts))


def test_rows_that_grow_are_judged_one_by_one() -> None:
    """As a KV cache does; rows found written before are not looked at again, unless something unwrote them."""
    with opened() as gpu:
        ptr = made(gpu, 128)
        for count in (1, 2, 3):
            with pytest.raises(UninitializedRead, match=rf"table\[0\]: .* row {count - 1} of {count}"):
                grown(gpu, ptr, [count, 1])
            gpu.memset(ptr + 16 * (count - 1), 1, 16)
            gpu.memset(ptr + 64, 1, 16)
            grown(gpu, ptr, [count, 1])
        with pytest.raises(UninitializedRead, match=r"table\[1\]: .* row 1 of 2"):
            grown(gpu, ptr, [3, 2])
        blank = made(gpu, 4)
        gpu.copy_d2d(blank, ptr + 20, 4)
        with pytest.raises(UninitializedRead, match=r"table\[0\]: .* row 1 of 3"):
            grown(gpu, ptr, [3, 1])
        gpu.sweep_unreleased()


def test_rows_through_a_table_with_another_stride_are_other_rows() -> None:
    def gather(*, memory: Any, table: Array, counts: Array, width: int, add: int, **_: Any) -> None:
        memory.gather_rows(table, counts, offset=0, stride=add, width=width, dtype="f32")

    with opened(gather) as gpu:
        pool = made(gpu, 128)
        for start in (0, 16):
            gpu.memset(pool + start, 1, 16)
        table, counts = table_of(gpu, [pool, pool]), counts_of(gpu, [2, 2])
        launch(gpu, x=filled(gpu), table=table, counts=counts, add=4)
        with pytest.raises(UninitializedRead, match=r"table\[0\]: .* row 1 of 2, which begins at byte 32 of 128"):
            launch(gpu, x=filled(gpu), table=table, counts=counts, add=8)
        gpu.sweep_unreleased()


def scatter(*, memory: Any, x: Array, table: Array, counts: Array, **_: Any) -> None:
    memory.scatter_rows(table, counts, x, offset=1, stride=6, dtype="f32")


@pytest.mark.parametrize("separate", [False, True])
def test_scattered_rows_are_written_and_nothing_else_is(separate: bool) -> None:
    """Two entries, rows 2 and 0, of 16 bytes from byte 4 on of rows that are 24 bytes apart."""
    with opened(scatter) as gpu:
        pool = made(gpu, 200)
        spans = [pool, made(gpu, 200) if separate else pool + 96]
        launch(gpu, x=filled(gpu), table=table_of(gpu, spans), counts=counts_of(gpu, [2, 0]))
        for span, row in zip(spans, (2, 0), strict=True):
            first = span + 4 + 24 * row
            assert read(gpu, first, 16) == b"\x01" * 16
            for outside in (first - 1, first + 16):
                with pytest.raises(UninitializedRead):
                    read(gpu, outside, 1)
        gpu.sweep_unreleased()


@pytest.mark.parametrize(("ldc", "stride_c"), [(4, 8), (6, 12), (8, 4)])
def test_products_write_their_rows_and_nothing_else(ldc: int, stride_c: int) -> None:
    with opened() as gpu:
        a, w, c = filled(gpu, 64), filled(gpu, 128), made(gpu, 256)
        for accumulate in (False, True):
            gpu.gemm_strided_batched(
                a,
                w,
                c,
                2,
                4,
                4,
                2,
                stride_a=8,
                stride_w=0,
                stride_c=stride_c,
                ldc=ldc,
                dtype="f32",
                accumulate=accumulate,
            )
        written = {
            4 * (batch * stride_c + row * ldc + column) for batch in (0, 1) for row in (0, 1) for column in range(4)
        }
        for byte in range(0, 256, 4):
            if byte in written:
                read(gpu, c + byte, 4)
            else:
                with pytest.raises(UninitializedRead):
                    read(gpu, c + byte, 4)
        gpu.sweep_unreleased()


def test_a_launch_writes_its_rows_and_nothing_else() -> None:
    with opened() as gpu:
        x, out = filled(gpu), made(gpu, 64)
        launch(gpu, x=x, out=out, out_stride=6)
        for start in (0, 24):
            read(gpu, out + start, 16)
        for start, count in ((16, 8), (40, 24), (15, 2), (23, 2)):
            with pytest.raises(UninitializedRead):
                read(gpu, out + start, count)
        gpu.sweep_unreleased()


def test_padding_between_input_rows_is_not_read() -> None:
    with opened() as gpu:
        x, out = made(gpu, 40), made(gpu)
        for row in (0, 24):
            gpu.memset(x + row, 1, 16)
        launch(gpu, x=x, out=out, x_stride=6)
        read(gpu, out)
        gpu.sweep_unreleased()
