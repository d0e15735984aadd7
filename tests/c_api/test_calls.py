# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every entry of the table, used rightly and wrongly, on both backends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_double, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_runtime
from gpu_runtime.arena import LogitsArena
from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi import codes
from gpu_runtime.capi.entries import ENTRIES, HANDLES, Block, Logits
from gpu_runtime.capi.table import NAME, Table
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.c_api.library import Failed, Library, Status

SIZE = 1000
CLOSED, HANDLE, POINTER, VALUE, TYPE = (
    codes.CODES[name][0] for name in ("DEVICE", "HANDLE", "INVALID_POINTER", "VALUE", "TYPE")
)
SENT = np.arange(SIZE, dtype=np.uint8)


def fails(library: Library, code: int, name: str, *arguments: Any) -> str:
    """Assert that a call fails with a code; return its message."""
    with pytest.raises(Failed) as caught:
        library.call(name, *arguments)
    assert caught.value.code == code
    return caught.value.text


class Calls:
    """The calls of one backend."""

    def __init__(self, library: Library, backend: int) -> None:
        self.library = library
        self.backend = backend

    def __call__(self, name: str, *arguments: Any) -> None:
        self.library.call(name, self.backend, *arguments)

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        return self.library.get(kind, name, self.backend, *arguments)

    def fails(self, code: int, name: str, *arguments: Any) -> str:
        return fails(self.library, code, name, self.backend, *arguments)

    def alloc(self, nbytes: int = SIZE, tag: bytes | None = None) -> int:
        return int(self.get(c_uint64, "alloc", nbytes, tag))

    def upload(self, data: np.ndarray[Any, Any] = SENT) -> int:
        ptr = self.alloc(data.nbytes)
        self("copy_h2d", data.ctypes.data, ptr, data.nbytes)
        return ptr

    def download(self, ptr: int, nbytes: int = SIZE) -> np.ndarray[Any, Any]:
        out = np.zeros(nbytes, np.uint8)
        self("copy_d2h", ptr, out.ctypes.data, nbytes)
        return out


@pytest.fixture
def on(library: Library, backend: int) -> Calls:
    return Calls(library, backend)


# backends


def test_handles(library: Library, gpu: GpuBackend, device: Device) -> None:
    first, second = library.backend(gpu), library.backend(gpu)
    assert first != second
    assert library.get(c_int32, "backend_kind", first) == {"host": 1, "cuda": 2}[device.kind]
    library.call("backend_release", first)
    assert "not released" in fails(library, HANDLE, "backend_kind", first, byref(c_int32()))
    fails(library, HANDLE, "backend_release", first)
    assert library.get(c_int32, "backend_kind", second)
    library.call("backend_release", second)
    assert library.backend(gpu) > second


def test_a_handle_keeps_its_backend(library: Library, device: Device) -> None:
    gpu = device.open()
    handle = library.backend(gpu)
    del gpu
    held = HANDLES.find(handle).backend
    held.free(library.get(c_uint64, "alloc", handle, 16, None))
    held.close()
    assert "closed" in fails(library, CLOSED, "alloc", handle, 16, None, byref(c_uint64()))
    library.call("backend_release", handle)


def test_what_has_no_backend(library: Library) -> None:
    for value in ("gpu", None, GpuBackend, NllbModel, 5):
        assert "expected a GpuBackend" in fails(library, TYPE, "backend_from_object", value, byref(c_int64()))


@pytest.mark.parametrize("name", [name for name, (types, _) in ENTRIES.items() if types[0] is c_int64])
def test_no_entry_takes_a_number_that_is_no_handle(library: Library, name: str) -> None:
    """Not 0 either, which memory that was never set may hold."""
    place = ctypes.create_string_buffer(64)
    arguments = [None if kind is ctypes.c_char_p else ctypes.addressof(place) for kind in ENTRIES[name][0][1:]]
    for handle in (0, -1, 1 << 62):
        code = raw(name)(handle, *arguments)
        assert code == HANDLE


# memory


