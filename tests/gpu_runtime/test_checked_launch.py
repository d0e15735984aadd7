# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checked launch gives a kernel, and what it lets the kernel do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from gpu_runtime import dtypes
from gpu_runtime.errors import DeviceError, GuardViolation, InvalidPointer, UninitializedRead, UnwrittenOutput
from gpu_runtime.gemm import Gemm
from gpu_runtime.host import poison
from gpu_runtime.op import EXACT, OpSpec, scalar, tensor
from tests.gpu_runtime.checked import BYTES, compute, counts_of, filled, floats, launch, made, opened, read, table_of

Array = np.ndarray[Any, np.dtype[Any]]


def uploaded(gpu: Any, values: Any, dtype: str = "f32") -> int:
    data = np.asarray(values, dtype=dtypes.NUMPY[dtype])
    ptr = made(gpu, data.nbytes)
    gpu.copy_h2d(data, ptr)
    return ptr


ONES = np.ones(8)

# outputs


@pytest.mark.parametrize("dtype", dtypes.FLOAT_TYPES)
@pytest.mark.parametrize("written", [False, True])
def test_a_kernel_that_reads_its_output_is_found_or_gets_nan(dtype: str, written: bool) -> None:
    """Even where the memory was written before: on a GPU it may hold anything by then.

    It is found where arithmetic hands on which NaN it was, as it does in float32 and float16.
    """

    def adds_to_its_output(*, x: Array, out: Array, **_: Any) -> None:
        out[...] = out + x

    with opened(adds_to_its_output) as gpu:
        x, out = uploaded(gpu, ONES, dtype), uploaded(gpu, ONES, dtype) if written else made(gpu)
        if dtype == "bf16":
            launch(gpu, dtype=dtype, x=x, out=out)
            assert np.isnan(floats(gpu, out, dtype=dtype)).all()
        else:
            with pytest.raises(
                UninitializedRead, match=r"probe: out: read, although .* 8 of 8 elements, the first \[0, 0\]"
            ):
                launch(gpu, dtype=dtype, x=x, out=out)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("dtype", dtypes.FLOAT_TYPES)
@pytest.mark.parametrize("missing", [(0, 0), (1, 3)])
def test_an_unwritten_element_is_named_by_its_index(dtype: str, missing: tuple[int, int]) -> None:
    def all_but_one(*, x: Array, out: Array, **_: Any) -> None:
        kept = out[missing]
        out[...] = x
        out[missing] = kept

    with opened(all_but_one) as gpu:
        x, out = uploaded(gpu, ONES, dtype), uploaded(gpu, np.zeros(64), dtype)
        with pytest.raises(
            UnwrittenOutput, match=rf"out: .* 1 of 8 elements, the first \[{missing[0]}, {missing[1]}\]"
        ):
            launch(gpu, dtype=dtype, x=x, out=out, out_stride=5)
        with pytest.raises(UninitializedRead):
            floats(gpu, out, dtype=dtype)
        gpu.sweep_unreleased()


def test_an_output_of_nothing_but_the_pattern_is_no_fault() -> None:
    """A second run tells what was written from what was left: here a kernel writes the very bytes of the pattern."""
    runs = []

    def copies(*, x: Array, out: Array, marks: Array, sum: Array, add: int, **_: Any) -> None:
        runs.append(add)
        marks[...] = poison.OUTPUT & 0xFF
        out.view(np.uint32)[...] = x.view(np.uint32)
        sum += x

    with opened(copies) as gpu:
        pattern = np.full(8, poison.element(poison.OUTPUT, 4), np.uint32)
        x, total = made(gpu), uploaded(gpu, np.zeros(8))
        gpu.copy_h2d(pattern, x)
        out, marks = made(gpu), made(gpu, 2)
        launch(gpu, x=x, out=out, marks=marks, sum=total, add=1)
        assert read(gpu, out) == pattern.tobytes()
        assert read(gpu, marks, 2) == bytes([poison.OUTPUT & 0xFF] * 2)
        assert len(runs) == 2
        gpu.sweep_unreleased()


def test_a_second_run_finds_what_the_first_one_found() -> None:
    """What is updated in place, or is an input as well, is put back before it."""
    seen = []

    def updates(*, x: Array, marks: Array, sum: Array, out: Array, **_: Any) -> None:
        seen.append((float(sum[1, 3]), float(x[1, 3])))
        marks[...] = poison.OUTPUT & 0xFF
        sum += x
        out *= 3

    with opened(updates) as gpu:
        x, total, marks = uploaded(gpu, ONES), uploaded(gpu, 10 * ONES), made(gpu, 2)
        launch(gpu, x=x, marks=marks, sum=total, add=1, out=x)
        assert seen == [(10.0, 1.0)] * 2
        assert floats(gpu, total) == [11.0] * 8
        assert floats(gpu, x) == [3.0] * 8
        gpu.sweep_unreleased()


