# SPDX-License-Identifier: MIT OR Apache-2.0
"""Packed copies of arrays with any strides."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.export import Array, Holding, Tensor, carrier
from gpu_runtime.extents import Extents
from gpu_runtime.streams import StreamLike


def pack(tensor: Tensor, dst: int) -> None:
    """Enqueue, on the tensor's stream, a copy of its elements in C order to ``dst``."""
    axes, height, pitch, width = tensor.extents.runs()
    size = height * width
    if not tensor.extents.nbytes:
        return
    for place, index in enumerate(itertools.product(*(range(extent) for extent, _ in axes))):
        src = tensor.address + sum(at * stride for at, (_, stride) in zip(index, axes, strict=True))
        tensor.gpu.copy_d2d_2d_async(src, pitch, dst + place * size, width, width, height, tensor.stream)


def new_block(gpu: GpuBackend, shape: Sequence[int], dtype: str, stream: StreamLike, tag: str) -> Tensor:
    """Return a C-contiguous tensor in a new block, which goes with its last use."""
    extents = Extents.of(shape, None, dtypes.itemsize(dtype))
    if not extents.nbytes:
        return Tensor(Holding(gpu, None), 0, extents, dtype, False, stream)
    block = gpu.find_block(gpu.alloc(extents.nbytes, tag=tag))
    assert block is not None
    return Tensor(Holding(gpu, block, frees=True), int(block.ptr), extents, dtype, False, stream)


def packed(tensor: Tensor, tag: str) -> Tensor:
    """Return a C-contiguous copy in a new block, which goes with the last use of the copy; it is enqueued."""
    copy = new_block(tensor.gpu, tensor.extents.shape, tensor.dtype, tensor.stream, tag)
    pack(tensor, copy.address)
    return copy


def to_host(tensor: Tensor) -> Array:
    """Return the elements as a new NumPy array, after the work on the tensor's stream; the host waits.

    An element type that NumPy does not know comes as the unsigned integers of its bits.
    """
    gpu, extents = tensor.gpu, tensor.extents
    out = np.empty(extents.shape, dtype=carrier(tensor.dtype))
    if not extents.nbytes:
        return out
    if extents.is_contiguous:
        gpu.copy_d2h_on_stream(tensor.address, out, tensor.stream)
        return out
    space = gpu.alloc(extents.nbytes, tag="packed copy")
    try:
        pack(tensor, space)
        gpu.copy_d2h_on_stream(space, out, tensor.stream)
    finally:
        gpu.free(space)
    return out
