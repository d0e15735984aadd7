# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backends that one test body runs on, and marks for tests that only one of them can serve.

A test asks for the fixture ``device`` (or one made of it) and runs twice: on the checking host backend, and on a GPU,
marked ``gpu``. What a GPU cannot notice, such as an address outside every allocation, is marked `host_only`.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import BackendUnavailable, DeviceError
from gpu_runtime.host import HostBackend
from gpu_runtime.ledger import Allocation
from gpu_runtime.opening import open_backend

ON_CUDA: Final = pytest.param("cuda", marks=pytest.mark.gpu)

host_only = pytest.mark.parametrize("device", ["host"], indirect=True)
cuda_only = pytest.mark.parametrize("device", [ON_CUDA], indirect=True)
needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None,
    reason="looks at how CuPy is called, which only the extra for a GPU installs (and `dev`)",
)
"""Of tests that need no GPU, but modules that import CuPy."""


def open_host(**options: Any) -> HostBackend:
    """Return a host backend that checks all it can, with `HostBackend`'s options."""
    return HostBackend(**{"check": True, **options})


def open_cuda(**options: Any) -> GpuBackend:
    """Return a CUDA backend, with `CudaBackend`'s options. BackendUnavailable when this machine has none."""
    from gpu_runtime.cuda.backend import CudaBackend

    return CudaBackend(**options)


@dataclass(frozen=True)
class Device:
    """One kind of backend, with the options that the command line gave for it."""

    kind: Literal["host", "cuda"]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        return self.kind == "host"

    @property
    def has_redzones(self) -> bool:
        return bool(self.options.get("redzones", True))

    def open(self, **options: Any) -> GpuBackend:
        """Return a new backend. What both kinds take goes to either: ``ops``, ``faults``, ``memory_limit``."""
        return (open_host if self.is_host else open_cuda)(**{**self.options, **options})


@functools.cache
def why_no_gpu() -> str | None:
    """Return why no CUDA backend can be opened on this machine, or None when one can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what CuPy and others say when they are imported is not ours
            open_backend("cuda").close()
    except BackendUnavailable as error:
        return str(error)
    return None


def why_gpu_is_lost() -> str | None:
    """Return what the device says when nothing works on it any more, as after an illegal address; None when it does."""
    try:
        with open_cuda() as gpu:
            gpu.synchronize()
    except DeviceError as error:
        return str(error)
    return None


def damaged(gpu: GpuBackend) -> list[Allocation]:
    """Return the blocks with a byte written beside them; none where the session asked for no redzones."""
    try:
        return gpu.scan_redzones()
    except DeviceError as error:
        if "redzones=False" not in str(error):
            raise
        return []


def words(gpu: GpuBackend, text: str) -> str | None:
    """Return what an error must say: ``text`` on the host, anything on a GPU, where the words may be the driver's."""
    return text if gpu.kind() == "host" else None
