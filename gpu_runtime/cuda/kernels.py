# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernel modules on the device, and launches whose arguments have been checked and packed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from cuda.bindings import driver as bindings
from cupy.cuda import driver

from gpu_runtime import checks, dtypes, kernel_source
from gpu_runtime.cuda import modules
from gpu_runtime.cuda.driver import Context
from gpu_runtime.errors import UnknownKernel
from gpu_runtime.handles import KernelHandle
from gpu_runtime.launch import Dim3, check_arguments, check_geometry
from gpu_runtime.limits import Limits
from gpu_runtime.op import Op, OpRegistry, OpSpec
from gpu_runtime.overlap import argument_extent, refuse_overlap

_MOST_KEPT: Final = 2048
"""Packed launches of one entry point. Past this many, all are forgotten, which bounds the memory."""

_MOST_STREAMS: Final = 16  # of which an extended launch keeps what it needs; past this many it begins anew

_UNASKED_SHARED: Final = 48 * 1024  # a block may have this much without asking; more needs an attribute of the function


class Attributes(NamedTuple):
    """What a launch asks for besides its geometry.

    Attributes
    ----------
    early : bool
        Whether the kernel may start before the one ahead of it ends.
    cooperative : bool
        Whether all blocks must be resident at once.
    cluster : int
        Neighbouring blocks that run together.
    """

    early: bool
    cooperative: bool
    cluster: int


USUAL: Final = Attributes(early=False, cooperative=False, cluster=1)
"""What ``cuLaunchKernel`` can express."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One checked launch.

    Attributes
    ----------
    geometry : tuple of int
        Grid x, y, z, block x, y, z and shared bytes, as ``cuLaunchKernel`` takes them.
    enqueue : callable
        ``cuLaunchKernel`` or `ExtendedLaunch` with function and geometry filled in; it takes the stream, ``params``, 0.
    params : int
        Address of the array of pointers to the arguments.
    memory : object
        What that address points into.
    types : tuple of type
        Types of the arguments, because 1, True and 1.0 are equal but not equally valid.
    grid, block : int or tuple
        As the caller gave them, if they cannot change.
    issued : object
        The pass of the backend that checked it.
    attributes : Attributes
    """

    geometry: tuple[int, int, int, int, int, int, int]
    enqueue: Callable[[int, int, int], None]
    params: int
    memory: Any
    types: tuple[type, ...]
    grid: Dim3
    block: Dim3
    issued: object
    attributes: Attributes

    def fits(self, grid: Dim3, block: Dim3) -> bool:
        """Return whether a grid and a block are plain ints, or tuples of them, that are equal to this launch's."""
        return _plain(grid) and _plain(block) and grid == self.grid and block == self.block


def _plain(axes: Dim3) -> bool:
    return type(axes) is int or (type(axes) is tuple and all(type(axis) is int for axis in axes))


@dataclass(frozen=True, slots=True, eq=False)
class CudaKernel(KernelHandle):
    """An entry point on the device: its op, its function, and the last launch for each tuple of arguments."""

    op: Op
    dtype: str
    function: int
    owner: Any
    launches: dict[tuple[Any, ...], Packed] = field(default_factory=dict)

    def keep(self, packed: Packed, shared: int, args: Sequence[Any]) -> None:
        """Keep a launch for the next one with the same arguments, if those will mean the same then."""
        if type(shared) is not int or not all(map(checks.repeats, args)):
            return
        if len(self.launches) >= _MOST_KEPT:
            self.launches.clear()
        self.launches[tuple(args)] = packed


class Kernels:
    """Compiles, loads and finds entry points. One module an op, loaded when an entry of it is first asked for.

    Parameters
    ----------
    context : Context
    ops : OpRegistry
    arch : str
        What sources are compiled for, as `gpu_runtime.cuda.nvrtc.compile_source` takes it.
    cache : Path or None
        Folder for compiled modules; None keeps none.
    """

    def __init__(self, context: Context, ops: OpRegistry, arch: str, cache: Path | None) -> None:
        self._context = context
        self._ops = ops
        self._arch = arch
        self._cache = cache
        self._lock = threading.Lock()
        self._modules: dict[Op, int] = {}
        self._found: dict[tuple[str, str], CudaKernel] = {}

    def __contains__(self, module: str) -> bool:
        return self._ops.has_kernels(module)

    def find(self, module: str, name: str) -> CudaKernel:
        """Return an entry point.

        Raises
        ------
        UnknownKernel
            When there is no such module or entry, or the op has no source.
        ValueError
            When the source's parameters are not what the op's spec says.
        CompileError
            When the source does not compile.
        """
        op, dtype = self._ops.find(module, name)
        found = self._found.get((module, name))
        if found is not None and found.op is op:  # another op may have been registered under the name since
            return found
        with self._lock:
            loaded = self._modules.get(op)
            if loaded is None:
                loaded = self._modules[op] = self._load(op)
        function = modules.function_of(self._context, loaded, name)
        found = self._found[module, name] = CudaKernel(module, name, op, dtype, function, self)
        return found

    def _load(self, op: Op) -> int:
        if op.source is None:
            raise UnknownKernel(f"kernel: op {op.spec.name!r} has no CUDA source")
        text = kernel_source.inlined(op.source, op.include)
        kernel_source.check_spec(op.spec, text)
        return modules.load(self._context, text, op.source.name, self._arch, self._cache)

    def close(self) -> None:
        """Unload every module."""
        self._found.clear()
        while self._modules:
            self._context.call(driver.moduleUnload, self._modules.popitem()[1])


