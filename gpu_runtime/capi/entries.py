# SPDX-License-Identifier: MIT OR Apache-2.0
"""The functions behind the entries of the table, in its order. gpu_runtime/include/gpu_runtime/calls.h documents them.

Each takes numbers and raw addresses. Where it returns something, that goes to the addresses of C that come last.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi.held import Handles
from gpu_runtime.capi.objects import backend_of, logits_of
from gpu_runtime.dtypes import FLOAT_TYPES

I32, I64, U64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
PLACE = ctypes.c_void_p
"""An address of C: of an object, of host memory, or of where a result goes."""
TEXT = ctypes.c_char_p

KINDS: Final = {"host": 1, "cuda": 2}
DTYPES: Final = dict(zip(FLOAT_TYPES, range(3), strict=True))

ENTRIES: Final[dict[str, tuple[tuple[Any, ...], Callable[..., None]]]] = {}
"""Argument types and function of each entry, in the table's order."""

HANDLES: Final = Handles()

Entry = Callable[..., None]


class Block(ctypes.Structure):
    """``gpurt_block``"""

    _fields_ = (("base", U64), ("nbytes", U64), ("offset", U64))


class Logits(ctypes.Structure):
    """``gpurt_logits``"""

    _fields_ = (("base", U64), ("row_bytes", U64), ("rows", I64), ("columns", I64), ("dtype", I32), ("reserved", I32))


def entry(*types: Any) -> Callable[[Entry], Entry]:
    """Add a function to the table."""

    def add(function: Entry) -> Entry:
        ENTRIES[function.__name__] = (types, function)
        return function

    return add


def _on(backend: int) -> GpuBackend:
    return HANDLES.find(backend).backend


def _given(name: str, place: int | None) -> int:
    """Return an address of C; ValueError for NULL."""
    if not place:
        raise ValueError(f"{name}: expected an address, got NULL")
    return place


def _put(kind: Any, place: int, value: Any) -> None:
    kind.from_address(place).value = value


def _object(place: int | None) -> Any:
    return ctypes.cast(_given("object", place), ctypes.py_object).value


