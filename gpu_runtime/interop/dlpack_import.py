# SPDX-License-Identifier: MIT OR Apache-2.0
"""Taking memory from a DLPack producer."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.device_buffer import DeviceBuffer, foreign
from gpu_runtime.export import Array, interface_of
from gpu_runtime.extents import Extents
from gpu_runtime.interop import dlpack
from gpu_runtime.interop.dlpack_export import check_copy, refuse_capture, same_handle
from gpu_runtime.packing import new_block
from gpu_runtime.streams import StreamLike, stream_handle

_TAKING: Final = threading.Lock()
"""Held from the look at a capsule to the mark that it is used: two threads may come with one capsule."""

_HOST_KINDS = (dlpack.CPU, dlpack.CUDA_HOST, dlpack.CUDA_MANAGED)


class Taken:
    """A tensor that was taken out of its capsule. Its deleter is called once, with the last reference to this."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, managed: dlpack.Managed | dlpack.ManagedLegacy) -> None:
        self._address = ctypes.addressof(managed)
        self._deleter = dlpack.Deleter(managed.deleter) if managed.deleter else None

    def forget(self) -> None:
        """Leave the tensor to whoever has the capsule."""
        self._deleter = None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def from_dlpack(gpu: GpuBackend, source: Any, *, stream: StreamLike = 0, copy: bool | None = None) -> DeviceBuffer:
    """Return a buffer over the memory of another library's array.

    Parameters
    ----------
    gpu : GpuBackend
    source : object
        An array with ``__dlpack__``, or a DLPack capsule, versioned or legacy, which is used up.
    stream : StreamLike
        What the buffer is ordered after. The producer is asked to put its own work before that on the device. A capsule
        comes from a call where that was settled.
    copy : bool or None
        True makes a copy in a block of ``gpu``, which `DeviceBuffer.close` frees; False forbids it; None makes one only
        of memory that ``gpu`` cannot reach: host memory, for a GPU.

    Raises
    ------
    BufferError
        When the memory cannot be taken: another device, an element type that is not known, a version past 1, a copy
        that is forbidden and needed, or a stream that is capturing.
    TypeError
        When ``source`` is neither.
    ValueError
        When the capsule was used already.
    """
    check_copy(copy)
    stream_handle(stream)
    gpu._let_go()  # what was imported before and is not used any more: nothing else may call the backend for long
    capsule = _ask(gpu, source, stream) if hasattr(source, "__dlpack__") else source
    with _TAKING:
        names = dlpack.names_of(capsule)
        if names is None:
            raise _no_capsule(capsule, source)
        managed = dlpack.managed_of(capsule, names)
        version = managed.version.major if isinstance(managed, dlpack.Managed) else dlpack.MAJOR
        if version != dlpack.MAJOR:
            raise BufferError(f"from_dlpack: expected DLPack version {dlpack.MAJOR}, got {version}")
        readonly = isinstance(managed, dlpack.Managed) and bool(managed.flags & dlpack.READ_ONLY)
        address, extents, dtype = _described(managed.tensor)
        moves = _must_move(gpu, managed.tensor.device)
        if moves and copy is False:
            raise BufferError("from_dlpack: expected a copy to be allowed, as the memory is the host's, got copy=False")
        if moves or copy:
            refuse_capture(gpu, stream)
        dlpack.mark_used(capsule, names)
    owner = Taken(managed)
    try:
        if moves:
            return _upload(gpu, _OnHost(owner, address, extents, dtype), dtype, stream)
        buffer = foreign(gpu, address, extents, dtype, owner, readonly=readonly, stream=stream)
    except BaseException:
        owner.forget()
        dlpack.mark_fresh(capsule, names)
        raise
    del owner
    if not copy:
        return buffer
    with buffer:
        return buffer.copy()


def _no_capsule(capsule: Any, source: Any) -> Exception:
    if dlpack.is_used(capsule):
        return ValueError("from_dlpack: expected a fresh DLPack capsule, got one whose tensor was taken already")
    return TypeError(f"from_dlpack: expected an object with __dlpack__ or a capsule, got {type(source).__name__}")


def _ask(gpu: GpuBackend, source: Any, stream: StreamLike) -> Any:
    """Return a producer's capsule; on a GPU its work comes before what ``stream`` does from here on."""
    kind = source.__dlpack_device__()[0] if hasattr(source, "__dlpack_device__") else dlpack.CPU
    arguments: dict[str, Any] = {}
    if int(kind) == dlpack.CUDA:
        if gpu._blocks.device[0] != dlpack.CUDA:
            raise BufferError("from_dlpack: expected memory that the host can read, got a GPU's")
        refuse_capture(gpu, stream)
        arguments["stream"] = same_handle(gpu, stream)
    try:
        return source.__dlpack__(max_version=(dlpack.MAJOR, 0), **arguments)
    except TypeError:  # a producer of before there were versions
        return source.__dlpack__(**arguments)


def _described(tensor: dlpack.DLTensor) -> tuple[int, Extents, str]:
    """Return the address, the extents and the element type of a tensor."""
    code = (tensor.dtype.code, tensor.dtype.bits)
    name = dlpack.NAMES.get(code)
    if name is None or tensor.dtype.lanes != 1:
        raise BufferError(
            f"from_dlpack: expected an element type of {', '.join(dlpack.TYPES)}, got DLPack's code {code[0]} with "
            f"{code[1]} bits and {tensor.dtype.lanes} lanes"
        )
    size = dtypes.itemsize(name)
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    strides = [tensor.strides[axis] * size for axis in range(tensor.ndim)] if tensor.strides else None
    return (tensor.data or 0) + tensor.byte_offset, Extents.of(shape, strides, size), name


def _must_move(gpu: GpuBackend, device: dlpack.Device) -> bool:
    """Return whether memory must be copied to be reached. BufferError when that would not help."""
    ours, theirs = gpu._blocks.device, (device.type, device.id)
    if theirs == ours or (device.type in _HOST_KINDS and (ours[0] == dlpack.CPU or device.type != dlpack.CPU)):
        return False
    if device.type == dlpack.CPU:
        return True
    raise BufferError(f"from_dlpack: expected memory of DLPack's device {ours}, or of the host, got {theirs}")


class _OnHost:
    """A tensor in host memory, for NumPy to read."""

    def __init__(self, owner: Taken, address: int, extents: Extents, dtype: str) -> None:
        self._owner = owner
        self.__array_interface__ = interface_of(address, extents, dtype, readonly=True)


def _upload(gpu: GpuBackend, source: _OnHost, dtype: str, stream: StreamLike) -> DeviceBuffer:
    """Return a copy of host memory in a new block, enqueued on ``stream``."""
    array: Array = np.ascontiguousarray(np.asarray(source)).reshape(source.__array_interface__["shape"])
    copy = new_block(gpu, array.shape, dtype, stream, tag="a copy of a host array")
    if array.nbytes:
        gpu.copy_h2d_async(array, copy.address, stream)
    return DeviceBuffer(copy)
