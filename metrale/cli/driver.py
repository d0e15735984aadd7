# SPDX-License-Identifier: MIT OR Apache-2.0
"""What NVIDIA's driver says of itself and its devices, asked through ctypes; no context is created.

Functions and codes are those of the CUDA driver API (cuda.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
KERNEL_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_NAME_BYTES: Final = 256


class DriverCallFailed(RuntimeError):
    """A driver call that returned an error."""


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """Return what the driver says, as JSON-ready values.

    Parameters
    ----------
    load : callable
        Opens a library by its name, or raises OSError.

    Returns
    -------
    dict
        ``library`` (None when there is none), ``kernel_driver`` (such as ``"580.65"``, or None), ``cuda`` (newest CUDA
        version that it serves, such as ``[12, 8]``, or None), ``devices`` (``index``, ``name``,
        ``compute_capability``, ``memory_bytes``, ``multiprocessors``), ``error`` (why there are no devices, or None).
    """
    found: dict[str, Any] = {"library": None, "kernel_driver": None, "cuda": None, "devices": [], "error": None}
    with contextlib.suppress(OSError):
        version = re.search(r"\b\d{3}\.\d[\d.]*", KERNEL_DRIVER_FILE.read_text(encoding="ascii", errors="replace"))
        found["kernel_driver"] = version.group() if version else None
    try:
        api = load(LIBRARY)
    except OSError as error:
        found["error"] = str(error)
        return found
    found["library"] = LIBRARY
    try:
        found["cuda"] = _version(api)
        _call(api, "cuInit", ctypes.c_uint(0))
        count = _integer(api, "cuDeviceGetCount")
        found["devices"] = [_device(api, index) for index in range(count)]
    except (DriverCallFailed, AttributeError) as error:
        found["error"] = str(error)
    return found


def _version(api: Any) -> list[int]:
    number = _integer(api, "cuDriverGetVersion")  # 1000 * major + 10 * minor; needs no cuInit
    return [number // 1000, number % 1000 // 10]


def _device(api: Any, index: int) -> dict[str, Any]:
    device = ctypes.c_int(_integer(api, "cuDeviceGet", ctypes.c_int(index)))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(api, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    memory = ctypes.c_size_t()
    _call(api, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    multiprocessors, major, minor = (
        _integer(api, "cuDeviceGetAttribute", ctypes.c_int(attribute), device)
        for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR)
    )
    return {
        "index": index,
        "name": name.value.decode("utf-8", "replace"),
        "compute_capability": [major, minor],
        "memory_bytes": memory.value,
        "multiprocessors": multiprocessors,
    }


def _integer(api: Any, function: str, *args: Any) -> int:
    """Return the int that a function writes to its first parameter."""
    result = ctypes.c_int()
    _call(api, function, ctypes.byref(result), *args)
    return result.value


def _call(api: Any, function: str, *args: Any) -> None:
    code = getattr(api, function)(*args)
    if code:
        raise DriverCallFailed(f"{function} failed with {_error_text(api, code)}")


def _error_text(api: Any, code: int) -> str:
    texts = []
    for function in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        if getattr(api, function)(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value:
            texts.append(text.value.decode("utf-8", "replace"))
    return ": ".join(texts) or f"error {code}"