def test_an_unwritten_byte_is_found_though_its_values_are_few() -> None:
    def half(*, marks: Array, **_: Any) -> None:
        marks[0] = poison.OUTPUT & 0xFF

    with opened(half) as gpu:
        with pytest.raises(UnwrittenOutput, match=r"probe: marks: left unwritten: 1 of 2 elements, the first \[1\]"):
            launch(gpu, x=filled(gpu), marks=made(gpu, 2))
        gpu.sweep_unreleased()


def test_an_output_in_place_of_an_input_keeps_the_input() -> None:
    with opened() as gpu:
        x = uploaded(gpu, ONES)
        launch(gpu, x=x, out=x)
        assert floats(gpu, x) == [2.0] * 8
        gpu.sweep_unreleased()


def test_outputs_may_lie_side_by_side() -> None:
    """None is surroundings of the other; what is between them and beyond is watched."""

    def strays(*, x: Array, out: Array, marks: Array, **_: Any) -> None:
        out[...] = x
        marks[...] = 1
        ctypes.memset(marks.ctypes.data + int(x[0, 0]), 9, 1)

    with opened(strays) as gpu:
        arena, fine = made(gpu, 64), uploaded(gpu, 0 * ONES)
        launch(gpu, x=fine, out=arena, marks=arena + 32)
        launch(gpu, x=fine, out=arena + 4, marks=arena)
        for out, marks, stray, owner in ((0, 32, 2, "marks"), (32, 0, 10, "out"), (4, 0, 3, "out"), (4, 0, 36, "out")):
            with pytest.raises(
                GuardViolation, match=rf"probe: {owner}: 1 byte beside .* byte {marks + stray} of 64 bytes"
            ):
                launch(gpu, x=uploaded(gpu, stray * ONES), out=arena + out, marks=arena + marks)
        gpu.sweep_unreleased()


def test_outputs_may_interleave() -> None:
    """Each row of one lies between two rows of the other."""
    with opened() as gpu:
        arena, x = made(gpu, 64), uploaded(gpu, ONES)
        for first, second in ((arena, arena + 16), (arena + 16, arena)):
            launch(gpu, x=x, out=first, sum=second, out_stride=8)
        assert floats(gpu, arena, 16) == ([1.0] * 4 + [2.0] * 4) * 2
        gpu.sweep_unreleased()


def test_the_host_may_write_managed_memory_beside_an_output() -> None:
    """Nobody can tell the host's writes from the kernel's there."""

    def strays(*, x: Array, out: Array, **_: Any) -> None:
        out[...] = x
        ctypes.memset(out.ctypes.data + 40, 9, 1)

    with opened(strays) as gpu:
        launch(gpu, x=filled(gpu), out=gpu.alloc_managed(64))
        memory = gpu.alloc_host_pinned(64)
        launch(gpu, x=filled(gpu), out=gpu.host_ptr_to_device(memory))
        gpu.free_host_pinned(memory)
        gpu.sweep_unreleased()


def test_far_from_its_outputs_a_kernel_is_not_watched() -> None:
    """What is not seen is as documented: stray writes inside a block, more than 4,096 bytes from the output."""

    def strays(*, x: Array, out: Array, **_: Any) -> None:
        out[...] = x
        ctypes.memset(out.ctypes.data + BYTES + int(x[0, 0]), 9, 1)

    with opened(strays) as gpu:
        out = made(gpu, 10_000)
        launch(gpu, x=uploaded(gpu, 4096 * ONES), out=out)
        with pytest.raises(GuardViolation):
            launch(gpu, x=uploaded(gpu, 4095 * ONES), out=out)
        gpu.sweep_unreleased()


def test_outputs_of_a_kernel_that_fails_hold_nothing() -> None:
    def fails(*, out: Array, **_: Any) -> None:
        out[...] = 1
        raise DeviceError("probe: failed as asked")

    with opened(fails) as gpu:
        out = uploaded(gpu, ONES)
        with pytest.raises(DeviceError, match="failed as asked"):
            launch(gpu, x=filled(gpu), out=out)
        with pytest.raises(UninitializedRead):
            floats(gpu, out)
        gpu.sweep_unreleased()