@pytest.mark.parametrize("name", ["alloc", "alloc_managed"])
def test_alloc_and_free(on: Calls, gpu: GpuBackend, name: str) -> None:
    ptr = on.get(c_uint64, name, SIZE, "für C".encode())
    (entry,) = gpu.alloc_report()
    assert (int(entry.ptr), entry.nbytes, entry.tag) == (ptr, SIZE, "für C")
    assert ptr % 256 == 0
    on("memset", ptr, 7, SIZE)
    assert on.download(ptr).tolist() == [7] * SIZE
    if name == "alloc_managed":
        assert ctypes.string_at(ptr, SIZE) == b"\7" * SIZE
    on.fails(POINTER, "free", ptr + 1)
    on("free", ptr)
    on("free", 0)
    on.fails(POINTER, "free", ptr)
    assert gpu.live_alloc_count() == 0


def test_alloc_that_fails(on: Calls, gpu: GpuBackend) -> None:
    assert "alloc: nbytes" in on.fails(VALUE, "alloc", 0, None, byref(c_uint64()))
    assert "NULL" in on.fails(VALUE, "alloc", SIZE, None, None)
    assert gpu.live_alloc_count() == 0, "a block whose address has nowhere to go is not made"
    out = c_uint64(5)
    assert "bytes" in on.fails(codes.CODES["OUT_OF_MEMORY"][0], "alloc", 1 << 62, b"huge", byref(out))
    assert out.value == 5
    on("free", on.alloc())


def test_page_locked_memory(on: Calls) -> None:
    host = on.get(c_void_p, "alloc_host_pinned", SIZE)
    assert ctypes.string_at(host, SIZE) == bytes(SIZE)
    ptr = on.upload()
    on("copy_d2h", ptr, host, SIZE)
    assert ctypes.string_at(host, SIZE) == SENT.tobytes()
    live, block = c_int32(), Block()
    on("find_block", host + 3, byref(live), byref(block))
    assert (live.value, block.base, block.nbytes, block.offset) == (1, host, SIZE, 3)
    on.fails(POINTER, "free_host_pinned", host + 1)
    on("free_host_pinned", host)
    on("free_host_pinned", None)
    on.fails(POINTER, "free_host_pinned", host)
    on.fails(VALUE, "alloc_host_pinned", 0, byref(c_void_p()))


def test_liveness(on: Calls, gpu: GpuBackend) -> None:
    ptr = on.alloc()
    for offset, expected in ((0, 1), (SIZE - 1, 1), (SIZE, 0), (-1, 0)):
        live, block = c_int32(-1), Block(1, 2, 3)
        on("find_block", ptr + offset, byref(live), byref(block))
        assert live.value == expected
        assert (block.base, block.nbytes, block.offset) == ((ptr, SIZE, offset) if expected else (1, 2, 3))
        entry = gpu.find_block(ptr + offset)
        assert (entry is not None) == bool(expected)
        assert entry is None or entry == gpu.alloc_report()[0]
    on("find_block", ptr, byref(live), None)
    assert live.value == 1
    on("free", ptr)
    for address in (ptr, 0, (1 << 64) - 1):
        on("find_block", address, byref(live), None)
        assert live.value == 0
    on.fails(VALUE, "find_block", ptr, None, None)
    with pytest.raises(ValueError, match="find_block: address"):
        gpu.find_block(-1)


def test_mark_written(on: Calls, device: Device) -> None:
    ptr = on.alloc()
    if device.is_host:
        ctypes.memset(ptr, 9, SIZE)
        on.fails(codes.CODES["UNINITIALIZED_READ"][0], "copy_d2h", ptr, SENT.copy().ctypes.data, SIZE)
        on("mark_written", ptr, SIZE)
        assert on.download(ptr).tolist() == [9] * SIZE
    on("mark_written", ptr, SIZE)
    on.fails(POINTER, "mark_written", ptr, SIZE + 1)


# copies and fills


