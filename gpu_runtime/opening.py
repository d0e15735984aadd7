# SPDX-License-Identifier: MIT OR Apache-2.0
"""Opening a device by its name."""

from __future__ import annotations

import ctypes
import logging

from gpu_runtime.backend import GpuBackend
from gpu_runtime.config import Config
from gpu_runtime.errors import BackendUnavailable

log = logging.getLogger(__name__)


def open_backend(device: str = "auto", *, config: Config | None = None) -> GpuBackend:
    """Open a device.

    Parameters
    ----------
    device : str
        ``"host"``; ``"cuda:N"``; ``"cuda"``: the first GPU that can be used; or ``"auto"``: what the configuration
        says, else the first such GPU, else the host. The choice of "auto" is logged, as a warning when there is a
        driver and it is the host all the same.
    config : Config or None
        Settings; None reads the environment.

    Raises
    ------
    BackendUnavailable
        When the device cannot be opened here: no driver, a missing package, no such GPU, or one that is too old.
    ValueError
        When ``device`` is none of these.
    """
    if not isinstance(device, str):
        raise TypeError(f"device: expected a string, got {device!r}")
    settings = config or Config.from_env()
    wanted = settings.device if device == "auto" else device
    kind, colon, ordinal = wanted.partition(":")
    if kind == "cuda" and (not colon or ordinal.isdecimal()):
        from gpu_runtime.cuda import open_cuda

        return open_cuda(int(ordinal) if colon else None, config=settings)
    if wanted not in ("auto", "host"):
        raise ValueError(f"device: expected 'auto', 'host', 'cuda' or 'cuda:N', got {wanted!r}")
    if wanted == "auto":
        from gpu_runtime.cuda import DRIVER, open_cuda

        try:
            backend = open_cuda(config=settings)
            log.info("device 'auto': %s", backend.name())
            return backend
        except BackendUnavailable as error:
            level = logging.WARNING if _loads(DRIVER) else logging.INFO  # without a driver, nobody expects a GPU
            log.log(level, "device 'auto': the host, because no GPU can be used: %s", error)
    from gpu_runtime.host import HostBackend

    return HostBackend()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