def pack(
    context: Context,
    limits: Limits,
    kernel: CudaKernel,
    grid: Dim3,
    block: Dim3,
    shared: int,
    args: Sequence[Any],
    issued: object,
    attributes: Attributes = USUAL,
) -> Packed:
    """Check a launch and pack its arguments to the C types of the op's spec. Raises ValueError and TypeError."""
    blocks, threads = check_geometry(grid, block, shared, limits, attributes.cluster)
    spec = kernel.op.spec
    values = check_arguments(spec, kernel.dtype, args)
    dims = spec.dims(values)
    pointers = [(arg, at) for arg, at in zip(spec.args, values, strict=True) if arg.is_pointer and at]
    refuse_overlap(spec, values, {arg.name: argument_extent(arg, kernel.dtype, at, dims) for arg, at in pointers})
    _allow_shared(context, limits, kernel, shared)
    cells = [_ctype(spec, place)(value) for place, value in enumerate(values)]
    params = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
    geometry = (*blocks, *threads, shared)
    return Packed(
        geometry,
        enqueue=partial(driver.launchKernel, kernel.function, *geometry)
        if attributes == USUAL
        else ExtendedLaunch(kernel.function, geometry, attributes),
        params=ctypes.addressof(params),
        memory=(cells, params),
        types=tuple(map(type, args)),
        grid=grid if _plain(grid) else blocks,
        block=block if _plain(block) else threads,
        issued=issued,
        attributes=attributes,
    )


def _allow_shared(context: Context, limits: Limits, kernel: CudaKernel, shared: int) -> None:
    """Let a kernel have its dynamic shared memory besides what it has of its own. Raises ValueError when it cannot."""
    own = int(context.call(driver.funcGetAttribute, driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.function))
    most = limits.max_shared_bytes - own
    if shared > most:
        raise ValueError(f"{kernel.name}: shared_mem: expected at most {most}, as the kernel has {own}, got {shared}")
    if own + shared > _UNASKED_SHARED:
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        context.call(driver.funcSetAttribute, kernel.function, attribute, most)  # always the same, for any thread


def _ctype(spec: OpSpec, place: int) -> Any:
    arg = spec.args[place]
    return ctypes.c_uint64 if arg.is_pointer else dtypes.CTYPES[arg.dtype]


def check_resident(context: Context, limits: Limits, kernel: CudaKernel, packed: Packed) -> None:
    """Raise ValueError when the blocks of a cooperative launch cannot all be resident at once."""
    blocks, threads, shared = packed.geometry[:3], packed.geometry[3:6], packed.geometry[6]
    asked, size = blocks[0] * blocks[1] * blocks[2], threads[0] * threads[1] * threads[2]
    each = context.call(driver.occupancyMaxActiveBlocksPerMultiprocessor, kernel.function, size, shared)
    if asked > each * limits.sm_count:
        raise ValueError(
            f"{kernel.name}: cooperative: expected at most {each * limits.sm_count} blocks of {size} threads, "
            f"which is what {limits.sm_count} multiprocessors hold at once, got {asked}"
        )


class ExtendedLaunch:
    """``cuLaunchKernelEx`` of one function, geometry and attributes.

    It takes what is left of the arguments of ``cuLaunchKernel``, and raises as CuPy's does.
    """

    def __init__(
        self, function: int, geometry: tuple[int, int, int, int, int, int, int], attributes: Attributes
    ) -> None:
        self._function = bindings.CUfunction(function)
        self._geometry = geometry
        self._attributes = attributes
        self._configs: dict[int, Any] = {}  # by stream; nothing changes one that is here, so threads may share it

    def __call__(self, stream: int, params: int, extra: int) -> None:
        config = self._configs.get(stream)
        if config is None:
            if len(self._configs) >= _MOST_STREAMS:
                self._configs.clear()
            config = self._configs[stream] = self._config(stream)
        (status,) = bindings.cuLaunchKernelEx(config, self._function, params, extra)
        if status != bindings.CUresult.CUDA_SUCCESS:
            raise driver.CUDADriverError(int(status))

    def _config(self, stream: int) -> Any:
        config = bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._geometry[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._geometry[3:6]
        config.sharedMemBytes = self._geometry[6]
        config.hStream = bindings.CUstream(stream)
        attributes = []
        if self._attributes.early:
            attributes.append(attribute := bindings.CUlaunchAttribute())
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        if self._attributes.cooperative:
            attributes.append(attribute := bindings.CUlaunchAttribute())
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        if self._attributes.cluster > 1:
            attributes.append(attribute := bindings.CUlaunchAttribute())
            attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = self._attributes.cluster, 1, 1
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config
