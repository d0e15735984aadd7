# SPDX-License-Identifier: MIT OR Apache-2.0
"""DLPack as C sees it: its structures, its numbers, and the capsules that carry them. No compiled code is needed."""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
"""Page-locked host memory."""
CUDA_MANAGED: Final = 13

READ_ONLY: Final = 1 << 0
IS_COPIED: Final = 1 << 1

MAJOR: Final = 1
"""The version of the structures: a capsule of another major version cannot be read."""


class Names(NamedTuple):
    """The names of a capsule: until somebody takes its tensor, and from then on."""

    fresh: bytes
    used: bytes


VERSIONED: Final = Names(b"dltensor_versioned", b"used_dltensor_versioned")
LEGACY: Final = Names(b"dltensor", b"used_dltensor")


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class Managed(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = [
        ("version", Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


class ManagedLegacy(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = [("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


Deleter: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""A tensor's ``deleter``; called without the GIL, as C would call it."""

_CODES: Final = {"i": 0, "u": 1, "f": 2, "c": 5}

TYPES: Final[dict[str, tuple[int, int]]] = {
    "bf16": (4, 16),
    "bool": (6, 8),
    **{
        name: (_CODES[name[0]], int(name[1:]))
        for name in ("f32", "f16", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
    },
    "c64": (5, 64),
    "c128": (5, 128),
}
"""Code and bits of each element type."""

NAMES: Final = {code: name for name, code in TYPES.items()}

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes, _set_name.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int


def names_of(capsule: Any) -> Names | None:
    """Return which kind of DLPack capsule an object is; None when it is none, or its tensor was taken."""
    return next((names for names in (VERSIONED, LEGACY) if _is_valid(capsule, names.fresh)), None)


def is_used(capsule: Any) -> bool:
    """Return whether an object is a DLPack capsule whose tensor somebody has taken."""
    return any(_is_valid(capsule, names.used) for names in (VERSIONED, LEGACY))


def managed_of(capsule: Any, names: Names) -> Managed | ManagedLegacy:
    """Return the structure that a fresh capsule carries. It is the capsule's, and dies with it."""
    kind = Managed if names is VERSIONED else ManagedLegacy
    return kind.from_address(_get_pointer(capsule, names.fresh))


def mark_used(capsule: Any, names: Names) -> None:
    """Take the tensor out of a fresh capsule: from here on its deleter is the caller's to call."""
    _set_name(capsule, names.used)


def mark_fresh(capsule: Any, names: Names) -> None:
    """Put the tensor back that `mark_used` took out."""
    _set_name(capsule, names.fresh)