_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes, _memory_view.restype = (PLACE, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE


def _host_bytes(name: str, place: int | None, nbytes: int, access: int) -> memoryview | bytearray:
    """Return host memory as a buffer, which owns nothing."""
    if not nbytes:
        return bytearray()
    if nbytes >= 1 << 63:
        raise ValueError(f"{name}: expected fewer than 2**63 bytes, got {nbytes}")
    view: memoryview = _memory_view(_given(name, place), nbytes, access)
    return view


# backends


@entry(PLACE, PLACE)
def backend_from_object(value: int | None, backend: int | None) -> None:
    where = _given("backend", backend)
    _put(I64, where, HANDLES.add(backend_of(_object(value))))


@entry(I64)
def backend_release(backend: int) -> None:
    HANDLES.release(backend)


@entry(I64, PLACE)
def backend_kind(backend: int, kind: int | None) -> None:
    _put(I32, _given("kind", kind), KINDS[_on(backend).kind()])


# memory


@entry(I64, U64, TEXT, PLACE)
def alloc(backend: int, nbytes: int, tag: bytes | None, ptr: int | None) -> None:
    where = _given("ptr", ptr)
    _put(U64, where, _on(backend).alloc(nbytes, tag=(tag or b"").decode("utf-8", "replace")))


@entry(I64, U64, TEXT, PLACE)
def alloc_managed(backend: int, nbytes: int, tag: bytes | None, ptr: int | None) -> None:
    where = _given("ptr", ptr)
    _put(U64, where, _on(backend).alloc_managed(nbytes, tag=(tag or b"").decode("utf-8", "replace")))


@entry(I64, U64)
def free(backend: int, ptr: int) -> None:
    _on(backend).free(ptr)


@entry(I64, U64, PLACE)
def alloc_host_pinned(backend: int, nbytes: int, host: int | None) -> None:
    where, held = _given("host", host), HANDLES.find(backend)
    memory = held.backend.alloc_host_pinned(nbytes)
    held.pinned[memory.address] = memory
    _put(U64, where, memory.address)


@entry(I64, PLACE)
def free_host_pinned(backend: int, host: int | None) -> None:
    held = HANDLES.find(backend)
    if host:
        memory = held.take_pinned(host)
        try:
            held.backend.free_host_pinned(memory)
        except BaseException:
            held.pinned[host] = memory
            raise


@entry(I64, U64, PLACE, PLACE)
def find_block(backend: int, address: int, live: int | None, block: int | None) -> None:
    where = _given("live", live)
    found = _on(backend).find_block(address)
    if found is not None and block:
        out = Block.from_address(block)
        out.base, out.nbytes, out.offset = int(found.ptr), found.nbytes, address - int(found.ptr)
    _put(I32, where, found is not None)


@entry(I64, U64, U64)
def mark_written(backend: int, ptr: int, nbytes: int) -> None:
    _on(backend).mark_written(ptr, nbytes)


# copies and fills


@entry(I64, PLACE, U64, U64)
def copy_h2d(backend: int, src: int | None, dst: int, nbytes: int) -> None:
    _on(backend).copy_h2d(_host_bytes("src", src, nbytes, _READ), dst)


@entry(I64, U64, PLACE, U64)
def copy_d2h(backend: int, src: int, dst: int | None, nbytes: int) -> None:
    _on(backend).copy_d2h(src, _host_bytes("dst", dst, nbytes, _WRITE))


@entry(I64, U64, U64, U64)
def copy_d2d(backend: int, src: int, dst: int, nbytes: int) -> None:
    _on(backend).copy_d2d(src, dst, nbytes)


@entry(I64, PLACE, U64, U64, U64)
def copy_h2d_on_stream(backend: int, src: int | None, dst: int, nbytes: int, stream: int) -> None:
    _on(backend).copy_h2d_on_stream(_host_bytes("src", src, nbytes, _READ), dst, stream)


@entry(I64, U64, PLACE, U64, U64)
def copy_d2h_on_stream(backend: int, src: int, dst: int | None, nbytes: int, stream: int) -> None:
    _on(backend).copy_d2h_on_stream(src, _host_bytes("dst", dst, nbytes, _WRITE), stream)


@entry(I64, PLACE, U64, U64, U64)
def copy_h2d_async(backend: int, src: int | None, dst: int, nbytes: int, stream: int) -> None:
    _on(backend).copy_h2d_async(_host_bytes("src", src, nbytes, _READ), dst, stream)


@entry(I64, U64, PLACE, U64, U64)
def copy_d2h_async(backend: int, src: int, dst: int | None, nbytes: int, stream: int) -> None:
    _on(backend).copy_d2h_async(src, _host_bytes("dst", dst, nbytes, _WRITE), stream)


@entry(I64, U64, U64, U64, U64)
def copy_d2d_async(backend: int, src: int, dst: int, nbytes: int, stream: int) -> None:
    _on(backend).copy_d2d_async(src, dst, nbytes, stream)


@entry(I64, U64, I32, U64)
def memset(backend: int, ptr: int, value: int, nbytes: int) -> None:
    _on(backend).memset(ptr, value, nbytes)


@entry(I64, U64, I32, U64, U64)
def memset_async(backend: int, ptr: int, value: int, nbytes: int, stream: int) -> None:
    _on(backend).memset_async(ptr, value, nbytes, stream)


# streams and events


@entry(I64, PLACE)
def default_stream(backend: int, stream: int | None) -> None:
    _put(U64, _given("stream", stream), _on(backend).default_stream())


@entry(I64, PLACE)
def create_stream(backend: int, stream: int | None) -> None:
    where = _given("stream", stream)
    _put(U64, where, _on(backend).create_stream())


@entry(I64, U64)
def destroy_stream(backend: int, stream: int) -> None:
    _on(backend).destroy_stream(stream)


@entry(I64, U64)
def synchronize(backend: int, stream: int) -> None:
    _on(backend).synchronize(stream)


@entry(I64, I32, PLACE)
def create_event(backend: int, timing: int, event: int | None) -> None:
    where = _given("event", event)
    _put(U64, where, _on(backend).create_event(timing=bool(timing)))


@entry(I64, U64)
def destroy_event(backend: int, event: int) -> None:
    _on(backend).destroy_event(event)


@entry(I64, U64, U64)
def record_event(backend: int, event: int, stream: int) -> None:
    _on(backend).record_event(event, stream)


@entry(I64, U64, U64)
def stream_wait_event(backend: int, stream: int, event: int) -> None:
    _on(backend).stream_wait_event(stream, event)


@entry(I64, U64, PLACE)
def event_query(backend: int, event: int, done: int | None) -> None:
    _put(I32, _given("done", done), _on(backend).event_query(event))


@entry(I64, U64)
def event_synchronize(backend: int, event: int) -> None:
    _on(backend).event_synchronize(event)


@entry(I64, U64, U64, PLACE)
def event_elapsed_ms(backend: int, start: int, end: int, ms: int | None) -> None:
    _put(ctypes.c_double, _given("ms", ms), _on(backend).event_elapsed_ms(start, end))


# logits


@entry(PLACE, PLACE)
def logits_from_object(value: int | None, logits: int | None) -> None:
    out, arena = Logits.from_address(_given("logits", logits)), logits_of(_object(value))
    out.base, out.row_bytes = int(arena.base), arena.row_bytes
    out.rows, out.columns, out.dtype, out.reserved = arena.rows, arena.vocab, DTYPES[arena.dtype], 0
