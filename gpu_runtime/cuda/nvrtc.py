# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiling kernel sources with NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from pathlib import Path
from typing import Any, Final

from gpu_runtime.config import Config
from gpu_runtime.cuda import disk_cache
from gpu_runtime.errors import BackendUnavailable, GpuRuntimeError

_LOG: Final = logging.getLogger(__name__)

OPTIONS: Final = (
    "--std=c++17",
    "--generate-line-info",
    # The opposite of each is what --use_fast_math would turn on: results would depend on the GPU's approximations.
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
"""What every kernel is compiled with, besides its architecture."""

_ARCH: Final = re.compile(r"(compute|sm)_\d{2,3}[af]?")
_WARNING: Final = re.compile(r"^(?!nvrtc: ).*\bwarning\b", re.MULTILINE)
"""A warning about the source. NVRTC's own ones are about options, for example that it will drop an architecture."""


class CompileError(GpuRuntimeError):
    """A kernel source that does not compile without errors and warnings.

    Attributes
    ----------
    log : str
        What the compiler said, with the true file and line of each complaint.
    """

    def __init__(self, message: str, *, log: str) -> None:
        super().__init__(message)
        self.log = log


def default_cache(config: Config | None = None) -> Path | None:
    """Return the folder for compiled kernels, or None when the configuration has no cache folder."""
    folder = (Config.from_env() if config is None else config).cache
    return None if folder is None else folder / "kernels"


def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version.

    Raises
    ------
    BackendUnavailable
        When NVRTC is not there.
    """
    major, minor = _library().getVersion()
    return int(major), int(minor)


def supported_archs() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for, such as 90 for 9.0. Raises as `version` does."""
    return tuple(int(arch) for arch in _library().getSupportedArchs())


def waits_for_previous(arch: str) -> bool:
    """Return whether kernels compiled for ``arch`` have ``griddepcontrol``: from compute capability 9.0 on."""
    number = re.search(r"\d+", arch)
    return number is not None and int(number[0]) >= 90


def compile_source(text: str, name: str, arch: str, *, cache: Path | None) -> bytes:
    """Compile a kernel source, or return what an earlier call made of the very same one.

    Warnings are errors. Results are kept in ``cache`` under a digest of the text, the name, the options, the
    architecture and NVRTC's version; a file that is damaged is made again, and a folder that cannot be used is logged
    once and done without. Any number of threads and processes may share a folder.

    Parameters
    ----------
    text : str
        The whole source, as `gpu_runtime.kernel_source.inlined` returns it.
    name : str
        What messages call the source where no ``#line`` says otherwise.
    arch : str
        ``"compute_80"`` and the like give PTX, which the driver compiles for any GPU of that capability or later;
        ``"sm_90"`` and the like give a cubin, machine code for GPUs of that capability.
    cache : Path or None
        None keeps nothing.

    Returns
    -------
    bytes
        PTX, or a cubin.

    Raises
    ------
    ValueError
        When ``arch`` is neither, or the text has a NUL character.
    CompileError
        With the compiler's log.
    BackendUnavailable
        When NVRTC is not there.
    """
    if _ARCH.fullmatch(arch) is None:
        raise ValueError(f"arch: expected 'compute_80', 'sm_90' or the like, got {arch!r}")
    if "\0" in text:
        raise ValueError(f"{name}: expected text, got a NUL character, where a C string would end")
    if cache is None:
        return _compile(text, name, arch)
    parts = (text, name, arch, *OPTIONS, *map(str, version()))
    key = hashlib.sha256(b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts))
    file = f"{key.hexdigest()}.{'cubin' if arch.startswith('sm_') else 'ptx'}"
    compiled = disk_cache.load(cache, file)
    if compiled is None:
        compiled = _compile(text, name, arch)
        disk_cache.store(cache, file, compiled)
    return compiled


def _compile(text: str, name: str, arch: str) -> bytes:
    nvrtc = _library()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        options = (*OPTIONS, f"--gpu-architecture={arch}")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise CompileError(f"{name} ({arch}): {error}\n{log}", log=log) from error
        log = nvrtc.getProgramLog(program).strip()
        if _WARNING.search(log):
            raise CompileError(f"{name} ({arch}): compiled, but with warnings\n{log}", log=log)
        if log:
            _LOG.warning("%s (%s): %s", name, arch, log)
        made = nvrtc.getCUBIN(program) if arch.startswith("sm_") else nvrtc.getPTX(program)
        return bytes(made)
    finally:
        nvrtc.destroyProgram(program)


def _library() -> Any:
    """Return CuPy's binding of NVRTC, with the library loaded."""
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise BackendUnavailable(f'NVRTC: CuPy cannot be imported ({error}): pip install "cupy-cuda12x"') from error
    try:
        nvrtc.getVersion()
    except RuntimeError as first:  # older versions of CuPy only look where the system's loader does
        try:
            importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc")
            nvrtc.getVersion()
        except (ImportError, RuntimeError):
            raise BackendUnavailable(
                "NVRTC: no library found: pip install nvidia-cuda-nvrtc-cu12 (the extra cuda12 brings it and its like; "
                f"with CuPy for CUDA 13, nvidia-cuda-nvrtc). CuPy says: {str(first).strip()}"
            ) from first
    return nvrtc