def test_copies_that_are_done_on_return(on: Calls) -> None:
    first = on.upload()
    second = on.alloc()
    on("copy_d2d", first, second, SIZE)
    assert (on.download(second) == SENT).all()
    on("memset", second, 255, SIZE - 1)
    assert on.download(second).tolist() == [255] * (SIZE - 1) + [SENT[-1]]
    on("copy_d2h", first, None, 0)
    on("copy_h2d", None, second, 0)


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_copies_on_a_stream(on: Calls, own: bool) -> None:
    stream = on.get(c_uint64, "create_stream") if own else 0
    ptr, second, third = on.alloc(), on.alloc(), on.alloc()
    on("copy_h2d_on_stream", SENT.ctypes.data, ptr, SIZE, stream)
    got = np.zeros(SIZE, np.uint8)
    on("copy_d2h_on_stream", ptr, got.ctypes.data, SIZE, stream)
    assert (got == SENT).all()
    on("memset_async", second, 3, SIZE, stream)
    on("copy_d2d_async", ptr, second, SIZE // 2, stream)
    on("copy_h2d_async", SENT.ctypes.data, third, SIZE, stream)
    low, high = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    on("copy_d2h_async", second, low.ctypes.data, SIZE, stream)
    on("copy_d2h_async", third, high.ctypes.data, SIZE, stream)
    on("synchronize", stream)
    assert (low == np.where(np.arange(SIZE) < SIZE // 2, SENT, 3)).all()
    assert (high == SENT).all()
    if own:
        on("destroy_stream", stream)
        on.fails(CLOSED, "synchronize", stream)


@pytest.mark.parametrize("name", ["copy_h2d", "copy_h2d_on_stream", "copy_h2d_async"])
def test_uploads_that_fail(on: Calls, name: str) -> None:
    ptr, stream = on.alloc(), () if name == "copy_h2d" else (0,)
    assert "src: expected an address, got NULL" in on.fails(VALUE, name, None, ptr, SIZE, *stream)
    on.fails(POINTER, name, SENT.ctypes.data, ptr + 1, SIZE, *stream)
    on.fails(VALUE, name, SENT.ctypes.data, ptr, 1 << 63, *stream)


@pytest.mark.parametrize("name", ["copy_d2h", "copy_d2h_on_stream", "copy_d2h_async"])
def test_downloads_that_fail(on: Calls, name: str) -> None:
    ptr, stream, out = on.upload(), () if name == "copy_d2h" else (0,), np.zeros(SIZE + 1, np.uint8)
    assert "dst: expected an address, got NULL" in on.fails(VALUE, name, ptr, None, SIZE, *stream)
    on.fails(POINTER, name, ptr, out.ctypes.data, SIZE + 1, *stream)
    on.fails(VALUE, name, ptr, out.ctypes.data, 1 << 63, *stream)
    assert not out.any()


def test_fills_and_copies_within_the_device_that_fail(on: Calls) -> None:
    ptr = on.upload()
    for stream, copy, fill in (((), "copy_d2d", "memset"), ((0,), "copy_d2d_async", "memset_async")):
        assert "overlap" in on.fails(VALUE, copy, ptr, ptr + 1, 10, *stream)
        on.fails(POINTER, copy, ptr, ptr + 500, SIZE, *stream)
        on.fails(VALUE, fill, ptr, 256, SIZE, *stream)
        on.fails(VALUE, fill, ptr, -1, SIZE, *stream)
        on.fails(POINTER, fill, ptr, 0, SIZE + 1, *stream)
    assert (on.download(ptr) == SENT).all()


# streams and events


def test_streams(on: Calls, gpu: GpuBackend) -> None:
    assert on.get(c_uint64, "default_stream") == gpu.default_stream()
    stream = on.get(c_uint64, "create_stream")
    for known in (0, 1, 2, stream, gpu.default_stream()):
        on("synchronize", known)
    on.fails(CLOSED, "destroy_stream", gpu.default_stream())
    on("destroy_stream", stream)
    on.fails(CLOSED, "destroy_stream", stream)
    on.fails(VALUE, "create_stream", None)
    on.fails(VALUE, "default_stream", None)


def test_events_order_streams(on: Calls, device: Device) -> None:
    stream = on.get(c_uint64, "create_stream")
    event = on.get(c_uint64, "create_event", 0)
    assert on.get(c_int32, "event_query", event) == 1
    ptr, got = on.upload(), np.zeros(SIZE, np.uint8)
    on("memset_async", ptr, 5, SIZE, stream)
    on("record_event", event, stream)
    on("stream_wait_event", 0, event)
    on("copy_d2h_on_stream", ptr, got.ctypes.data, SIZE, 0)
    assert got.tolist() == [5] * SIZE
    on("event_synchronize", event)
    assert on.get(c_int32, "event_query", event) == 1
    on("destroy_event", event)
    for call in ("event_synchronize", "destroy_event"):
        on.fails(CLOSED, call, event)
    on.fails(CLOSED, "record_event", event, 0)
    on.fails(CLOSED, "stream_wait_event", 0, event)
    on.fails(CLOSED, "event_query", event, byref(c_int32()))
    on.fails(VALUE, "create_event", 0, None)


def test_times(on: Calls) -> None:
    start, end = (on.get(c_uint64, "create_event", 1) for _ in range(2))
    out = c_double(-1)
    on.fails(CLOSED, "event_elapsed_ms", start, end, byref(out))
    assert out.value == -1
    ptr = on.alloc(1 << 16)
    on("record_event", start, 0)
    on("memset_async", ptr, 0, 1 << 16, 0)
    on("record_event", end, 0)
    on("event_synchronize", end)
    assert 0 < on.get(c_double, "event_elapsed_ms", start, end) < 10_000
    on.fails(VALUE, "event_elapsed_ms", start, end, None)


# logits


def test_rows_of_an_arena(library: Library) -> None:
    arena = LogitsArena(gpu_runtime.DevicePtr((1 << 64) - (1 << 20)), 5, 100, "bf16")
    logits = library.get(Logits, "logits_from_object", arena)
    assert (logits.base, logits.row_bytes, logits.rows, logits.columns, logits.dtype) == (
        int(arena.base), 256, 5, 100, 2,
    )  # fmt: skip
    for row in range(5):
        assert library.get(c_uint64, "logits_row", byref(logits), row) == int(arena.row(row))
        assert library.get(c_int64, "logits_index", byref(logits), int(arena.row(row))) == row
    for row in (-1, 5, 1 << 62):
        assert f"got {row}" in fails(library, POINTER, "logits_row", byref(logits), row, byref(c_uint64()))
    for address in (int(arena.base) - 256, int(arena.base) + 1, int(arena.base) + 5 * 256, 0):
        assert hex(address) in fails(library, POINTER, "logits_index", byref(logits), address, byref(c_int64()))


def test_rows_of_a_model(library: Library, tiny: NllbModel) -> None:
    logits = library.get(Logits, "logits_from_object", tiny)
    seq = tiny.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    row = tiny.prefill([5, 6, 7], seq)
    assert logits.base == int(tiny.logits_buffer_ptr())
    assert (logits.row_bytes, logits.columns) == (tiny.logits_row_bytes(), tiny.vocab_size())
    assert library.get(c_int64, "logits_index", byref(logits), int(row)) == 4 + seq.slot_idx
    backend = library.backend(tiny)
    got = np.zeros(tiny.vocab_size(), np.float32)
    library.call("stream_wait_event", backend, 0, tiny.logits_event(row))
    library.call("copy_d2h_on_stream", backend, int(row), got.ctypes.data, got.nbytes, 0)
    assert (got == tiny.copy_logits_to_host(row)).all()
    library.call("backend_release", backend)
    tiny.free_sequence(seq)


def test_what_has_no_rows(library: Library) -> None:
    for value in (5, None, "x", LogitsArena, NllbModel):
        assert "expected a LogitsArena" in fails(library, TYPE, "logits_from_object", value, byref(Logits()))


# entries without the header's functions, as a host in another language calls them


def raw(name: str) -> Callable[..., int]:
    """Return an entry as a function that returns the status's code."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), c_void_p
    table = Table.from_address(get(gpu_runtime._C_API, NAME.encode()))

    def call(*arguments: Any) -> int:
        status = Status(8)
        getattr(table, name)(*arguments, ctypes.addressof(status))
        return int(status.code)

    return call


def test_null_is_refused_by_the_entries_themselves() -> None:
    assert raw("backend_from_object")(None, ctypes.addressof(c_int64())) == VALUE
    assert raw("logits_from_object")(None, ctypes.addressof(Logits())) == VALUE


def test_every_entry_is_tested_here() -> None:
    source = Path(__file__).read_text("utf-8")
    assert [name for name in ENTRIES if f'"{name}"' not in source] == []
