# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the exchange with other libraries share."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from gpu_runtime import DeviceBuffer, GpuBackend, view
from gpu_runtime.extents import contiguous
from gpu_runtime.interop import dlpack
from tests.ops.harness import upload

Array = np.ndarray[Any, np.dtype[Any]]

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Owner:
    """Something that owns memory, and can be seen to go."""

    def __init__(self, array: Any = None) -> None:
        self.array = array
        self.gone: list[bool] = []
        weakref.finalize(self, self.gone.append, True).atexit = False


def lent(gpu: GpuBackend, array: Array = X, **options: Any) -> DeviceBuffer:
    """Return a view of a new block that holds an array."""
    return view(gpu, upload(gpu, array), array.shape, array.dtype, **options)


def settle(gpu: GpuBackend) -> None:
    """Have the backend let go of what nobody needs any more, and of what that leaves."""
    for _ in range(3):
        gpu.synchronize()
        gpu.free(gpu.alloc(1))


def described(capsule: Any) -> dict[str, Any]:
    """Return what a fresh capsule says of its tensor."""
    names = dlpack.names_of(capsule)
    assert names is not None
    managed = dlpack.managed_of(capsule, names)
    tensor = managed.tensor
    axes = range(tensor.ndim)
    return {
        "name": names.fresh.decode(),
        "data": tensor.data or 0,
        "offset": tensor.byte_offset,
        "device": (tensor.device.type, tensor.device.id),
        "dtype": (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        "shape": tuple(tensor.shape[axis] for axis in axes),
        "strides": _strides(tensor),
        "flags": managed.flags if isinstance(managed, dlpack.Managed) else None,
        "version": (managed.version.major, managed.version.minor) if isinstance(managed, dlpack.Managed) else None,
    }


_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


def _strides(tensor: dlpack.DLTensor) -> tuple[int, ...]:
    """Return the strides; an exporter need not give those of a C-contiguous tensor."""
    if tensor.strides:
        return tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    return contiguous([tensor.shape[axis] for axis in range(tensor.ndim)], 1)


class Producer:
    """A foreign producer of one host array, legacy or versioned, that counts how often its deleter is called.

    Parameters
    ----------
    array : array
    versioned : bool
    changes : object
        Fields of the tensor, ``code``, ``bits``, ``lanes``, ``kind``, ``offset``, ``flags`` or ``major``, to lie about.
    """

    def __init__(self, array: Array, *, versioned: bool = True, **changes: Any) -> None:
        self.array = array
        self.deleted: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self._versioned = versioned
        self._deleter = dlpack.Deleter(self.deleted.append)
        self._kept: list[Any] = []
        self._changes = changes

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._changes.get("kind", dlpack.CPU), 0

    def __dlpack__(self, **request: Any) -> Any:
        self.requests.append(request)
        return self.capsule()

    def capsule(self) -> Any:
        """Return a new capsule without a destructor: nobody but a consumer calls the deleter."""
        managed: dlpack.Managed | dlpack.ManagedLegacy
        managed = dlpack.Managed() if self._versioned else dlpack.ManagedLegacy()
        tensor, array, changes = managed.tensor, self.array, self._changes
        kind = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}[array.dtype.kind]
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        tensor.data = array.ctypes.data if array.size else None
        tensor.byte_offset = changes.get("offset", 0)
        tensor.ndim, tensor.shape, tensor.strides = array.ndim, shape, strides
        tensor.device.type = changes.get("kind", dlpack.CPU)
        tensor.dtype.code, tensor.dtype.bits = changes.get("code", kind), changes.get("bits", 8 * array.itemsize)
        tensor.dtype.lanes = changes.get("lanes", 1)
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        if isinstance(managed, dlpack.Managed):
            managed.version.major, managed.flags = changes.get("major", 1), changes.get("flags", 0)
        self._kept += [managed, shape, strides]
        names = dlpack.VERSIONED if self._versioned else dlpack.LEGACY
        return _new(ctypes.addressof(managed), names.fresh, None)
