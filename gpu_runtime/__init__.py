# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device layer: pointers, memory, launches, streams and graphs. It knows nothing of models."""

from typing import TYPE_CHECKING, Any

import gpu_runtime.interpreter  # noqa: F401  # first: it refuses a subinterpreter, before NumPy is imported
from gpu_runtime.arena import Arena, Layout, LogitsArena
from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi import ABI_VERSION, get_include
from gpu_runtime.config import Config
from gpu_runtime.device_buffer import DeviceBuffer, view, wrap
from gpu_runtime.errors import (
    BackendUnavailable,
    DeviceError,
    GpuRuntimeError,
    GuardViolation,
    InvalidPointer,
    OutOfMemory,
    UninitializedRead,
    UnknownKernel,
    UnwrittenOutput,
)
from gpu_runtime.handles import KernelHandle, LaunchRecord, PinnedMemory
from gpu_runtime.interop.array_import import from_cuda_array_interface
from gpu_runtime.interop.cuda_stream import CudaStream
from gpu_runtime.interop.dlpack_import import from_dlpack
from gpu_runtime.ledger import Allocation
from gpu_runtime.limits import Limits
from gpu_runtime.op import AddressTable, Arg, LaunchPlan, Op, OpRegistry, OpSpec, Tolerance
from gpu_runtime.opening import open_backend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike, SupportsCudaStream

__all__ = [
    "ABI_VERSION",
    "AddressTable",
    "Allocation",
    "Arena",
    "Arg",
    "BackendUnavailable",
    "Config",
    "CudaStream",
    "DeviceBuffer",
    "DeviceError",
    "DevicePtr",
    "GpuBackend",
    "GpuRuntimeError",
    "GuardViolation",
    "InvalidPointer",
    "KernelHandle",
    "LaunchPlan",
    "LaunchRecord",
    "Layout",
    "Limits",
    "LogitsArena",
    "Op",
    "OpRegistry",
    "OpSpec",
    "OutOfMemory",
    "PinnedMemory",
    "StreamLike",
    "SupportsCudaStream",
    "Tolerance",
    "UninitializedRead",
    "UnknownKernel",
    "UnwrittenOutput",
    "from_cuda_array_interface",
    "from_dlpack",
    "get_include",
    "open_backend",
    "view",
    "wrap",
]

if TYPE_CHECKING:
    _C_API: Any
else:  # unseen by type checkers, which would take any name for one of this module's

    def __getattr__(name: str) -> Any:
        """Make the function table for C hosts when it is first asked for, by ``PyCapsule_Import`` as a rule."""
        if name != "_C_API":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gpu_runtime.capi.table import capsule

        return globals().setdefault("_C_API", capsule())