def test_empty_outputs() -> None:
    with opened(lambda **_: None) as gpu:
        launch(gpu, x=filled(gpu), out=made(gpu), rows=0)
        gpu.sweep_unreleased()


# what an argument's spec says of reading


def test_an_inout_is_read_when_its_spec_says_so() -> None:
    with opened() as gpu:
        x, total = uploaded(gpu, ONES), made(gpu)
        with pytest.raises(UninitializedRead, match="probe: sum"):
            launch(gpu, x=x, sum=total, add=1)
        launch(gpu, x=x, sum=total, add=0)
        launch(gpu, x=x, sum=total, add=7)
        assert floats(gpu, total) == [2.0] * 8
        gpu.sweep_unreleased()


def test_an_inout_that_is_not_read_must_be_written() -> None:
    def forgets(*, x: Array, sum: Array, add: int, **_: Any) -> None:
        sum[0] = x[0]

    with opened(forgets) as gpu:
        x, total = filled(gpu), filled(gpu)
        launch(gpu, x=x, sum=total, add=1)
        with pytest.raises(UnwrittenOutput, match=r"probe: sum: left unwritten: 4 of 8 elements, the first \[1, 0\]"):
            launch(gpu, x=x, sum=total, add=0)
        gpu.sweep_unreleased()


def test_scratch_means_nothing_before_and_after() -> None:
    seen = []

    def uses_scratch(*, scratch: Array, **_: Any) -> None:
        seen.append(scratch.tobytes())
        scratch[...] = 5

    with opened(uses_scratch) as gpu:
        scratch = filled(gpu, 64)
        launch(gpu, x=filled(gpu), scratch=scratch, scratch_bytes=64)
        assert seen == [poison.SCRATCH.to_bytes(2, "little") * 32] or seen == [bytes([poison.SCRATCH & 0xFF]) * 64]
        assert set(read(gpu, scratch, 64)) <= set(poison.BYTES)
        blank = made(gpu, 64)
        launch(gpu, x=filled(gpu), scratch=blank, scratch_bytes=64)
        with pytest.raises(UninitializedRead):
            read(gpu, blank, 64)
        gpu.sweep_unreleased()


def test_a_product_destroys_its_workspace() -> None:
    with opened() as gpu:
        a, w, c, space = filled(gpu), filled(gpu), made(gpu), filled(gpu, 512)
        gpu.gemm(a, w, c, 2, 2, 4, dtype="f32", workspace=space + 256, workspace_bytes=200)
        content = read(gpu, space, 512)
        assert set(content[:256]) == set(content[456:]) == {1}
        assert set(content[256:456]) <= set(poison.BYTES)
        gpu.sweep_unreleased()


@pytest.mark.parametrize("reads_when", ["width", "f"])
def test_reads_when_names_an_integer_scalar(reads_when: str) -> None:
    args = (tensor("x", "inout", "T", "n", reads_when=reads_when), scalar("n", "i32"), scalar("f", "f32"))
    with pytest.raises(ValueError, match=f"spec: x: reads_when: .*, got '{reads_when}'"):
        OpSpec("spec", args, EXACT)


def test_what_is_read() -> None:
    roles = [
        ("in", True, True),
        ("out", True, False),
        ("inout", True, True),
        ("inout", False, False),
        ("inout", "n", True),
        ("inout", "zero", False),
    ]
    for role, reads_when, reads in roles:
        arg = tensor("x", role, "T", "n", reads_when=reads_when)  # type: ignore[arg-type]
        assert arg.reads({"n": 3, "zero": 0}) is reads
        assert arg.is_scratch is (reads_when is False)


# tables of addresses


def test_a_kernel_gets_two_calls_and_no_memory() -> None:
    seen = []

    def looks(*, memory: Any, x: Array, out: Array, **_: Any) -> None:
        seen.append([name for name in dir(memory) if not name.startswith("_")])
        compute(memory=memory, x=x, out=out, table=None, counts=None, sum=None, add=0)  # type: ignore[arg-type]

    with opened(looks) as gpu:
        launch(gpu, x=filled(gpu), out=made(gpu))
        gpu.sweep_unreleased()
    assert seen == [["gather_rows", "scatter_rows"]]


def test_a_table_that_the_kernel_made_itself() -> None:
    def gathers(*, memory: Any, table: Array, counts: Array, **_: Any) -> None:
        memory.gather_rows(table + np.uint64(16), counts, offset=0, stride=4, width=4, dtype="f32")

    with opened(gathers) as gpu:
        pool = made(gpu, 64)
        with pytest.raises(UninitializedRead, match=r"probe: address table\[0\]: .* byte 16 of 64 bytes"):
            launch(gpu, x=filled(gpu), table=table_of(gpu, [pool, pool]), counts=counts_of(gpu, [1, 1]))
        gpu.sweep_unreleased()


