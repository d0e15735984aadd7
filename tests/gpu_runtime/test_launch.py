# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launches: what reaches a kernel, and what is refused before it is enqueued."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import metrale.ops  # noqa: F401  (registers the ops)
from gpu_runtime import GpuBackend, InvalidPointer, KernelHandle, UnknownKernel
from gpu_runtime.host import HostBackend
from gpu_runtime.launch import check_arguments, check_geometry
from gpu_runtime.limits import MINIMUM
from gpu_runtime.op import EXACT, Op, OpRegistry, OpSpec, scalar, tensor
from gpu_runtime.op import REGISTRY as PROCESS_REGISTRY
from tests.backends import Device, host_only
from tests.gpu_runtime import toy
from tests.gpu_runtime.toy import launch, values
from tests.ops.harness import download, upload

X = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


@pytest.fixture
def pair(gpu: GpuBackend) -> tuple[int, int]:
    return upload(gpu, X), upload(gpu, np.zeros_like(X))


def test_runs_the_kernel(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    launch(gpu, values(*pair))
    assert download(gpu, pair[1], X).tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_takes_numpy_numbers(gpu: GpuBackend, pair: tuple[int, int], kind: Any) -> None:
    arguments = values(*map(np.uint64, pair), rows=kind(1), width=kind(4), factor=np.float64(0.5))
    grid: Any = (kind(1), kind(1))
    block: Any = kind(32)
    gpu.launch(gpu.kernel("toy", "toy_f32"), grid, block, kind(0), 0, arguments)
    assert download(gpu, pair[1], X).tolist() == [0.5, 1, 1.5, 2]


def test_optional_pointer(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    launch(gpu, values(*pair, bias=upload(gpu, X)))
    assert download(gpu, pair[1], X).tolist() == [3, 6, 9, 12]


def test_rows_are_strided(gpu: GpuBackend) -> None:
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    source, target = upload(gpu, x), upload(gpu, np.full((3, 7), -1, dtype=np.float32))
    launch(gpu, values(source, target, rows=3, x_stride=5, out_stride=7))
    result = download(gpu, target, np.empty((3, 7), dtype=np.float32))
    assert np.array_equal(result[:, :4], 2 * x[:, :4])
    assert (result[:, 4:] == -1).all(), "padding is not touched"


def test_an_input_row_may_be_read_again(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    target = gpu.alloc(48)
    launch(gpu, values(pair[0], target, rows=3, x_stride=0))
    assert download(gpu, target, np.empty((3, 4), dtype=np.float32)).tolist() == [[2, 4, 6, 8]] * 3


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_entry_decides_the_element_type(gpu: GpuBackend, dtype: str) -> None:
    x = X.astype({"f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype])
    source, target = upload(gpu, x), upload(gpu, np.zeros_like(x))
    gpu.launch(gpu.kernel("toy", f"toy_{dtype}"), (1,), (32,), 0, 0, values(source, target))
    assert download(gpu, target, x).astype(np.float32).tolist() == [2, 4, 6, 8]


def test_op_plans_and_launches(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    with gpu.launch_trace() as trace:
        toy.OP.launch(gpu, "f32", values(*pair))
    (record,) = trace
    assert (record.kind, record.name, record.grid, record.block) == ("kernel", "toy_f32", (1, 1, 1), (32, 1, 1))


@pytest.mark.parametrize("wrong", [[], [1] * 9, values(0, 0, rows=1.5), values(0, 0, rows="1")])
def test_op_names_a_wrong_argument(gpu: GpuBackend, wrong: list[Any]) -> None:
    with pytest.raises(TypeError, match="toy: "):
        toy.OP.launch(gpu, "f32", wrong)


def test_op_without_a_plan(gpu: GpuBackend) -> None:
    op = Op(toy.SPEC, toy.reference, toy.make_inputs, ())
    with pytest.raises(UnknownKernel, match="neither a launch plan nor a library call"):
        op.launch(gpu, "f32", values(0, 0))


@pytest.mark.parametrize("include", [Path("kernels"), "kernels", ("kernels",), [Path("kernels")], None])
def test_an_op_s_include_is_a_tuple_of_paths(include: Any) -> None:
    with pytest.raises(TypeError, match=f"toy: include: expected a tuple of Path, got {re.escape(repr(include))}"):
        Op(toy.SPEC, toy.reference, toy.make_inputs, (), include=include)


def test_inputs_are_read_only_in_a_reference() -> None:
    def scribble(*, x: Any, **_: Any) -> None:
        x[...] = 0

    ops = OpRegistry()
    ops.register(Op(toy.SPEC, scribble, toy.make_inputs, (), plan=toy.plan))
    with HostBackend(ops=ops) as other:
        ptrs = upload(other, X), upload(other, X)
        with pytest.raises(ValueError, match="read-only"):
            launch(other, values(*ptrs))
        for ptr in ptrs:
            other.free(ptr)


@pytest.mark.parametrize("factor", [0.1, 1e-8, math.inf, -math.inf, 7])
def test_scalars_arrive_as_float32(factor: float) -> None:
    assert check_arguments(toy.SPEC, "f32", values(16, 32, factor=factor))[-1] == float(np.float32(factor))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": True}, TypeError),
        ({"x": None}, TypeError),
        ({"x": 16.0}, TypeError),
        ({"x": "16"}, TypeError),
        ({"x": 0}, ValueError),
        ({"x": -16}, ValueError),
        ({"x": 1 << 64}, ValueError),
        ({"x": 18}, ValueError),
        ({"bias": 3}, ValueError),
        ({"bias": False}, TypeError),
        ({"rows": 1.0}, TypeError),
        ({"rows": None}, TypeError),
        ({"rows": 1 << 31}, ValueError),
        ({"rows": -1}, ValueError),
        ({"width": -(1 << 31) - 1}, ValueError),
        ({"width": -4}, ValueError),
        ({"x_stride": 1 << 63}, ValueError),
        ({"x_stride": -4}, ValueError),
        ({"out_stride": -4}, ValueError),
        ({"out_stride": 3}, ValueError),
        ({"factor": 1e39}, ValueError),
        ({"factor": True}, TypeError),
        ({"factor": "2"}, TypeError),
        ({"factor": None}, TypeError),
        ({"factor": 1j}, TypeError),
    ],
    ids=str,
)
def test_arguments_are_checked(gpu: GpuBackend, change: dict[str, Any], error: type[Exception]) -> None:
    x, out = upload(gpu, np.zeros(4096, dtype=np.float32)), upload(gpu, X)
    with gpu.launch_trace() as trace, pytest.raises(error, match="toy: "):
        launch(gpu, values(**({"x": x, "out": out} | change)))
    assert trace == []
    assert np.array_equal(download(gpu, out, X), X)


@host_only
def test_extents_do_not_wrap(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    """2**30 rows of 2**30 elements: the span is past 64 bits."""
    with pytest.raises(InvalidPointer, match="toy: x: span of"):
        launch(gpu, values(*pair, rows=1 << 30, width=1 << 30, x_stride=1 << 30, out_stride=1 << 30))


@host_only
@pytest.mark.parametrize("which", ["x", "bias", "out"])
def test_spans_stay_inside_a_block(gpu: GpuBackend, pair: tuple[int, int], which: str) -> None:
    pointers = {"x": pair[0], "out": pair[1]} | {which: upload(gpu, X) + 4}
    with gpu.launch_trace() as trace, pytest.raises(InvalidPointer, match=f"toy: {which}: span of 16 bytes .* 4 bytes"):
        launch(gpu, values(**pointers))
    assert trace == []


def test_the_last_row_needs_no_padding(gpu: GpuBackend) -> None:
    x = upload(gpu, np.ones(9, dtype=np.float32))
    out = upload(gpu, np.zeros(8, np.float32))
    launch(gpu, values(x, out, rows=2, x_stride=5))
    assert download(gpu, out, np.empty(8, np.float32)).tolist() == [2] * 8


@host_only
def test_the_last_row_has_its_elements(gpu: GpuBackend) -> None:
    x = upload(gpu, np.ones(9, dtype=np.float32))
    with pytest.raises(InvalidPointer):
        launch(gpu, values(x, upload(gpu, np.zeros(8, np.float32)), rows=2, x_stride=6))


def test_a_named_alias_may_share_memory(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    launch(gpu, values(pair[0], pair[0]))
    assert download(gpu, pair[0], X).tolist() == [2, 4, 6, 8]


def test_other_overlaps_are_refused(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    x = upload(gpu, np.zeros(8, dtype=np.float32))
    with pytest.raises(ValueError, match="toy: out: expected memory apart from x"):
        launch(gpu, values(x, x + 4))
    with pytest.raises(ValueError, match="toy: out: expected memory apart from bias"):
        launch(gpu, values(x, pair[1], bias=pair[1]))


def test_interleaved_rows_do_not_overlap(gpu: GpuBackend) -> None:
    x = np.zeros((3, 8), dtype=np.float32)
    x[:, :4] = 5
    ptr = upload(gpu, x)
    launch(gpu, values(ptr, ptr + 16, rows=3, x_stride=8, out_stride=8))
    assert (download(gpu, ptr, x)[:, 4:] == 10).all()


def test_rows_that_overlap_are_refused(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.zeros((3, 8), dtype=np.float32))
    with pytest.raises(ValueError, match="apart from x"):
        launch(gpu, values(ptr, ptr + 12, rows=3, x_stride=8, out_stride=8))


@pytest.mark.parametrize("count", [0, 7, 9])
def test_the_count_of_arguments_is_checked(gpu: GpuBackend, count: int) -> None:
    with pytest.raises(TypeError, match=r"toy: expected 8 arguments \(x, bias, out"):
        launch(gpu, [1] * count)


@pytest.mark.parametrize("axes", [1, (1,), [1, 1], (1, 1, 1), (65535, 65535), ((1 << 31) - 1, 1, 65535)])
def test_grids(axes: Any) -> None:
    grid, block = check_geometry(axes, 32, 0, MINIMUM)
    assert grid == (*(axes if isinstance(axes, tuple | list) else (axes,)), 1, 1)[:3]
    assert block == (32, 1, 1)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "match"),
    [
        (0, 32, 0, "grid"),
        (-1, 32, 0, "grid"),
        ((), 32, 0, "grid"),
        ((1, 1, 1, 1), 32, 0, "grid"),
        ((1, 65536), 32, 0, "grid"),
        (1 << 31, 32, 0, "grid"),
        (1, 0, 0, "block"),
        (1, 1025, 0, "block"),
        (1, (32, 33), 0, "block: expected at most 1024 threads"),
        (1, (1, 1, 65), 0, "block"),
        (1, 32, -1, "shared_mem"),
        (1, 32, None, "shared_mem"),
    ],
)
def test_geometry_past_a_limit(gpu: GpuBackend, grid: Any, block: Any, shared: int | None, match: str) -> None:
    if shared is None:
        shared = gpu.limits().max_shared_bytes + 1
    with pytest.raises(ValueError, match=match):
        gpu.launch(gpu.kernel("toy", "toy_f32"), grid, block, shared, 0, values(16, 32))


@pytest.mark.parametrize("wrong", [1.0, (1, 2.0), "1", None, True, (True,), {1}, np.float32(1)])
def test_geometry_of_another_type(gpu: GpuBackend, wrong: Any) -> None:
    handle = gpu.kernel("toy", "toy_f32")
    for grid, block, match in ((wrong, 32, "grid"), (1, wrong, "block")):
        with pytest.raises(TypeError, match=f"{match}: expected an integer"):
            gpu.launch(handle, grid, block, 0, 0, values(16, 32))
    if not isinstance(wrong, tuple | set):
        with pytest.raises(TypeError, match="shared_mem: expected an integer"):
            gpu.launch(handle, 1, 32, wrong, 0, values(16, 32))


def test_modules_and_entries(gpu: GpuBackend) -> None:
    assert gpu.has_module("toy")
    assert not gpu.has_module("other")
    handle = gpu.kernel("toy", "toy_bf16")
    assert isinstance(handle, KernelHandle)
    assert (handle.module, handle.name) == ("toy", "toy_bf16")
    with pytest.raises(UnknownKernel, match="no module 'other'; registered: toy"):
        gpu.kernel("other", "toy_f32")
    with pytest.raises(UnknownKernel, match="no entry 'toy'; it has toy_f32, toy_f16, toy_bf16"):
        gpu.kernel("toy", "toy")
    with pytest.raises(LookupError):
        gpu.launch(KernelHandle("toy", "toy_f64"), 1, 32, 0, 0, values(16, 32))


def test_a_library_op_has_no_kernels(device: Device) -> None:
    libraries = [op.spec for op in PROCESS_REGISTRY if op.spec.library]
    assert libraries
    with device.open() as gpu:
        for spec in libraries:
            assert not gpu.has_module(spec.name)
            for dtype in spec.dtypes:
                with pytest.raises(UnknownKernel, match=f"kernel: '{spec.name}' .* has no kernels"):
                    gpu.kernel(spec.name, spec.entry(dtype))
                with pytest.raises(UnknownKernel, match="has no kernels"):
                    gpu.launch(KernelHandle(spec.name, spec.entry(dtype)), 1, 32, 0, 0, ())


@pytest.mark.parametrize("handle", [None, "toy_f32", ("toy", "toy_f32"), toy.OP])
def test_a_handle_is_what_kernel_returned(gpu: GpuBackend, handle: Any) -> None:
    with pytest.raises(TypeError, match="handle"):
        gpu.launch(handle, 1, 32, 0, 0, values(16, 32))


def test_registry() -> None:
    ops = OpRegistry()
    op = ops.register(toy.OP)
    assert list(ops) == [op]
    with pytest.raises(ValueError, match="registered already"):
        ops.register(op)
    ops.unregister("toy")
    assert "toy" not in ops
    with pytest.raises(UnknownKernel, match="registered: none"):
        ops.find("toy", "toy_f32")
    with pytest.raises(UnknownKernel, match="expected a dtype of"):
        op.spec.entry("f64")


def test_a_plan_chooses_among_variants_and_may_start_early(device: Device) -> None:
    """The toy has one entry point for each type, so its variants are only found, and never launched."""
    ops = OpRegistry()
    op = ops.register(replace(toy.OP, spec=replace(toy.SPEC, variants=("wide",))))
    assert ops.find("toy", "toy_f16_wide") == (op, "f16")
    assert op.spec.entry("bf16", "wide") == "toy_bf16_wide"
    with pytest.raises(UnknownKernel, match="toy: expected a variant of wide, got 'narrow'"):
        op.spec.entry("bf16", "narrow")
    ops.unregister("toy")
    with pytest.raises(UnknownKernel):
        ops.find("toy", "toy_f16_wide")
    early = ops.register(replace(toy.OP, plan=lambda *sizes: replace(toy.plan(*sizes), programmatic=True)))
    with device.open(ops=ops) as gpu, patch.object(gpu, "launch", wraps=gpu.launch) as launched:
        x = gpu.alloc(16 * 4)
        gpu.memset(x, 0, 16 * 4)
        early.launch(gpu, "f32", (x, 0, x, 1, 16, 16, 16, 2.0))
        gpu.synchronize()
        toy.OP.launch(gpu, "f32", (x, 0, x, 1, 16, 16, 16, 2.0))
        assert [call.kwargs.get("programmatic", False) for call in launched.call_args_list] == [True, False]
        gpu.free(x)


def test_the_process_registry_is_the_default(device: Device) -> None:
    assert "toy" not in PROCESS_REGISTRY
    with device.open() as gpu:
        assert not gpu.has_module("toy")


def test_extents_may_be_products() -> None:
    spec = OpSpec("sizes", (tensor("x", "in", "T", "a*b", 3, "c"), *(scalar(n, "i32") for n in "abc")), EXACT)
    assert spec.args[0].sizes(spec.dims([16, 4, 5, 6])) == (20, 3, 6)


def test_debug_sync_waits_for_each_kernel(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    assert gpu.debug_sync_kernels is False
    gpu.debug_sync_kernels = True
    assert gpu.debug_sync_kernels is True
    launch(gpu, values(*pair))
    gpu.begin_capture()
    launch(gpu, values(*pair))  # in a capture there is nothing to wait for
    gpu.destroy_graph(gpu.end_capture())


def test_traces_nest_and_end(gpu: GpuBackend, pair: tuple[int, int]) -> None:
    with gpu.launch_trace() as outer:
        launch(gpu, values(*pair))
        with gpu.launch_trace() as inner:
            launch(gpu, values(*pair))
        launch(gpu, values(*pair))
    launch(gpu, values(*pair))
    assert (len(outer), len(inner)) == (3, 1)
