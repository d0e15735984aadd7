# SPDX-License-Identifier: MIT OR Apache-2.0
"""What holds memory for a buffer, and what holds it for somebody whom it was given to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.blocks import Orphan
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.extents import Extents
from gpu_runtime.ledger import Allocation
from gpu_runtime.streams import StreamLike

Array = np.ndarray[Any, np.dtype[Any]]


class Holding:
    """The memory that buffers lie in, as long as one of them, or an export of one, needs it.

    When nobody does, what it kept goes to the backend, which lets go of it once no work may use it: at its next call
    that allocates, frees or reports.

    Parameters
    ----------
    gpu : GpuBackend
    block : Allocation or None
        The live block of ``gpu`` that has the memory; None for foreign memory, and where there are no bytes.
    owner : object
        Kept alive.
    foreign : tuple of int
        Address and bytes of foreign memory that ``gpu`` works on; no bytes for none.
    readonly : bool
        Whether nobody may write the foreign memory.
    frees : bool
        Whether the block is freed in the end.
    """

    __slots__ = ("_blocks", "_orphan", "block", "gpu")

    def __init__(
        self,
        gpu: GpuBackend,
        block: Allocation | None,
        *,
        owner: Any = None,
        foreign: tuple[int, int] = (0, 0),
        readonly: bool = False,
        frees: bool = False,
    ) -> None:
        self._orphan: Orphan | None = None
        self.gpu = gpu
        self.block = block
        self._blocks = gpu._blocks
        if foreign[1]:
            self._blocks.adopt(*foreign, readonly=readonly)
        if foreign[1] or owner is not None or frees:
            self._orphan = Orphan(owner, *foreign, block if frees else None)

    def check(self, what: str) -> None:
        """Raise InvalidPointer when the block was freed, DeviceError when the backend is closed."""
        blocks = self.gpu._blocks
        if self.block is not None and not blocks.lives(self.block):
            raise InvalidPointer(f"{what}: expected live memory, got a block that was freed: {self.block}")

    def device(self) -> tuple[int, int]:
        """Return where DLPack says that the memory lies."""
        blocks = self.gpu._blocks
        pinned = self.block is not None and blocks.is_pinned(int(self.block.ptr))
        return blocks.pinned_device if pinned else blocks.device

    @property
    def gpu_is_closed(self) -> bool:
        """Whether the backend is closed, and has let go of everything."""
        return self._blocks.closed

    def __del__(self) -> None:
        orphan = getattr(self, "_orphan", None)  # a copy that could not be made has nothing
        if orphan is not None and not self._blocks.closed:
            self._blocks.orphans.append(orphan)


class Export:
    """One use of memory by somebody else: it ends with the last reference to this object.

    It is what NumPy's array interface describes, so that NumPy makes the array, and the DLPack capsule, that others
    get; nobody reads the memory for that. Its end takes no lock and needs no module's names: it may come on any thread,
    inside a garbage collection, or while the interpreter shuts down.

    Raises
    ------
    InvalidPointer
        When the memory was freed.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_exports", "_holding", "_key")

    def __init__(self, tensor: Tensor) -> None:
        self._key: object = None
        self._exports: dict[object, Allocation] = {}
        self._holding = holding = tensor.holding  # kept alive, with its backend
        extents = tensor.extents
        self.__array_interface__ = interface_of(tensor.address, extents, tensor.dtype, readonly=tensor.readonly)
        blocks = holding.gpu._blocks
        if holding.block is not None:
            self._exports = blocks.exports
            self._key = blocks.export(holding.block, *extents.span(tensor.address), writable=not tensor.readonly)

    def __del__(self) -> None:
        self._exports.pop(self._key, None)


CARRIER: Final = {"bf16": np.dtype(np.uint16)}
"""What stands for the element types that NumPy does not know."""

NOWHERE: Final = 256
"""The address of an array without bytes that was given none: NumPy takes NULL for a wish that it allocate."""


def carrier(dtype: str) -> np.dtype[Any]:
    """Return the NumPy type that stands for an element type."""
    return CARRIER.get(dtype, dtypes.NUMPY[dtype])


def interface_of(address: int, extents: Extents, dtype: str, *, readonly: bool) -> dict[str, Any]:
    """Return memory as NumPy's ``__array_interface__`` describes it."""
    return {
        "version": 3,
        "shape": extents.shape,
        "strides": extents.strides,
        "typestr": carrier(dtype).str,
        "data": (address or NOWHERE, readonly),
    }


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in device memory, whose content is there once ``stream`` has passed the work that is on it."""

    holding: Holding
    address: int
    extents: Extents
    dtype: str
    readonly: bool
    stream: StreamLike

    @property
    def gpu(self) -> GpuBackend:
        return self.holding.gpu

    def export(self) -> Array:
        """Return a NumPy array over the memory, which may be a GPU's: an export that lives as long as the array."""
        return np.asarray(Export(self))
