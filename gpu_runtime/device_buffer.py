# SPDX-License-Identifier: MIT OR Apache-2.0
"""DeviceBuffer: a typed view of device memory that others can take without a copy."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.export import Holding, Tensor
from gpu_runtime.extents import Extents
from gpu_runtime.interop import array_export, dlpack_export
from gpu_runtime.ledger import Allocation, counted
from gpu_runtime.packing import packed
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike, stream_handle


class DeviceBuffer:
    """A typed view of memory of one backend: an address, a shape, an element type, and what they are ordered after.

    Made by `view`, `wrap`, `from_dlpack`, `from_cuda_array_interface`, and by arenas and models. It owns no block, and
    does not hinder its free: any use after that raises. What hinders it is an *export*: a DLPack tensor, an array or a
    ``memoryview`` that somebody else made of the buffer. docs/exchange.md has the rules.

    Attributes
    ----------
    gpu : GpuBackend
    shape : tuple of int
    dtype : str
        Short name of the element type, ``"f32"`` for example.
    strides : tuple of int
        In bytes.
    nbytes : int
        Bytes of the elements.
    readonly : bool
        Whether consumers are told not to write.
    stream : StreamLike
        Its content is there once this stream has passed the work that was on it when the buffer was made.
    closed : bool
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._interface: Any = None
        self.gpu: Final = tensor.gpu
        self.shape: Final = tensor.extents.shape
        self.strides: Final = tensor.extents.strides
        self.nbytes: Final = tensor.extents.nbytes
        self.dtype: Final = tensor.dtype
        self.readonly: Final = tensor.readonly
        self.stream: Final = tensor.stream

    @property
    def ptr(self) -> DevicePtr:
        """Address of the first element. InvalidPointer after `close`, or when the memory was freed."""
        return DevicePtr(self._open("ptr").address)

    @property
    def closed(self) -> bool:
        return self._tensor is None

    def close(self) -> None:
        """Give up this view. Exports of it live on, and so does what they need. Calling it again does nothing.

        An owner that nobody else needs is let go of here, or, on a GPU, by a later call once its work is done.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is not None and not tensor.holding.gpu_is_closed:
            del tensor
            self.gpu._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", read-only" if self.readonly else ""
        return f"<DeviceBuffer of {self.dtype} {self.shape} on {self.gpu.__class__.__name__}{state}>"

    def row(self, index: int) -> DeviceBuffer:
        """Return a view of one entry of the first axis. ValueError when there is no such entry, or no axis."""
        tensor = self._open("row")
        if not self.shape:
            raise ValueError("row: expected a buffer with at least one axis, got one without")
        place = checks.integer("row: index", index, 0, self.shape[0] - 1)
        inner = Extents(self.shape[1:], self.strides[1:], tensor.extents.itemsize)
        return DeviceBuffer(replace(tensor, address=tensor.address + place * self.strides[0], extents=inner))

    def copy(self) -> DeviceBuffer:
        """Return a C-contiguous copy in a block of its own, enqueued on `stream`. Closing it frees the block."""
        return DeviceBuffer(packed(self._open("copy"), "a copy of a buffer"))

    def _open(self, what: str) -> Tensor:
        """Return what the buffer views. InvalidPointer after `close`, or when the memory was freed."""
        if self._tensor is None:
            raise InvalidPointer(f"{what}: expected an open buffer, got one that was closed")
        self._tensor.holding.check(what)
        return self._tensor

    # giving it to others

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule, as the array API standard says.

        Parameters
        ----------
        stream : int or None
            The consumer's stream, which is made to wait on the device for `stream` of this buffer. None is the legacy
            stream; -1 asks for no ordering. For memory that the host reads, only None, where the host waits here, and
            -1 are possible.
        max_version : tuple of int or None
            The newest version that the consumer knows; from (1, 0) on it gets a versioned capsule.
        dl_device : tuple of int or None
            Where the consumer wants it: here, or (1, 0), the host.
        copy : bool or None
            Whether the capsule gets a copy of its own. None makes one only where ``dl_device`` needs it.

        Raises
        ------
        BufferError
            When the memory cannot be given in this way: read-only without a version, a device that is not reached, a
            copy that is forbidden and needed, or a stream that is capturing.
        ValueError
            When an argument is none of the above.
        InvalidPointer
            When the buffer was closed or its memory freed.
        """
        request = dlpack_export.Request(stream, max_version, dl_device, copy)
        return dlpack_export.export(self._open("__dlpack__"), request)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return where DLPack says that the memory lies: type and number of the device."""
        return self._open("__dlpack_device__").holding.device()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """A GPU's memory as the CUDA array interface, version 3, describes it, with the stream to wait for.

        The interface does not say when its reader is done; but readers keep this object. So reading it is an export
        that lasts as long as this object does, `close` or not. AttributeError for host memory; BufferError for
        bfloat16, which has no name there, and while the stream is capturing.
        """
        described, export = array_export.cuda_interface(self._open("__cuda_array_interface__"))
        self._interface = self._interface or export
        return described

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Host memory as NumPy's array interface describes it; the host waits for the stream.

        AttributeError for a GPU's memory; BufferError for bfloat16, and while the stream is capturing.
        """
        return array_export.host_interface(self._open("__array_interface__"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse: NumPy asks here when it cannot read the memory, and would make an array of one object otherwise."""
        raise TypeError(
            "expected memory that the host can read, got a GPU's: take np.from_dlpack of a capsule made with "
            "dl_device=(1, 0), or GpuBackend.copy_d2h"
        )

    def memoryview(self) -> builtins.memoryview:
        """Return host memory as a ``memoryview`` of this shape; the host waits for the stream.

        It is an export until it, and what was made of it, is released. BufferError for a GPU's memory and for bfloat16,
        and while the stream is capturing.
        """
        return array_export.view_of(self._open("memoryview"))

    def __buffer__(self, flags: int) -> builtins.memoryview:
        """Serve the buffer protocol, from Python 3.12 on."""
        return self.memoryview()

    def __release_buffer__(self, buffer: builtins.memoryview) -> None:
        """End the export. That there is this method makes NumPy keep what it reads, and not only this object."""
        buffer.release()


def view(
    gpu: GpuBackend,
    ptr: int,
    shape: int | Sequence[int],
    dtype: Any,
    *,
    strides: Sequence[int] | None = None,
    readonly: bool = False,
    stream: StreamLike = 0,
    owner: Any = None,
) -> DeviceBuffer:
    """Return a typed view of memory of a backend: of one live block, or of page-locked memory.

    Parameters
    ----------
    gpu : GpuBackend
    ptr : int
        Address of the first element.
    shape : int or sequence of int
    dtype : str or numpy.dtype
        Element type: a short name (``"bf16"``), a long one, or a NumPy dtype.
    strides : sequence of int or None
        In bytes, may be 0 or negative; None for a C-contiguous array.
    readonly : bool
        Whether consumers are told not to write.
    stream : StreamLike
        What the content is ordered after.
    owner : object
        Kept alive as long as the view or an export of it.

    Raises
    ------
    InvalidPointer
        When the span lies in no live block. One without bytes is not looked for.
    ValueError, TypeError
        When the shape, the strides, the element type or the stream is none.
    """
    name = dtypes.element_type(dtype)
    extents = Extents.of(shape, strides, dtypes.itemsize(name))
    stream_handle(stream)
    writable = not _boolean("view: readonly", readonly)
    address = checks.address("view: ptr", ptr)
    start, size = extents.span(address)
    block = _block_of("view", gpu, start, size)
    if size and block is None:
        raise InvalidPointer(f"view: expected a span in one live block, got {counted(size)} at {start:#x}")
    return DeviceBuffer(Tensor(Holding(gpu, block, owner=owner), address, extents, name, not writable, stream))


def wrap(
    gpu: GpuBackend, ptr: int, nbytes: int, owner: Any, *, readonly: bool = False, stream: StreamLike = 0
) -> DeviceBuffer:
    """Return foreign memory as a buffer of bytes, whose address all calls of ``gpu`` take while it is open.

    Parameters
    ----------
    gpu : GpuBackend
    ptr, nbytes : int
        Memory that ``gpu`` can reach: ordinary memory on the host, device or page-locked memory on a GPU.
    owner : object
        Kept alive until the buffer is closed, no export of it lives, and work enqueued by then is done.
    readonly : bool
        Whether nobody may write it.
    stream : StreamLike
        What the content is ordered after.

    Raises
    ------
    InvalidPointer
        When it is NULL, or memory that a GPU cannot reach.
    """
    size = checks.integer("wrap: nbytes", nbytes, low=0)
    stream_handle(stream)
    address = checks.address("wrap: ptr", ptr)
    told = _boolean("wrap: readonly", readonly)
    gpu._let_go()  # of what was wrapped before and is not used any more
    return foreign(gpu, address, Extents.of(size, None, 1), "u8", owner, readonly=told, stream=stream)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def foreign(
    gpu: GpuBackend, address: int, extents: Extents, dtype: str, owner: Any, *, readonly: bool, stream: StreamLike
) -> DeviceBuffer:
    """Return a buffer over memory that ``owner`` keeps; it may turn out to be a block of ``gpu``."""
    start, size = extents.span(address)
    block = _block_of("foreign memory", gpu, start, size)
    span = (start, size) if block is None else (0, 0)
    holding = Holding(gpu, block, owner=owner, foreign=span, readonly=readonly)
    return DeviceBuffer(Tensor(holding, address, extents, dtype, readonly, stream))


def _block_of(what: str, gpu: GpuBackend, start: int, size: int) -> Allocation | None:
    """Return the live block that contains a span, if it is not empty and one does.

    Raises
    ------
    InvalidPointer
        When the span begins in a block and ends outside it.
    """
    block = gpu.find_block(start) if 0 <= start < checks.ADDRESS_LIMIT and size else None
    if block is None:
        return None
    past = start + size - int(block.ptr) - block.nbytes
    if past > 0:
        raise InvalidPointer(f"{what}: expected a span in one live block, got {counted(past)} past the end of {block}")
    return block
