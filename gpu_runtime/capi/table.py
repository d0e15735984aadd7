# SPDX-License-Identifier: MIT OR Apache-2.0
"""The function table: ctypes callbacks in memory that is never freed, and the end of it before the interpreter's.

A callback takes the GIL by itself, so a thread that Python never saw may call it. What must never happen is a call once
the interpreter is going: so it first clears ``alive``, which hosts read after they raised ``inflight``, and then waits,
without the GIL, until no call is under way.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from gpu_runtime.capi.codes import OK, status_bytes
from gpu_runtime.capi.entries import ENTRIES, HANDLES, I32, PLACE, U64
from gpu_runtime.capi.place import ABI_VERSION

NAME: Final = "gpu_runtime._C_API"

PATIENCE: Final = 10.0
"""Seconds that the interpreter's end waits for calls that are under way."""

_TYPES: Final = {name: ctypes.CFUNCTYPE(None, *types, PLACE) for name, (types, _) in ENTRIES.items()}

Table: Any = type(
    "Table",
    (ctypes.Structure,),
    {
        "_fields_": (
            ("abi_major", I32),
            ("abi_minor", I32),
            ("struct_size", U64),
            ("alive", I32),
            ("inflight", I32),
            *_TYPES.items(),
        )
    },
)
"""``gpurt_table``"""


def _guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of one more argument, the address of a ``gpurt_status``, which raises nothing."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments[:-1])
            I32.from_address(arguments[-1]).value = OK
        except BaseException as error:
            said = status_bytes(error)
            ctypes.memmove(arguments[-1], said, len(said))

    return call


def _forever(nbytes: int) -> int:
    """Return the address of memory that nobody frees: a host may look at it after the interpreter's end."""
    allocate = ctypes.pythonapi.PyMem_RawCalloc
    allocate.argtypes, allocate.restype = (ctypes.c_size_t, ctypes.c_size_t), PLACE
    address: int | None = allocate(1, nbytes)
    if not address:
        raise MemoryError(f"{NAME}: no {nbytes} bytes for the table")
    return address


def _make_table() -> int:
    """Return the address of a new table."""
    address = _forever(ctypes.sizeof(Table))
    table = Table.from_address(address)
    table.abi_major, table.abi_minor = ABI_VERSION
    table.struct_size = ctypes.sizeof(Table)
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes, keep.restype = (ctypes.py_object,), None
    for name, (_, function) in ENTRIES.items():
        callback = _TYPES[name](_guarded(function))
        keep(callback)
        setattr(table, name, callback)
    table.alive = 1
    return address


def _end(address: int, patience: float = PATIENCE) -> None:
    """Let no call begin any more, and wait for those that are under way."""
    table = Table.from_address(address)
    table.alive = 0
    deadline = time.monotonic() + patience
    time.sleep(0)  # gives up the GIL, and so orders the write before the read on every processor
    while table.inflight > 0:
        if time.monotonic() > deadline:
            print(
                f"gpu_runtime: {table.inflight} calls of C hosts did not end within {patience:.0f} s; their threads "
                "will not come back from them",
                file=sys.stderr,
            )
            return
        time.sleep(1e-4)
    HANDLES.clear()


def _make_capsule() -> Any:
    """Make the table, see to its end, and return the capsule that holds it."""
    address = _make_table()
    atexit.register(_end, address)
    os.register_at_fork(after_in_child=lambda: setattr(Table.from_address(address), "inflight", 0))
    name = NAME.encode() + b"\0"
    place = _forever(len(name))
    ctypes.memmove(place, name, len(name))
    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes, new.restype = (PLACE, PLACE, PLACE), ctypes.py_object
    return new(address, place, None)


_lock = threading.Lock()
_capsule: list[Any] = []


def capsule() -> Any:
    """Return the process's one capsule; it is made when it is first asked for."""
    with _lock:
        if not _capsule:
            _capsule.append(_make_capsule())
        return _capsule[0]
