# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a Python object stands for in C. The header calls `device_address`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_runtime import checks
from gpu_runtime.arena import LogitsArena
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import told


def device_address(value: Any) -> int:
    """Return the device address that an object stands for.

    An integer is one itself; an object with ``__cuda_array_interface__`` has that of its first element; one with an
    attribute ``ptr`` has that integer.

    Raises
    ------
    TypeError
        When it is none of these, or what it has is no integer; a bool is not.
    ValueError
        When the address does not fit in 64 bits.
    """
    if hasattr(value, "__index__"):
        return checks.address("pointer", value)
    if not isinstance(value, type):
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return checks.address("pointer: __cuda_array_interface__", _first_address(interface))
        if hasattr(value, "ptr"):
            return checks.address("pointer: ptr", value.ptr)
    raise TypeError(
        f"pointer: expected an integer, or an object with __cuda_array_interface__ or an integer ptr, got {told(value)}"
    )


def _first_address(interface: Any) -> Any:
    data = interface.get("data") if isinstance(interface, Mapping) else None
    if not isinstance(data, tuple) or len(data) != 2:
        raise TypeError(f"pointer: expected data (address, read_only) in __cuda_array_interface__, got {told(data)}")
    return data[0]


def backend_of(value: Any) -> GpuBackend:
    """Return a backend itself, or that of an object whose attribute ``gpu`` is one. TypeError for anything else."""
    backend = value if isinstance(value, GpuBackend) else getattr(value, "gpu", None)
    if not isinstance(backend, GpuBackend):
        raise TypeError(f"backend: expected a GpuBackend, or an object with one as its gpu, got {told(value)}")
    return backend


def logits_of(value: Any) -> LogitsArena:
    """Return an arena itself, or what an object's ``__logits_arena__()`` returns. TypeError for anything else."""
    arena = value
    if not isinstance(value, LogitsArena | type) and hasattr(value, "__logits_arena__"):
        arena = value.__logits_arena__()
    if not isinstance(arena, LogitsArena):
        raise TypeError(f"logits: expected a LogitsArena, or an object with __logits_arena__, got {told(value)}")
    return arena