@pytest.mark.parametrize("rows", [[0, 0], [1, 2]])
def test_entries_that_overlap_in_part(rows: list[int]) -> None:
    """Rows of 16 bytes, 8 apart: one row may begin inside another, which is no less a race."""

    def scatters(*, memory: Any, x: Array, table: Array, counts: Array, **_: Any) -> None:
        memory.scatter_rows(table, counts, x, offset=0, stride=2, dtype="f32")

    with opened(scatters) as gpu:
        pool = made(gpu, 64)
        with pytest.raises(DeviceError, match="entries 0 and 1 write the same bytes"):
            launch(gpu, x=filled(gpu), table=table_of(gpu, [pool, pool]), counts=counts_of(gpu, rows))
        launch(gpu, x=filled(gpu), table=table_of(gpu, [pool, pool]), counts=counts_of(gpu, [0, 2]))
        gpu.sweep_unreleased()


@pytest.mark.parametrize("stray", [0, 1])
def test_rows_that_a_kernel_scatters_beside_its_output_are_its_own(stray: int) -> None:
    """Rows of 16 bytes at 96 and 48, around an output of 32 bytes at 64; byte 112 is nobody's."""

    def scatters(*, memory: Any, x: Array, table: Array, counts: Array, out: Array, add: int, **_: Any) -> None:
        out[...] = x
        memory.scatter_rows(table, counts, x + x, offset=0, stride=4, dtype="f32")
        if add:
            ctypes.memset(out.ctypes.data + 48, 9, 1)

    with opened(scatters) as gpu:
        pool = made(gpu, 128)
        tables: dict[str, Any] = {"table": table_of(gpu, [pool, pool]), "counts": counts_of(gpu, [6, 3])}
        if stray:
            with pytest.raises(GuardViolation, match=r"out: 1 byte beside .* the first of them byte 112 of 128 bytes"):
                launch(gpu, x=filled(gpu), out=pool + 64, add=1, **tables)
        else:
            launch(gpu, x=filled(gpu), out=pool + 64, **tables)
            read(gpu, pool + 48, 64)
        gpu.sweep_unreleased()


def test_rows_that_an_earlier_launch_scattered_are_not_this_ones() -> None:
    def scatters(*, memory: Any, x: Array, table: Array, counts: Array, out: Array, **_: Any) -> None:
        out[...] = x
        memory.scatter_rows(table, counts, x, offset=0, stride=4, dtype="f32")
        ctypes.memset(out.ctypes.data + 40, int(counts[0]), 1)

    with opened(scatters) as gpu:
        pool, x, counts = made(gpu, 128), filled(gpu), counts_of(gpu, [6, 3])
        table = table_of(gpu, [pool, pool])
        launch(gpu, x=x, out=pool + 64, table=table, counts=counts)
        gpu.copy_h2d(np.array([7, 3], np.int32), counts)
        with pytest.raises(GuardViolation, match="byte 104 of 128 bytes"):
            launch(gpu, x=x, out=pool + 64, table=table, counts=counts)
        gpu.sweep_unreleased()


def test_poison_in_a_table_is_no_address() -> None:
    with opened() as gpu:
        table = made(gpu, 16)
        gpu.mark_written(table, 16)  # a lie
        with pytest.raises(InvalidPointer, match=r"probe: table: .* addresses from 0x7fff7fff7fff7fff"):
            launch(gpu, x=filled(gpu), table=table, counts=counts_of(gpu, [1, 1]))
        gpu.sweep_unreleased()


def test_a_batch_of_one_is_named_like_a_single_product() -> None:
    assert Gemm.of(2, 2, 4, "f32", None, None, None, None).batch == 1
    with opened() as gpu:
        a, w, c = made(gpu), filled(gpu), made(gpu)
        gpu.memset(a, 0, 24)
        with pytest.raises(
            UninitializedRead, match=r"gemm: a: never written: 8 of 32 bytes, the first in element \[1, 2\]"
        ):
            gpu.gemm(a, w, c, 2, 2, 4, dtype="f32")
        with pytest.raises(UninitializedRead, match=r"the first in element \[1, 0, 2\]"):
            gpu.gemm_strided_batched(a, w, c, 1, 2, 4, 2, stride_a=4, stride_w=0, stride_c=2, dtype="f32")
        gpu.sweep_unreleased()
