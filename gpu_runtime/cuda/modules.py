# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiled sources on the device, and the functions in them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import metrale_kernels
from cupy.cuda import driver

from gpu_runtime import kernel_source
from gpu_runtime.cuda import nvrtc
from gpu_runtime.cuda.driver import Context

_SHARED_CARVEOUT: Final = driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_ALL_SHARED: Final = 100  # percent of what shared memory can have; the L1 keeps the rest


def load(context: Context, text: str, name: str, arch: str, cache: Path | None) -> int:
    """Compile a whole source, as `gpu_runtime.cuda.nvrtc.compile_source` does, and return the loaded module."""
    image = nvrtc.compile_source(text, name, arch, cache=cache)
    return int(context.call_relaxed(driver.moduleLoadData, image))


def function_of(context: Context, module: int, name: str) -> int:
    """Return a function of a loaded module, ready to be launched."""
    function = int(context.call(driver.moduleGetFunction, module, name))
    # A multiprocessor divides its memory between shared memory and L1 anew only when it is empty. Where all kernels
    # ask for the same, one can begin beside the one ahead of it.
    context.call(driver.funcSetAttribute, function, _SHARED_CARVEOUT, _ALL_SHARED)
    return function


class OwnModule:
    """A source beside this file, which no op has: what the backend launches for itself. Loaded when it is first used.

    Parameters
    ----------
    context : Context
    file : str
    arch : str
    cache : Path or None
        As for `load`.
    """

    def __init__(self, context: Context, file: str, arch: str, cache: Path | None) -> None:
        self._context = context
        self._source = Path(__file__).with_name(file)
        self._arch = arch
        self._cache = cache
        self._lock = threading.Lock()
        self._module = 0

    def function(self, name: str) -> int:
        """Return one of its functions. Raises as `load` does."""
        with self._lock:
            if not self._module:
                text = kernel_source.inlined(self._source, (metrale_kernels.ROOT,))
                self._module = load(self._context, text, self._source.name, self._arch, self._cache)
        return function_of(self._context, self._module, name)

    def close(self) -> None:
        """Unload it."""
        if self._module:
            self._context.call(driver.moduleUnload, self._module)
