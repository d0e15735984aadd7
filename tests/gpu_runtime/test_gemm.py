# SPDX-License-Identifier: MIT OR Apache-2.0
"""Products against float64, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import DevicePtr, GpuBackend, InvalidPointer, dtypes
from gpu_runtime.gemm import Gemm
from tests.backends import cuda_only, host_only
from tests.ops.harness import download, upload
from tests.ops.oracles import ACTIVATIONS

Array = np.ndarray[Any, np.dtype[Any]]

# The unit roundoff of the output type for its one rounding, and 2e-6 for float32 sums of up to 200 products: their
# error grows as sqrt(k) * 2**-24. Both are relative to the largest element, for the reason that op.Tolerance states.
TOLERANCE = {"f32": 2e-6, "f16": 2**-11 + 2e-6, "bf16": 2**-8 + 2e-6}


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return rng.standard_normal(shape).astype(dtypes.NUMPY[dtype])


def f64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


def assert_close(result: Array, exact: Array, dtype: str) -> None:
    assert np.isfinite(f64(result)).all()
    largest = np.abs(exact).max()
    assert largest > 0
    assert np.abs(f64(result) - exact).max() <= TOLERANCE[dtype] * largest


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("out_dtype", [None, "f32", "f16", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 200), (7, 5, 17), (16, 64, 32)])
def test_product(gpu: GpuBackend, dtype: str, out_dtype: str | None, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * n + k)
    a, w = random(rng, (m, k), dtype), random(rng, (n, k), dtype)
    out = out_dtype or dtype
    c = upload(gpu, np.full((m, n), 77, dtype=dtypes.NUMPY[out]))
    size = Gemm.of(m, n, k, dtype, out_dtype, None, None, None).scratch_bytes
    space: dict[str, Any] = {"workspace": gpu.alloc(size), "workspace_bytes": size} if size else {}
    gpu.gemm(upload(gpu, a), upload(gpu, w), c, m, n, k, dtype=dtype, out_dtype=out_dtype, **space)
    assert_close(download(gpu, c, np.empty((m, n), dtypes.NUMPY[out])), f64(a) @ f64(w).T, out)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("with_bias", [False, True])
def test_epilogue(gpu: GpuBackend, dtype: str, activation: str, with_bias: bool) -> None:
    rng = np.random.default_rng(len(activation))
    m, n, k = 6, 10, 8
    a, w, bias = random(rng, (m, k), dtype), random(rng, (n, k), dtype), random(rng, (n,), dtype)
    c = upload(gpu, np.zeros((m, n), dtype=np.float32))
    address = upload(gpu, bias) if with_bias else 0
    gpu.gemm(
        upload(gpu, a),
        upload(gpu, w),
        c,
        m,
        n,
        k,
        dtype=dtype,
        out_dtype="f32",
        alpha=0.75,
        bias=address,
        activation=activation,
    )
    exact = 0.75 * (f64(a) @ f64(w).T) + (f64(bias) if with_bias else 0)
    exact = np.vectorize(ACTIVATIONS[activation])(exact)
    assert_close(download(gpu, c, np.empty((m, n), np.float32)), exact, "f32")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
def test_accumulate_with_strides(gpu: GpuBackend, dtype: str, alpha: float) -> None:
    rng = np.random.default_rng(3)
    a, w, c, bias = (random(rng, shape, dtype) for shape in ((4, 13), (6, 12), (4, 9), (6,)))
    ptr = upload(gpu, c)
    gpu.gemm(
        upload(gpu, a),
        upload(gpu, w),
        ptr,
        4,
        6,
        10,
        dtype=dtype,
        alpha=alpha,
        bias=upload(gpu, bias),
        accumulate=True,
        lda=13,
        ldw=12,
        ldc=9,
    )
    result = download(gpu, ptr, c)
    exact = f64(c[:, :6]) + alpha * (f64(a[:, :10]) @ f64(w[:, :10]).T) + f64(bias)
    assert_close(result[:, :6], exact, dtype)
    assert result[:, 6:].tobytes() == c[:, 6:].tobytes(), "padding is not touched"


@pytest.mark.parametrize("shared_w", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_batched(gpu: GpuBackend, shared_w: bool, accumulate: bool) -> None:
    rng = np.random.default_rng(4)
    a, w, c = (random(rng, shape, "f32") for shape in ((3, 40), (3, 30), (3, 20)))
    ptr = upload(gpu, c)
    gpu.gemm_strided_batched(
        upload(gpu, a),
        upload(gpu, w),
        ptr,
        4,
        3,
        7,
        3,
        stride_a=40,
        stride_w=0 if shared_w else 30,
        stride_c=20,
        dtype="f32",
        alpha=2.0,
        accumulate=accumulate,
        lda=8,
        ldc=4,
    )
    result = download(gpu, ptr, c)
    for index in range(3):
        left = f64(a[index, :32].reshape(4, 8)[:, :7])
        right = f64(w[0 if shared_w else index, :21].reshape(3, 7))
        before, after = (x[index, :16].reshape(4, 4) for x in (c, result))
        assert_close(after[:, :3], 2 * left @ right.T + (f64(before[:, :3]) if accumulate else 0), "f32")
        assert np.array_equal(after[:, 3], before[:, 3])
        assert np.array_equal(result[index, 16:], c[index, 16:])


def test_batched_outputs_may_interleave(gpu: GpuBackend) -> None:
    """Heads of an attention: C is [rows, heads, width], and the products are over heads."""
    rng = np.random.default_rng(5)
    a, w = random(rng, (2, 3, 5), "f32"), random(rng, (2, 4, 5), "f32")
    c = upload(gpu, np.zeros((3, 2, 4), dtype=np.float32))
    gpu.gemm_strided_batched(
        upload(gpu, a), upload(gpu, w), c, 3, 4, 5, 2, stride_a=15, stride_w=20, stride_c=4, dtype="f32", ldc=8
    )
    result = download(gpu, c, np.empty((3, 2, 4), dtype=np.float32))
    for head in range(2):
        assert_close(result[:, head], f64(a[head]) @ f64(w[head]).T, "f32")


@pytest.mark.parametrize(
    ("batch", "stride_c", "ldc"), [(2, 0, 8), (2, 3, 8), (3, 4, 8), (2, 5, 8), (2, 11, 4)], ids=str
)
def test_batched_outputs_do_not_overlap(gpu: GpuBackend, batch: int, stride_c: int, ldc: int) -> None:
    ptr = gpu.alloc(4096)
    with pytest.raises(ValueError, match="stride_c: expected products that do not overlap"):
        gpu.gemm_strided_batched(
            ptr,
            ptr + 1024,
            ptr + 2048,
            3,
            4,
            5,
            batch,
            stride_a=0,
            stride_w=0,
            stride_c=stride_c,
            dtype="f32",
            ldc=ldc,
        )


@pytest.mark.parametrize("stride", ["stride_a", "stride_w", "stride_c"])
def test_batched_strides_do_not_go_back(gpu: GpuBackend, stride: str) -> None:
    ptr = gpu.alloc(4096)
    strides: dict[str, Any] = {"stride_a": 0, "stride_w": 0, "stride_c": 1} | {stride: -1}
    with pytest.raises(ValueError, match=f"gemm: {stride}: expected at least 0"):
        gpu.gemm_strided_batched(ptr, ptr + 1024, ptr + 2048, 1, 1, 1, 2, dtype="f32", **strides)


def test_batched_operands_stay_in_one_block(gpu: GpuBackend) -> None:
    """The first and the last product lie in live blocks, those between them do not."""
    ptrs = sorted(gpu.alloc(64) for _ in range(2))
    stride = (ptrs[1] - ptrs[0]) // 8
    c = gpu.alloc(64)
    with pytest.raises(InvalidPointer, match="gemm: a: span"):
        gpu.gemm_strided_batched(ptrs[0], c + 32, c, 1, 1, 1, 3, stride_a=stride, stride_w=0, stride_c=1, dtype="f32")


def test_overflow_is_infinite_and_silent(gpu: GpuBackend) -> None:
    a, c = upload(gpu, np.full((1, 4), 200, dtype=np.float16)), upload(gpu, np.zeros(1, dtype=np.float16))
    gpu.gemm(a, a, c, 1, 1, 4, dtype="f16")
    assert np.isposinf(download(gpu, c, np.empty(1, np.float16))).all()


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_nan_and_infinity_come_through(gpu: GpuBackend, activation: str) -> None:
    """Through an activation too: a result that hides them would pass for a sound one."""
    x = np.array([[1, np.nan], [1, np.inf], [1, 1]], dtype=np.float32)
    c = upload(gpu, np.zeros((3, 1), dtype=np.float32))
    w = upload(gpu, np.ones((1, 2), np.float32))
    gpu.gemm(upload(gpu, x), w, c, 3, 1, 2, dtype="f32", activation=activation)
    result = download(gpu, c, np.empty(3, np.float32))
    assert np.isnan(result[0])
    assert result[1:].tolist() == [np.inf, 2]


def block(gpu: GpuBackend, nbytes: int) -> DevicePtr:
    """Return memory that counts as written; what is in it does not matter."""
    ptr = gpu.alloc(nbytes)
    gpu.mark_written(ptr, nbytes)
    return ptr


def multiply(gpu: GpuBackend, **changes: Any) -> None:
    """Enqueue a valid [2, 3] x [4, 3]^T product with some arguments changed."""
    given: dict[str, Any] = {
        "a": block(gpu, 256),
        "w": block(gpu, 256),
        "c": block(gpu, 256),
        "m": 2,
        "n": 4,
        "k": 3,
        "dtype": "f32",
    }
    gpu.gemm(**(given | changes))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"m": 0}, ValueError),
        ({"n": -1}, ValueError),
        ({"k": 0}, ValueError),
        ({"m": 2.0}, TypeError),
        ({"k": True}, TypeError),
        ({"n": None}, TypeError),
        ({"lda": 2}, ValueError),
        ({"ldw": 0}, ValueError),
        ({"ldc": 3}, ValueError),
        ({"ldc": -4}, ValueError),
        ({"lda": 3.0}, TypeError),
        ({"dtype": "float32"}, ValueError),
        ({"dtype": "i32"}, ValueError),
        ({"dtype": None}, ValueError),
        ({"out_dtype": "f64"}, ValueError),
        ({"activation": "tanh"}, ValueError),
        ({"activation": None}, ValueError),
        ({"activation": "relu", "accumulate": True}, ValueError),
        ({"alpha": float("nan")}, ValueError),
        ({"alpha": float("inf")}, ValueError),
        ({"alpha": 1e39}, ValueError),
        ({"alpha": "1"}, TypeError),
        ({"alpha": True}, TypeError),
        ({"a": True}, TypeError),
        ({"w": None}, TypeError),
        ({"bias": None}, TypeError),
        ({"bias": 2}, ValueError),
        ({"a": -4}, ValueError),
        ({"c": 0}, InvalidPointer),
        ({"a": 0}, InvalidPointer),
        ({"workspace_bytes": -1}, ValueError),
        ({"workspace_bytes": 64}, InvalidPointer),
        ({"algorithm": -1}, ValueError),
        ({"algorithm": "fast"}, TypeError),
        ({"m": 1 << 40}, InvalidPointer),
        ({"lda": 1 << 62}, InvalidPointer),
    ],
    ids=str,
)
def test_arguments_are_checked(gpu: GpuBackend, change: dict[str, Any], error: type[Exception]) -> None:
    (name, *_) = change
    with gpu.launch_trace() as trace, pytest.raises(error, match="gemm: "):
        multiply(gpu, **change)
    assert trace == [], f"{name} is refused before anything is enqueued"


@host_only
@pytest.mark.parametrize("change", [{"bias": 4096}, {"a": 4096}, {"workspace": 4096, "workspace_bytes": 64}], ids=str)
def test_operands_lie_in_live_blocks(gpu: GpuBackend, change: dict[str, Any]) -> None:
    with gpu.launch_trace() as trace, pytest.raises(InvalidPointer, match="gemm: "):
        multiply(gpu, **change)
    assert trace == []


def test_valid_options_are_taken(gpu: GpuBackend) -> None:
    with gpu.launch_trace() as trace:
        multiply(gpu)
        multiply(gpu, m=np.int32(2), lda=np.int64(3), alpha=np.float32(2))
        multiply(gpu, workspace=gpu.alloc(64), workspace_bytes=64, algorithm=0)
    assert [(record.kind, record.name) for record in trace] == [("gemm", "2x4x3")] * 3


def test_sizes_do_not_wrap(gpu: GpuBackend) -> None:
    with pytest.raises(InvalidPointer, match="gemm: a"):
        multiply(gpu, lda=np.int32(1 << 30), m=np.int32(5))  # (5 - 1) * 2**30 is 0 in 32 bits


def test_alignment(gpu: GpuBackend) -> None:
    ptr = block(gpu, 256)
    for name in ("a", "w", "c", "bias"):
        with pytest.raises(ValueError, match=f"gemm: {name}: expected an address aligned to 4 bytes"):
            multiply(gpu, **{name: ptr + 2})
    multiply(gpu, a=ptr + 2, c=ptr + 34, dtype="f16")


def test_the_result_is_apart_from_the_operands(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(256)
    for name in ("a", "w", "bias"):
        with pytest.raises(ValueError, match=f"gemm: c: expected memory apart from {name}"):
            multiply(gpu, **{name: ptr, "c": ptr + 4})


def test_operands_may_share_memory_and_rows_may_interleave(gpu: GpuBackend) -> None:
    ptr = block(gpu, 256)
    multiply(gpu, a=ptr, lda=8, c=ptr + 12, ldc=8)  # columns side by side in one matrix
    multiply(gpu, a=ptr, w=ptr)
    gpu.synchronize()


@pytest.mark.parametrize("name", ["a", "w", "c", "bias"])
def test_the_workspace_is_apart_from_the_operands(gpu: GpuBackend, name: str) -> None:
    ptr = block(gpu, 1024)
    with pytest.raises(ValueError, match=f"gemm: workspace: expected memory apart from {name}"):
        multiply(gpu, workspace=ptr, workspace_bytes=768, **{name: ptr + 512})
    multiply(gpu, workspace=ptr, workspace_bytes=512, **{name: ptr + 512})


def row_in_company(gpu: GpuBackend, dtype: str, n: int, k: int, places: dict[int, int]) -> set[bytes]:
    """Return the bits of one row times one matrix, by algorithm 0, at places among so many rows of others."""
    rng = np.random.default_rng(n + k)
    row, w, bias = (
        random(rng, (k,), dtype),
        upload(gpu, random(rng, (n, k), dtype)),
        upload(gpu, random(rng, (n,), dtype)),
    )
    size = gpu.limits().gemm_workspace_bytes
    space: dict[str, Any] = {"workspace": gpu.alloc(size), "workspace_bytes": size} if size else {}
    found = set()
    for place, rows in places.items():
        a = random(rng, (rows, k), dtype)
        a[place] = row
        out = np.zeros((rows, n), a.dtype)
        at, c = upload(gpu, a), upload(gpu, out)
        gpu.gemm(at, w, c, rows, n, k, dtype=dtype, bias=bias, algorithm=0, **space)
        found.add(download(gpu, c, out)[place].tobytes())
    return found


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(128, 32), (130, 300)])
def test_a_given_algorithm_computes_a_row_by_itself(gpu: GpuBackend, dtype: str, n: int, k: int) -> None:
    """With the rows that the device asks for; on the host, with any number."""
    fixed = gpu.limits().fixed_rows
    places = {0: fixed, 17: 64, 63: 64} if fixed == 1 else dict.fromkeys((0, 1, 17, 40, 63), fixed)
    assert len(row_in_company(gpu, dtype, n, k, places)) == 1


@cuda_only
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("n", "k"), [(3072, 1024), (1024, 4096), (8192, 2048), (2048, 8192), (256256, 1024)])
def test_a_given_algorithm_computes_a_row_of_a_layer_by_itself(gpu: GpuBackend, dtype: str, n: int, k: int) -> None:
    """Of the layers and the head of models 1,024 and 2,048 wide."""
    fixed = gpu.limits().fixed_rows
    assert len(row_in_company(gpu, dtype, n, k, dict.fromkeys((0, 1, 7, 8, 17, 31, 32, 40, 62, 63), fixed))) == 1
