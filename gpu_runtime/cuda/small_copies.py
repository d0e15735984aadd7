# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small copies between page-locked host memory and the device, made by a kernel.

An engine of the device that copies is another than the one that runs kernels, and to go from one to the other and back
costs a stream more than a small copy takes. A kernel reaches page-locked memory by its address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from cupy.cuda import driver

from gpu_runtime.cuda import nvrtc
from gpu_runtime.cuda.driver import Context
from gpu_runtime.cuda.kernels import USUAL, ExtendedLaunch
from gpu_runtime.cuda.modules import OwnModule
from gpu_runtime.errors import DeviceError

SMALL_COPY_BYTES: Final = 64 << 10
"""Most bytes of a copy that is a kernel. PCIe moves as many in about the time in which it answers at all, 1 us. More of
them take longer than the change of engines, and would keep multiprocessors from other work meanwhile."""

_THREAD_BYTES: Final = 16
"""What each thread copies: small_copy.cu says why there is one for as many."""

_THREADS: Final = 128  # of a block: few, so that many multiprocessors ask the host at once

_MOST_KEPT: Final = 2048  # packed arguments; past this many, all are forgotten, which bounds the memory

Enqueue = Callable[[int, int, int], None]
"""Launches the kernel with one grid; it takes the stream, the address of the parameters, and 0."""


class _Arguments(ctypes.Structure):
    """The parameters of ``small_copy``."""

    _fields_ = (("dst", ctypes.c_uint64), ("src", ctypes.c_uint64), ("nbytes", ctypes.c_int32))


class _Packed(NamedTuple):
    """One copy as `Enqueue` wants it: the call, the address of the parameters, and what that points into."""

    enqueue: Enqueue
    params: int
    memory: Any


def blocks_of(nbytes: int) -> int:
    """Return how many blocks copy ``nbytes``, at least 1."""
    return -(-nbytes // (_THREAD_BYTES * _THREADS))


class SmallCopies:
    """Enqueues the copies. They come again with the same arguments, so each is packed once; any thread may call.

    Parameters
    ----------
    context : Context
    arch : str
        What the kernel is compiled for.
    cache : Path or None
        Folder for compiled kernels; None keeps none.
    """

    def __init__(self, context: Context, arch: str, cache: Path | None) -> None:
        self._context = context
        self._module = OwnModule(context, "small_copy.cu", arch, cache)
        self._waits = nvrtc.waits_for_previous(arch)
        self._function = 0
        self._launches: dict[tuple[int, bool], Enqueue] = {}
        self._packed: dict[tuple[int, int, int, bool], _Packed] = {}  # nothing changes one that is here

    def load(self) -> None:
        """Load the kernel, unless that was done. To do so may wait for whatever runs, so it is no part of a copy."""
        if not self._function:
            self._function = self._module.function("small_copy")

    def enqueue(self, dst: int, src: int, nbytes: int, stream: int, *, early: bool) -> None:
        """Enqueue a copy of 1 to `SMALL_COPY_BYTES` bytes between spans that kernels reach and that do not overlap.

        The kernel must have been loaded.

        Parameters
        ----------
        dst, src, nbytes, stream : int
        early : bool
            Whether the kernel may start before the one ahead has ended, where it can wait for that one's end. It is
            sound where every kernel on the stream that starts early waits so: the copy reads and writes nothing before,
            and no kernel behind it starts before it has ended. So for those it is as if launched in the usual way.

        Raises
        ------
        DeviceError
            When the launch fails.
        """
        key = (dst, src, nbytes, early)
        packed = self._packed.get(key)
        if packed is None:
            if len(self._packed) >= _MOST_KEPT:
                self._packed.clear()
            packed = self._packed[key] = self._pack(*key)
        try:
            self._context.call(packed.enqueue, stream, packed.params, 0)
        except DeviceError as error:
            raise DeviceError(f"copy of {nbytes:,} bytes from {src:#x} to {dst:#x}: {error}") from None

    def _pack(self, dst: int, src: int, nbytes: int, early: bool) -> _Packed:
        arguments = _Arguments(dst, src, nbytes)
        start = ctypes.addressof(arguments)
        fields = (_Arguments.dst, _Arguments.src, _Arguments.nbytes)
        params = (ctypes.c_void_p * len(fields))(*(start + field.offset for field in fields))
        enqueue = self._launch(blocks_of(nbytes), early and self._waits)
        return _Packed(enqueue, ctypes.addressof(params), (arguments, params))

    def _launch(self, blocks: int, early: bool) -> Enqueue:
        """Return the launch of so many blocks, which all copies of that size share."""
        found = self._launches.get((blocks, early))
        if found is None:
            function, geometry = self._function, (blocks, 1, 1, _THREADS, 1, 1, 0)
            made: Enqueue = partial(driver.launchKernel, function, *geometry)
            if early:
                made = ExtendedLaunch(function, geometry, USUAL._replace(early=True))
            found = self._launches[blocks, early] = made
        return found

    def close(self) -> None:
        """Unload the kernel."""
        self._packed.clear()
        self._launches.clear()
        self._module.close()
