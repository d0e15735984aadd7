# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies: what moves, and what is refused before anything moves."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_runtime import GpuBackend, InvalidPointer
from tests.backends import host_only
from tests.ops.harness import download, upload

Call = Callable[[], Any]
BYTES = np.arange(64, dtype=np.uint8)


@pytest.fixture
def ptr(gpu: GpuBackend) -> int:
    return upload(gpu, BYTES)


@pytest.mark.parametrize(
    "source",
    [
        bytes(range(8)),
        bytearray(range(8)),
        memoryview(bytes(range(8))),
        array.array("d", [1.5]),
        np.arange(2, dtype=np.float32).reshape(2, 1, 1),
        np.arange(4, dtype=ml_dtypes.bfloat16),
        np.array(7, dtype=np.int64),
        np.float64(2.5),
        np.arange(2, dtype=">i4"),
        np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
        np.ma.masked_array(np.arange(2, dtype=np.int32), mask=[True, False]),
        np.asfortranarray(np.arange(8, dtype=np.uint8)),
    ],
    ids=lambda source: type(source).__name__,
)
@pytest.mark.parametrize("call", ["copy_h2d", "copy_h2d_on_stream", "copy_h2d_async", "copy_h2d_async_retained"])
def test_h2d_takes_every_contiguous_buffer(gpu: GpuBackend, ptr: int, source: Any, call: str) -> None:
    getattr(gpu, call)(source, ptr + 8)
    expected = BYTES.copy()
    expected[8:16] = np.frombuffer(np.asarray(source).tobytes(), dtype=np.uint8)
    assert np.array_equal(download(gpu, ptr, BYTES), expected)


