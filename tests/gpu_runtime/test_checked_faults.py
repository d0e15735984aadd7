# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every kind of fault, planted: it is found and named, and the same program without it runs clean."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError, GuardViolation, InvalidPointer, UninitializedRead, UnwrittenOutput
from gpu_runtime.host import HostBackend
from tests.gpu_runtime import checked
from tests.gpu_runtime.checked import (
    BYTES,
    counts_of,
    dropped,
    dropped_again,
    filled,
    launch,
    made,
    opened,
    read,
    table_of,
)

Program = Callable[[HostBackend, bool], None]


@dataclass(frozen=True)
class Fault:
    """A program with and without a fault, the error, and what its message must say, in this order."""

    program: Program
    error: type[DeviceError]
    says: tuple[str, ...]
    reference: checked.Reference = checked.compute


FAULTS: dict[str, Fault] = {}


def fault(
    error: type[DeviceError], *says: str, reference: checked.Reference = checked.compute
) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        FAULTS[program.__name__] = Fault(program, error, says, reference)
        return program

    return add


FILE = re.escape(__file__.rsplit("/", 1)[0])
MADE = rf"allocated at {FILE}/checked\.py:\d+ in made"
DROPPED = rf"freed at {FILE}/checked\.py:\d+ in dropped"
AGAIN = rf"and again at {FILE}/checked\.py:\d+ in dropped_again"
READ = rf"at {FILE}/checked\.py:\d+ in read"
LAUNCHED = rf"at {FILE}/checked\.py:\d+ in launch"
HERE = rf"at {FILE}/test_checked_faults\.py:\d+ in "

# lifetime


@fault(InvalidPointer, "copy_d2h: src: .*use after free of byte 8 of 32 bytes at 0x", "for KV", MADE, DROPPED, READ)
def a_copy_from_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu, tag="KV")
    if faulty:
        dropped(gpu, ptr)
    read(gpu, ptr + 8, 8)


@fault(InvalidPointer, "probe: x: .*use after free of byte 0 of 32 bytes", MADE, DROPPED, LAUNCHED)
def a_launch_on_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    x, out = filled(gpu), made(gpu)
    launch(gpu, x=x, out=out)
    if faulty:
        dropped(gpu, x)
    launch(gpu, x=x, out=out)


@fault(InvalidPointer, "gemm: w: .*use after free of byte 0 of 32 bytes", MADE, DROPPED, HERE + "a_product")
def a_product_of_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    a, w, c = filled(gpu), filled(gpu), made(gpu)
    if faulty:
        dropped(gpu, w)
    gpu.gemm(a, w, c, 2, 2, 4, dtype="f32")


@fault(InvalidPointer, "probe: x: use after free of 32 bytes", MADE, DROPPED, LAUNCHED, f"replayed {HERE}a_replay")
def a_replay_on_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    x, out = filled(gpu), made(gpu)
    gpu.begin_capture()
    launch(gpu, x=x, out=out)
    graph = gpu.end_capture()
    if faulty:
        dropped(gpu, x)
    gpu.launch_graph(graph)


@fault(InvalidPointer, "copy_h2d: dst: use after free of 64 bytes", MADE, DROPPED, f"used {HERE}a_replayed_copy")
def a_replayed_copy_to_a_freed_block_whose_address_is_in_use_again(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, 64)
    gpu.begin_capture()
    gpu.copy_h2d_async(bytes(64), ptr)
    graph = gpu.end_capture()
    if faulty:
        dropped(gpu, ptr)
        gpu._memory.finish()  # as when the quarantine is full
        for _ in range(1000):  # the allocator hands out the same address soon
            if made(gpu, 64) == ptr:
                break
    gpu.launch_graph(graph)


@fault(InvalidPointer, "probe: table: .*use after free of byte 0 of 64 bytes", MADE, DROPPED, LAUNCHED)
def an_address_table_that_names_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    blocks = [filled(gpu, 64), filled(gpu, 64)]
    if faulty:
        dropped(gpu, blocks[1])
    gathered(gpu, blocks, [1, 1])


@fault(InvalidPointer, "free: freed twice: 32 bytes at 0x", "for KV", MADE, DROPPED, AGAIN)
def a_block_that_is_freed_twice(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu, tag="KV")
    dropped(gpu, ptr)
    if faulty:
        dropped_again(gpu, ptr)


