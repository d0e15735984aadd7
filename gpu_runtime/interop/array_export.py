# SPDX-License-Identifier: MIT OR Apache-2.0
"""Giving memory to a consumer of array interfaces or of the buffer protocol."""

from __future__ import annotations

import builtins
from dataclasses import replace
from typing import Any

from gpu_runtime.export import CARRIER, Export, Tensor, interface_of
from gpu_runtime.extents import Extents
from gpu_runtime.interop import dlpack
from gpu_runtime.interop.dlpack_export import order, refuse_capture, same_handle


def cuda_interface(tensor: Tensor) -> tuple[dict[str, Any], Export]:
    """Return a ``__cuda_array_interface__`` of version 3, and the export that whoever has it must keep.

    Raises
    ------
    AttributeError
        When it is not a GPU's memory.
    BufferError
        When the element type has no name there, or the stream is capturing.
    """
    if tensor.holding.device()[0] != dlpack.CUDA:
        raise AttributeError("__cuda_array_interface__: the memory is the host's")
    _refuse_nameless("__cuda_array_interface__", tensor)
    refuse_capture(tensor.gpu, tensor.stream)
    export = Export(tensor)
    described = dict(export.__array_interface__)
    if not tensor.extents.nbytes:
        described["data"] = (0, tensor.readonly)
    if tensor.extents.is_contiguous:
        described["strides"] = None
    return described | {"stream": same_handle(tensor.gpu, tensor.stream)}, export


def host_interface(tensor: Tensor) -> dict[str, Any]:
    """Return NumPy's ``__array_interface__``, after the work on the tensor's stream; the host waits.

    Its ``data`` is an object with a buffer, not an address: the array that is made of it keeps that, and so the export.

    Raises
    ------
    AttributeError
        When it is a GPU's memory.
    BufferError
        When the element type has no name there, or the stream is capturing.
    """
    _refuse_device("__array_interface__", tensor, AttributeError)
    _refuse_nameless("__array_interface__", tensor)
    order(tensor, None)
    start, size = tensor.extents.span(tensor.address)
    span = replace(tensor, address=start, extents=Extents.of(size, None, 1), dtype="u8")
    described = interface_of(tensor.address, tensor.extents, tensor.dtype, readonly=tensor.readonly)
    return described | {"data": span.export(), "offset": tensor.address - start}


def view_of(tensor: Tensor) -> builtins.memoryview:
    """Return a ``memoryview`` with the tensor's shape and strides, after the work on its stream; the host waits.

    Raises
    ------
    BufferError
        When it is a GPU's memory, the element type is unknown to the buffer protocol, or the stream is capturing.
    """
    _refuse_device("memoryview", tensor, BufferError)
    _refuse_nameless("memoryview", tensor)
    order(tensor, None)
    array: Any = tensor.export()
    return builtins.memoryview(array)


def _refuse_device(what: str, tensor: Tensor, kind: type[Exception]) -> None:
    if tensor.holding.device()[0] == dlpack.CUDA:
        raise kind(f"{what}: expected memory that the host can read, got a GPU's")


def _refuse_nameless(what: str, tensor: Tensor) -> None:
    if tensor.dtype in CARRIER:
        raise BufferError(f"{what}: expected an element type that has a name there, got {tensor.dtype}; use DLPack")