@pytest.mark.parametrize("call", ["copy_d2h", "copy_d2h_on_stream", "copy_d2h_async"])
@pytest.mark.parametrize("make", [bytearray, lambda n: np.zeros(n, np.uint8), lambda n: np.zeros((2, n // 4), "u2")])
def test_d2h_fills_every_writable_buffer(gpu: GpuBackend, ptr: int, call: str, make: Any) -> None:
    target = make(16)
    getattr(gpu, call)(ptr + 5, target)
    gpu.synchronize()
    assert bytes(target) == bytes(range(5, 21))


@pytest.mark.parametrize("call", ["copy_d2h", "copy_d2h_on_stream", "copy_d2h_async"])
@pytest.mark.parametrize(
    "target", [bytes(8), memoryview(bytes(8)), np.broadcast_to(np.uint8(0), (1,)), np.frombuffer(bytes(8)), np.int64(0)]
)
def test_d2h_refuses_a_read_only_target(gpu: GpuBackend, ptr: int, call: str, target: Any) -> None:
    with pytest.raises(TypeError, match="dst: expected a writable buffer"):
        getattr(gpu, call)(ptr, target)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((4, 4))[:, 1:3],
        np.zeros((2, 3)).T,
        np.arange(8)[::-1],
        np.arange(8)[::2],
        memoryview(bytearray(8))[::2],
    ],
)
def test_buffers_are_contiguous(gpu: GpuBackend, ptr: int, buffer: Any) -> None:
    calls: list[Call] = [
        lambda: gpu.copy_h2d(buffer, ptr),
        lambda: gpu.copy_h2d_async_retained(buffer, ptr),
        lambda: gpu.copy_d2h(ptr, buffer),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="contiguous"):
            call()
    assert np.array_equal(download(gpu, ptr, BYTES), BYTES)


@pytest.mark.parametrize("buffer", ["text", [1, 2], None, 5, object(), np.array([object()]), {"a": 1}])
def test_buffers_hold_bytes(gpu: GpuBackend, ptr: int, buffer: Any) -> None:
    calls: list[Call] = [lambda: gpu.copy_h2d(buffer, ptr), lambda: gpu.copy_d2h(ptr, buffer)]
    for call in calls:
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("start", [0, np.uint64(0), np.int32(0)])
def test_d2d(gpu: GpuBackend, ptr: int, start: Any) -> None:
    count: Any = np.int8(16)
    gpu.copy_d2d(ptr + start, ptr + 32, count)
    gpu.copy_d2d_async(ptr + start, ptr + 48, 16)
    assert np.array_equal(download(gpu, ptr, BYTES), np.concatenate([BYTES[:32], BYTES[:16], BYTES[:16]]))


@pytest.mark.parametrize(("src", "dst"), [(0, 0), (0, 15), (15, 0), (8, 4)])
def test_d2d_spans_do_not_overlap(gpu: GpuBackend, ptr: int, src: int, dst: int) -> None:
    with pytest.raises(ValueError, match="do not overlap"):
        gpu.copy_d2d(ptr + src, ptr + dst, 16)


def test_d2d_spans_may_touch(gpu: GpuBackend, ptr: int) -> None:
    gpu.copy_d2d(ptr, ptr + 16, 16)
    gpu.copy_d2d(ptr + 32, ptr + 16, 16)
    assert np.array_equal(download(gpu, ptr, BYTES)[16:32], BYTES[32:48])


@pytest.mark.parametrize(
    ("width", "height", "src_pitch", "dst_pitch"),
    [(3, 4, 5, 7), (5, 3, 5, 5), (1, 7, 1, 3), (4, 1, 4, 9), (6, 2, 17, 6)],
)
def test_2d(gpu: GpuBackend, ptr: int, width: int, height: int, src_pitch: int, dst_pitch: int) -> None:
    dst = upload(gpu, np.full(64, 200, dtype=np.uint8))
    gpu.copy_d2d_2d_async(ptr + 1, src_pitch, dst + 2, dst_pitch, width, height)
    expected = np.full(64, 200, dtype=np.uint8)
    for row in range(height):
        expected[2 + row * dst_pitch :][:width] = BYTES[1 + row * src_pitch :][:width]
    assert np.array_equal(download(gpu, dst, expected), expected)


@pytest.mark.parametrize(
    ("src_pitch", "dst_pitch", "width", "height"),
    [(3, 8, 4, 2), (8, 3, 4, 2), (0, 8, 4, 1), (8, -8, 4, 2), (-8, 8, 4, 2), (8, 8, -1, 2), (8, 8, 4, -1)],
)
def test_2d_refuses_pitches_below_the_width(
    gpu: GpuBackend, ptr: int, src_pitch: int, dst_pitch: int, width: int, height: int
) -> None:
    dst = gpu.alloc(64)
    with pytest.raises(ValueError, match=r"copy_d2d: \w+: expected at least"):
        gpu.copy_d2d_2d_async(ptr, src_pitch, dst, dst_pitch, width, height)


def test_2d_spans_end_with_the_last_row_and_not_its_padding(gpu: GpuBackend, ptr: int) -> None:
    dst = gpu.alloc(64)
    gpu.copy_d2d_2d_async(ptr + 4, 20, dst, 60, 4, 2)  # the last bytes of dst are its last
    gpu.copy_d2d_2d_async(ptr, 60, dst, 4, 4, 2)
    for src, pitch in ((ptr + 1, 60), (ptr, 61)):
        with pytest.raises(InvalidPointer, match="copy_d2d: src"):
            gpu.copy_d2d_2d_async(src, pitch, dst, 4, 4, 2)
    with pytest.raises(InvalidPointer, match="copy_d2d: dst"):
        gpu.copy_d2d_2d_async(ptr, 4, dst, 61, 4, 2)


def test_2d_sizes_do_not_wrap(gpu: GpuBackend, ptr: int) -> None:
    dst = gpu.alloc(64)
    pitch: Any = np.int32(1 << 30)
    height: Any = np.int32(5)  # (5 - 1) * 2**30 is 0 in 32 bits
    with pytest.raises(InvalidPointer, match="copy_d2d: src"):
        gpu.copy_d2d_2d_async(ptr, pitch, dst, 4, 4, height)


def test_empty_copies_do_nothing(gpu: GpuBackend, ptr: int) -> None:
    for where in (ptr, 0, 0xDEAD):
        gpu.copy_h2d(b"", where)
        gpu.copy_h2d_async(np.empty((0, 3)), where)
        gpu.copy_d2h(where, bytearray())
        gpu.copy_d2d(where, where, 0)
        gpu.copy_d2d_2d_async(where, 8, where, 8, 0, 5)
        gpu.copy_d2d_2d_async(where, 8, where, 8, 8, 0)
        gpu.memset(where, 0, 0)
    assert np.array_equal(download(gpu, ptr, BYTES), BYTES)


def assert_refused(gpu: GpuBackend, ptr: int, start: int) -> None:
    """Copies of 64 bytes from and to ``start`` bytes into the block of 64."""
    other = gpu.alloc(64)
    calls: list[Call] = [
        lambda: gpu.copy_h2d(bytes(64), ptr + start),
        lambda: gpu.copy_d2h(ptr + start, bytearray(64)),
        lambda: gpu.copy_d2d(ptr + start, other, 64),
        lambda: gpu.copy_d2d(other, ptr + start, 64),
    ]
    for call in calls:
        with pytest.raises(InvalidPointer, match=r"copy_\w+: (src|dst): "):
            call()
    assert np.array_equal(download(gpu, ptr, BYTES), BYTES)


@pytest.mark.parametrize("start", [1, 57, 63])
def test_spans_end_inside_the_block_they_start_in(gpu: GpuBackend, ptr: int, start: int) -> None:
    assert_refused(gpu, ptr, start)


@host_only
@pytest.mark.parametrize("start", [64, -1])
def test_spans_start_inside_a_block(gpu: GpuBackend, ptr: int, start: int) -> None:
    """On a GPU, memory that is in no block of the backend is its user's own."""
    assert_refused(gpu, ptr, start)


def test_spans_do_not_start_at_null(gpu: GpuBackend, ptr: int) -> None:
    assert_refused(gpu, ptr, -int(ptr))


@pytest.mark.parametrize("address", [True, None, 1.5, "0", np.float64(4096)])
def test_addresses_are_integers(gpu: GpuBackend, ptr: int, address: Any) -> None:
    calls: list[Call] = [
        lambda: gpu.copy_h2d(b"12", address),
        lambda: gpu.copy_d2h(address, bytearray(2)),
        lambda: gpu.copy_d2d(address, ptr, 2),
        lambda: gpu.copy_d2d(ptr, address, 2),
        lambda: gpu.memset(address, 0, 2),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="expected an integer"):
            call()


@host_only
def test_a_freed_block_is_refused(gpu: GpuBackend, ptr: int) -> None:
    gpu.free(ptr)
    with pytest.raises(InvalidPointer, match="expected an address inside a live allocation"):
        gpu.copy_d2h(ptr, bytearray(8))


def test_a_numpy_address_is_as_good_as_a_pointer(gpu: GpuBackend, ptr: int) -> None:
    address: Any = np.uint64(ptr)
    gpu.copy_h2d(b"\xff", address + np.uint64(3))
    assert download(gpu, address, BYTES)[3] == 255


def test_a_retained_source_may_change_at_once(gpu: GpuBackend, ptr: int) -> None:
    memory = gpu.alloc_host_pinned(4)
    source = memory.array
    gpu.begin_capture()  # so that the copies run later
    gpu.copy_h2d_async_retained(source, ptr)
    gpu.copy_h2d_async(source, ptr + 4)
    graph = gpu.end_capture()
    source[:] = 9
    gpu.launch_graph(graph)
    assert download(gpu, ptr, BYTES)[:8].tolist() == [0] * 4 + [9] * 4
    gpu.free_host_pinned(memory)


@host_only
def test_async_copies_keep_their_buffers_alive(gpu: GpuBackend, ptr: int) -> None:
    gpu.begin_capture()
    gpu.copy_h2d_async(np.full(8, 3, dtype=np.uint8), ptr)
    graph = gpu.end_capture()
    np.full(8, 4, dtype=np.uint8)  # would take the place of a buffer that was let go
    gpu.launch_graph(graph)
    assert download(gpu, ptr, BYTES)[:8].tolist() == [3] * 8


def test_retained_copies_in_a_capture_keep_their_bytes(gpu: GpuBackend, ptr: int) -> None:
    """As long as the graph lives, and in any number."""
    gpu.begin_capture()
    for index in range(8):
        gpu.copy_h2d_async_retained(np.full(8, index, dtype=np.uint8), ptr + 8 * index)
    graph = gpu.end_capture()
    for value in (100, 200):
        gpu.memset(ptr, value, 64)
        gpu.launch_graph(graph)
        assert np.array_equal(download(gpu, ptr, BYTES), np.repeat(np.arange(8, dtype=np.uint8), 8))
    gpu.destroy_graph(graph)


def test_trace(gpu: GpuBackend, ptr: int) -> None:
    other, stream = gpu.alloc(64), gpu.create_stream()
    with gpu.launch_trace() as trace:
        gpu.copy_h2d(b"1234", ptr)
        gpu.copy_d2d_2d_async(ptr, 8, other, 4, 4, 3, stream)
        gpu.copy_d2h(ptr, bytearray(7))
        gpu.memset(ptr, 0, 5)
        gpu.copy_d2d_async(ptr, other, 4, stream)
        event = gpu.create_event()
        gpu.record_event(event, stream)
        gpu.stream_wait_event(0, event)
        gpu.event_synchronize(event)
        gpu.synchronize(stream)
    default = gpu.default_stream()
    assert [(one.kind, one.name, one.nbytes, one.stream) for one in trace] == [
        ("copy", "h2d", 4, default),
        ("wait", "stream", 0, default),
        ("copy", "d2d", 12, stream),
        ("copy", "d2h", 7, default),
        ("wait", "stream", 0, default),
        ("memset", "memset", 5, default),
        ("wait", "stream", 0, default),
        ("copy", "d2d", 4, stream),
        ("wait", "event", 0, 0),
        ("wait", "stream", 0, stream),
    ]