@fault(
    InvalidPointer, "free: 0x.* lies inside a block that was freed already: 32 bytes", MADE, DROPPED, "dropped_again"
)
def a_stale_address_inside_a_block_is_freed(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu)
    dropped(gpu, ptr)
    if faulty:
        dropped_again(gpu, ptr + 8)


@fault(InvalidPointer, "free: expected the start of a live", "it lies inside 32 bytes", MADE, "freed at .* in dropped")
def a_free_of_the_inside_of_a_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu)
    dropped(gpu, ptr + 4 if faulty else ptr)


@fault(GuardViolation, "close: 3 bytes written after the free, the first is byte 5 of 32 bytes", MADE, DROPPED)
def a_foreign_write_to_a_freed_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu)
    if not faulty:
        ctypes.memset(int(ptr) + 5, 7, 3)
    dropped(gpu, ptr)
    if faulty:
        ctypes.memset(int(ptr) + 5, 7, 3)
    gpu.close()


@fault(GuardViolation, "close: 1 byte written after the free, the first is byte 4 of 16 bytes", "for pinned host")
def a_write_to_page_locked_memory_that_was_freed(gpu: HostBackend, faulty: bool) -> None:
    memory = gpu.alloc_host_pinned(16)
    gpu.free_host_pinned(memory)
    if faulty:
        memory.array[4] = 1
    gpu.close()


# bounds


@fault(InvalidPointer, "copy_d2h: src: span of 33 bytes at 0x.* ends 1 byte past 32 bytes at", "for KV", MADE, READ)
def a_copy_that_ends_past_its_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = filled(gpu, tag="KV")
    read(gpu, ptr, 33 if faulty else 32)


@fault(InvalidPointer, "memset: ptr: .*the nearest is 4 bytes before 32 bytes", "for KV", MADE, HERE + "a_memset")
def a_memset_that_begins_before_its_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, tag="KV")
    gpu.memset(ptr - 4 if faulty else ptr, 0, 8)


@fault(InvalidPointer, "probe: x: .*the nearest is 96 bytes past the end of 32 bytes", MADE, LAUNCHED)
def a_launch_far_past_a_block(gpu: HostBackend, faulty: bool) -> None:
    x, out = filled(gpu), made(gpu, 4096)
    launch(gpu, x=x + 128 if faulty else x, out=out)


@fault(InvalidPointer, "probe: out: span of 48 bytes at 0x.* ends 16 bytes past 32 bytes", MADE, LAUNCHED)
def a_launch_whose_last_row_is_too_long(gpu: HostBackend, faulty: bool) -> None:
    x, out = filled(gpu), made(gpu)
    launch(gpu, x=x, out=out, out_stride=8 if faulty else 4)


@fault(InvalidPointer, "probe: table: .*ends 16 bytes past 64 bytes", MADE, LAUNCHED)
def an_address_table_with_a_row_past_the_block(gpu: HostBackend, faulty: bool) -> None:
    pool = filled(gpu, 64)
    gathered(gpu, [pool, pool + 32], [2, 3 if faulty else 2])


@fault(GuardViolation, "free: 1 byte overwritten, the nearest 3 bytes past the last byte of 100 bytes", MADE, DROPPED)
def a_foreign_write_past_a_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, 100)
    ctypes.memset(int(ptr) + 102 - 3 * (not faulty), 7, 1)
    dropped(gpu, ptr)


@fault(GuardViolation, "free: 2 bytes overwritten, the nearest 8 bytes before the first byte of 100 bytes", MADE)
def a_foreign_write_before_a_block(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, 100)
    ctypes.memset(int(ptr) - 9 * faulty, 7, 2)
    dropped(gpu, ptr)


@fault(
    GuardViolation,
    "sweep_unreleased: 1 byte overwritten, the nearest 1 byte past .* 100 bytes",
    MADE,
    f"freed {HERE}damage_that_a_sweep",
)
def damage_that_a_sweep_finds(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, 100)
    ctypes.memset(int(ptr) + 100 * faulty, 7, 1)
    gpu.sweep_unreleased()


@fault(GuardViolation, "close: 1 byte overwritten, .* 100 bytes", MADE, f"freed {HERE}damage_that_close_finds")
def damage_that_close_finds(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu, 100)
    ctypes.memset(int(ptr) + 100 * faulty, 7, 1)
    gpu.close()


# reads of what was never written


