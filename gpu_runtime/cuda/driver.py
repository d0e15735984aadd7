# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of the CUDA driver and runtime whose failures name the call, its arguments and the driver's own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from cuda.bindings import driver as bindings
from cupy.cuda import driver, runtime

from gpu_runtime.errors import DeviceError

Result = TypeVar("Result")

CUDA_ERRORS: Final = (runtime.CUDARuntimeError, driver.CUDADriverError)

_RELAXED: Final = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

NOT_READY: Final = 600
"""``cudaErrorNotReady``: what a query says of work that has not been reached."""


def failure(call: str, arguments: tuple[Any, ...], error: BaseException | str) -> DeviceError:
    """Return the DeviceError for a failed call."""
    shown = ", ".join(f"{value:#x}" if isinstance(value, int) and value > 9 else repr(value) for value in arguments)
    return DeviceError(f"{call}({shown}): {error}")


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", getattr(getattr(function, "func", None), "__name__", function)))


def attempt(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of CuPy's driver or runtime interface.

    Raises
    ------
    DeviceError
        When the call fails, or an earlier one failed and is reported now.
    """
    try:
        return function(*arguments)
    except CUDA_ERRORS as error:
        raise failure(_name(function), arguments, error) from None


def attempt_binding(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of ``cuda.bindings.driver`` and return what it returns after the status; raises as `attempt`."""
    status, *results = function(*arguments)
    if status != bindings.CUresult.CUDA_SUCCESS:
        text = bindings.cuGetErrorString(status)[1]
        words = f"{status.name}: {text.decode() if isinstance(text, bytes) else text}"
        raise failure(function.__name__, tuple(str(value) for value in arguments), words)
    return results[0] if len(results) == 1 else tuple(results)


class Context:
    """A device's primary context, made current around each call and put back to what was current before.

    The driver's notion of the current context decides, not the runtime's device number: a thread may have no context
    yet, or one that a C host made. The context stays for the life of the process, because CuPy and other libraries
    share it.
    """

    def __init__(self, device: int) -> None:
        attempt_binding(bindings.cuInit, 0)
        self.device = device
        self.handle = int(attempt_binding(bindings.cuDevicePrimaryCtxRetain, device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current inside a ``with`` block."""
        before = attempt(driver.ctxGetCurrent)
        if before == self.handle:
            yield
            return
        attempt(driver.ctxSetCurrent, self.handle)
        try:
            yield
        finally:
            attempt(driver.ctxSetCurrent, before)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Make one call in this context. Raises as `attempt` does."""
        try:
            if driver.ctxGetCurrent() == self.handle:
                return function(*arguments)
        except CUDA_ERRORS as error:
            raise failure(_name(function), arguments, error) from None
        with self.current():
            return attempt(function, *arguments)

    def call_relaxed(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Make one call as `call` does, inside `relaxed`."""
        before = attempt_binding(bindings.cuThreadExchangeStreamCaptureMode, _RELAXED)
        try:
            return self.call(function, *arguments)
        finally:
            attempt_binding(bindings.cuThreadExchangeStreamCaptureMode, before)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Keep the calls inside a ``with`` block from spoiling captures that foreign code began in the mode "global".

        Such a capture, on any thread, is spoilt by calls such as ``cudaMalloc`` and ``cudaEventQuery``, unless the
        calling thread has said that it knows what it does.
        """
        before = attempt_binding(bindings.cuThreadExchangeStreamCaptureMode, _RELAXED)
        try:
            yield
        finally:
            attempt_binding(bindings.cuThreadExchangeStreamCaptureMode, before)

    def use(self) -> None:
        """Make the context current on the calling thread, and leave it so."""
        attempt(driver.ctxSetCurrent, self.handle)
