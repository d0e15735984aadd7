# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device layer on an NVIDIA GPU. Importing this package alone loads neither CuPy nor a driver."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Final

from gpu_runtime.config import Config
from gpu_runtime.errors import BackendUnavailable

if TYPE_CHECKING:
    from gpu_runtime.cuda.backend import CudaBackend

DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def open_cuda(device: int | None = None, *, config: Config | None = None) -> CudaBackend:
    """Open a GPU.

    Parameters
    ----------
    device : int or None
        Its number; None takes the first one that can be used.
    config : Config or None
        Where compiled kernels are kept, and whether there are NVTX ranges; None reads the environment.

    Raises
    ------
    BackendUnavailable
        When there is no driver, a package is missing, or there is no such GPU or it is too old.
    """
    try:
        ctypes.CDLL(DRIVER)  # first, because importing CuPy takes half a second
    except OSError as error:
        raise BackendUnavailable(f"cuda: no NVIDIA driver here: {error}") from None
    try:
        from gpu_runtime.cuda import nvrtc
        from gpu_runtime.cuda.backend import CudaBackend
        from gpu_runtime.cuda.device import device_count
    except ImportError as error:
        raise BackendUnavailable(f"cuda: a package is missing or broken: {error}; see docs/dependencies.md") from error
    settings = config or Config.from_env()
    cache, nvtx = nvrtc.default_cache(settings), settings.nvtx
    if device is not None:
        return CudaBackend(device, cache=cache, nvtx=nvtx)
    refusals = []
    for number in range(device_count()):
        try:
            return CudaBackend(number, cache=cache, nvtx=nvtx)
        except BackendUnavailable as error:
            refusals.append(str(error))
    raise BackendUnavailable("; ".join(refusals) or "cuda: the driver finds no GPU")