@fault(UninitializedRead, "copy_d2h: src: never written: 4 of 32 bytes", r"\[28\], byte 28 of 32", MADE, READ)
def a_copy_of_a_tail_that_was_not_filled(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu)
    gpu.copy_h2d(bytes(28 if faulty else 32), ptr)
    read(gpu, ptr)


@fault(
    UninitializedRead,
    "probe: x: never written: 4 of 32 bytes",
    r"element \[1, 2\], byte 40 of 52 bytes",
    MADE,
    LAUNCHED,
)
def a_launch_with_an_element_that_was_not_filled(gpu: HostBackend, faulty: bool) -> None:
    x, out = made(gpu, 52), made(gpu)
    gpu.memset(x, 0, 40)
    gpu.memset(x + 44 - 4 * (not faulty), 0, 8)  # element [1, 2] of rows that are 8 elements apart is at 40
    launch(gpu, x=x, out=out, x_stride=8)


@fault(UninitializedRead, "probe: sum: never written: 32 of 32 bytes", r"\[0, 0\]", MADE, LAUNCHED)
def a_launch_that_adds_to_nothing(gpu: HostBackend, faulty: bool) -> None:
    x, total, out = filled(gpu), made(gpu), made(gpu)
    launch(gpu, x=x, out=out, sum=total, add=int(faulty))


@fault(UninitializedRead, "gemm: bias: never written: 8 of 8 bytes", MADE, HERE + "a_product_with")
def a_product_with_a_bias_that_was_not_filled(gpu: HostBackend, faulty: bool) -> None:
    a, w, c, bias = filled(gpu), filled(gpu), made(gpu), made(gpu, 8)
    gpu.gemm(a, w, c, 2, 2, 4, dtype="f32", bias=bias if faulty else 0)


@fault(
    UninitializedRead,
    "gemm: c: never written: 16 of 16 bytes",
    r"\[0, 0\], byte 0 of 32 bytes",
    MADE,
    HERE + "a_product_added",
)
def a_product_added_to_nothing(gpu: HostBackend, faulty: bool) -> None:
    a, w, c = filled(gpu), filled(gpu), made(gpu)
    gpu.gemm(a, w, c, 2, 2, 4, dtype="f32", accumulate=faulty)


@fault(
    UninitializedRead,
    r"probe: table\[1\]: never written: something in row 2 of 3",
    "byte 96 of 128 bytes",
    MADE,
    LAUNCHED,
)
def an_address_table_with_a_row_that_was_not_filled(gpu: HostBackend, faulty: bool) -> None:
    pool = made(gpu, 128)
    gpu.memset(pool, 1, 100 if faulty else 112)
    gathered(gpu, [pool, pool + 64], [4, 3])


@fault(
    UninitializedRead,
    "copy_d2h: src: never written: 16 of 32 bytes",
    "byte 16 of 32 bytes at 0x.* for copy",
    MADE,
    READ,
)
def a_read_of_what_was_copied_unwritten(gpu: HostBackend, faulty: bool) -> None:
    """The copy itself is no fault: rows are moved with their padding."""
    source, target = made(gpu), filled(gpu, tag="copy")
    gpu.memset(source, 1, 16)
    if not faulty:
        gpu.memset(source + 16, 1, 16)
    gpu.copy_d2d(source, target, 32)
    read(gpu, target)


@fault(
    UninitializedRead,
    "copy_d2h: src: never written: 32 of 32 bytes",
    MADE,
    READ,
    "yet 32 bytes changed: who writes by address calls mark_written",
)
def foreign_writes_that_nobody_told_of(gpu: HostBackend, faulty: bool) -> None:
    ptr = made(gpu)
    ctypes.memset(int(ptr), 7, 32)
    if not faulty:
        gpu.mark_written(ptr, 32)
    read(gpu, ptr)


@fault(UninitializedRead, "copy_d2h: src: never written: 1 of 32 bytes", r"\[31\]", "in made_managed", READ)
def managed_memory_that_was_not_filled(gpu: HostBackend, faulty: bool) -> None:
    ptr = made_managed(gpu)
    ctypes.memset(int(ptr), 0, 32)
    gpu.mark_written(ptr, 31 if faulty else 32)
    read(gpu, ptr)


def made_managed(gpu: HostBackend) -> int:
    return gpu.alloc_managed(BYTES)


# kernels that do not do what their spec says


