# SPDX-License-Identifier: MIT OR Apache-2.0
"""The header's functions, called from Python as a C host calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p, py_object
from pathlib import Path
from typing import Any, Final

from gpu_runtime.capi.entries import Block, Logits

OUT_U64, OUT_I64, OUT_I32, OUT_DOUBLE = POINTER(c_uint64), POINTER(c_int64), POINTER(c_int32), POINTER(c_double)
I64, U64, I32, PLACE = c_int64, c_uint64, c_int32, c_void_p

SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "backend_from_object": (py_object, OUT_I64),
    "backend_release": (I64,),
    "backend_kind": (I64, OUT_I32),
    "alloc": (I64, U64, c_char_p, OUT_U64),
    "alloc_managed": (I64, U64, c_char_p, OUT_U64),
    "free": (I64, U64),
    "alloc_host_pinned": (I64, U64, POINTER(PLACE)),
    "free_host_pinned": (I64, PLACE),
    "find_block": (I64, U64, OUT_I32, POINTER(Block)),
    "mark_written": (I64, U64, U64),
    "copy_h2d": (I64, PLACE, U64, U64),
    "copy_d2h": (I64, U64, PLACE, U64),
    "copy_d2d": (I64, U64, U64, U64),
    "copy_h2d_on_stream": (I64, PLACE, U64, U64, U64),
    "copy_d2h_on_stream": (I64, U64, PLACE, U64, U64),
    "copy_h2d_async": (I64, PLACE, U64, U64, U64),
    "copy_d2h_async": (I64, U64, PLACE, U64, U64),
    "copy_d2d_async": (I64, U64, U64, U64, U64),
    "memset": (I64, U64, I32, U64),
    "memset_async": (I64, U64, I32, U64, U64),
    "default_stream": (I64, OUT_U64),
    "create_stream": (I64, OUT_U64),
    "destroy_stream": (I64, U64),
    "synchronize": (I64, U64),
    "create_event": (I64, I32, OUT_U64),
    "destroy_event": (I64, U64),
    "record_event": (I64, U64, U64),
    "stream_wait_event": (I64, U64, U64),
    "event_query": (I64, U64, OUT_I32),
    "event_synchronize": (I64, U64),
    "event_elapsed_ms": (I64, U64, U64, OUT_DOUBLE),
    "logits_from_object": (py_object, POINTER(Logits)),
    "logits_row": (POINTER(Logits), I64, OUT_U64),
    "logits_index": (POINTER(Logits), U64, OUT_I64),
    "import": (),
    "alive": (),
    "last_code": (),
    "fail": (I32, c_char_p),
    "check_abi": (PLACE,),
}
"""Of the functions that need no GIL, and return a code."""

WITH_GIL: Final[dict[str, tuple[Any, ...]]] = {
    "pointer_from_object": (py_object, OUT_U64),
    "pointer_to_object": (U64, POINTER(py_object)),
    "stream_from_object": (py_object, OUT_U64),
}


class Failed(Exception):
    """A call that returned another code than GPURT_OK."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Status(Structure):
    """``gpurt_status``"""

    _fields_ = (("code", c_int32), ("message", ctypes.c_char * 1020))


class Library:
    """The test library: ``call`` makes a call without the GIL, ``call_with_gil`` with it; both raise `Failed`."""

    def __init__(self, path: Path) -> None:
        self.raw = ctypes.CDLL(str(path))
        self.with_gil = ctypes.PyDLL(str(path))
        self._find = self.raw.exported
        self._find.restype, self._find.argtypes = PLACE, (c_char_p,)
        self._made: dict[tuple[str, bool], Callable[..., int]] = {}
        self._last = ctypes.CFUNCTYPE(c_char_p)(self.address("last_error"))

    def address(self, name: str) -> int:
        found: int | None = self._find(name.encode())
        assert found is not None, name
        return found

    def function(self, name: str, *, gil: bool = False) -> Callable[..., int]:
        """Return a function by its name without ``gpurt_``."""
        made = self._made.get((name, gil))
        if made is None:
            types = SIGNATURES.get(name) or WITH_GIL.get(name, ())
            kind = (ctypes.PYFUNCTYPE if gil else ctypes.CFUNCTYPE)(c_int32, *types)
            made = self._made[name, gil] = kind(self.address(name))
        return made

    def last_error(self) -> str:
        return self._last().decode()  # type: ignore[no-any-return]

    def call(self, name: str, *arguments: Any, gil: bool = False) -> None:
        code = self.function(name, gil=gil or name in WITH_GIL)(*arguments)
        if code:
            raise Failed(code, self.last_error())

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Make a call whose last argument is where a result of type ``kind`` goes, and return that."""
        out = kind()
        self.call(name, *arguments, byref(out))
        return out.value if hasattr(out, "value") else out

    def backend(self, value: Any) -> int:
        return int(self.get(c_int64, "backend_from_object", value))