def skips_an_element(*, x: Any, out: Any, **_: Any) -> None:
    keep = out[1, 2]
    out[...] = x
    if x[0, 0] == 0:
        out[1, 2] = keep


@fault(
    UnwrittenOutput, r"probe: out: left unwritten: 1 of 8 elements, the first \[1, 2\] in 32 bytes",
    MADE, LAUNCHED, reference=skips_an_element,
)  # fmt: skip
def an_element_that_the_kernel_leaves_unwritten(gpu: HostBackend, faulty: bool) -> None:
    x, out = filled(gpu), filled(gpu)
    gpu.memset(x, 0 if faulty else 1, 32)
    launch(gpu, x=x, out=out)


def strays(*, x: Any, out: Any, **_: Any) -> None:
    out[...] = x
    ctypes.memset(out.ctypes.data + int(x[0, 0]), 7, 2)


def given(gpu: HostBackend, offset: int) -> int:
    """Return an input that makes `strays` write at ``offset`` from its output's first byte."""
    x = made(gpu)
    gpu.copy_h2d(np.full(8, offset, np.float32), x)
    return x


@fault(GuardViolation, "probe: out: 2 bytes beside", "byte 66 of 200 bytes", MADE, LAUNCHED, reference=strays)
def a_kernel_that_writes_past_its_output(gpu: HostBackend, faulty: bool) -> None:
    launch(gpu, x=given(gpu, 34 if faulty else 30), out=made(gpu, 200) + 32)


@fault(GuardViolation, "probe: out: 2 bytes beside", "byte 29 of 200 bytes", MADE, LAUNCHED, reference=strays)
def a_kernel_that_writes_before_its_output(gpu: HostBackend, faulty: bool) -> None:
    launch(gpu, x=given(gpu, -3 if faulty else 3), out=made(gpu, 200) + 32)


@fault(GuardViolation, "probe: out: 2 bytes beside", "byte 16 of 100 bytes", MADE, LAUNCHED, reference=strays)
def a_kernel_that_writes_between_the_rows_of_its_output(gpu: HostBackend, faulty: bool) -> None:
    launch(gpu, x=given(gpu, 16 if faulty else 24), out=made(gpu, 100), out_stride=6)


@fault(GuardViolation, "probe: out: 2 bytes beside", "3 bytes past the end of 32", MADE, LAUNCHED, reference=strays)
def a_kernel_that_writes_past_its_block(gpu: HostBackend, faulty: bool) -> None:
    """Found at the launch; the guard band would only tell when the block is freed."""
    launch(gpu, x=given(gpu, 35 if faulty else 3), out=made(gpu))


@fault(GuardViolation, "probe: out: 2 bytes beside", "2 bytes before 32", MADE, LAUNCHED, reference=strays)
def a_kernel_that_writes_before_its_block(gpu: HostBackend, faulty: bool) -> None:
    launch(gpu, x=given(gpu, -2 if faulty else 0), out=made(gpu))


def scatters(*, memory: Any, x: Any, table: Any, counts: Any, **_: Any) -> None:
    memory.scatter_rows(table, counts, x, offset=0, stride=4, dtype="f32")


@fault(
    DeviceError,
    "probe: table: entries 0 and 1 write the same bytes, at byte 16 of 64",
    MADE,
    LAUNCHED,
    reference=scatters,
)
def two_entries_of_a_table_that_write_one_row(gpu: HostBackend, faulty: bool) -> None:
    pool = made(gpu, 64)
    launch(gpu, x=filled(gpu), table=table_of(gpu, [pool, pool + 16]), counts=counts_of(gpu, [1 if faulty else 2, 0]))


def gathered(gpu: HostBackend, addresses: list[Any], counts: list[int]) -> None:
    """Launch a kernel that reads rows of four floats through a table."""
    launch(gpu, x=filled(gpu), table=table_of(gpu, addresses), counts=counts_of(gpu, counts), out=made(gpu))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    planted = FAULTS[name]
    gpu = opened(planted.reference)
    with pytest.raises(DeviceError) as found:
        planted.program(gpu, True)
    assert type(found.value) is planted.error
    assert re.search(".*".join(planted.says), str(found.value)), f"{found.value}\nshould say {planted.says}"


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_program_runs_clean(name: str) -> None:
    planted = FAULTS[name]
    gpu = opened(planted.reference)
    planted.program(gpu, False)
    gpu.close()
