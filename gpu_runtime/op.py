# SPDX-License-Identifier: MIT OR Apache-2.0
"""An op, defined once: what a kernel's parameters are, how it is launched, and what it computes.

A kernel library registers one `Op` per kernel source. The CUDA backend packs a launch's arguments by the spec; the
host backend runs the op's NumPy reference on views that the spec describes. Neither knows what the op is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from gpu_runtime import checks, dtypes
from gpu_runtime.errors import UnknownKernel
from gpu_runtime.limits import Limits
from gpu_runtime.streams import StreamLike

if TYPE_CHECKING:
    from gpu_runtime.backend import GpuBackend

Role = Literal["in", "out", "inout", "scalar"]
Dims = Mapping[str, int]
Array = np.ndarray[Any, np.dtype[Any]]

ELEMENT: Final = "T"
"""Stands in a spec for the element type that the entry point is instantiated over."""


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel parameter.

    Attributes
    ----------
    name : str
    role : {"in", "out", "inout", "scalar"}
        Of an ``out``, every element of the shape is written, and none is read before.
    dtype : str
        Element type of what a pointer points at, or C type of a scalar; ``"T"`` is the entry's element type.
    shape : tuple
        For a pointer, each axis as an int, a scalar parameter's name, or a product of such (``"heads*head_dim"``).
    row_stride : str or None
        The scalar parameter that gives the distance between rows (first axis) in elements, at least a row's elements
        where rows are written; None means contiguous.
    optional : bool
        Whether NULL is allowed.
    align : int
        Alignment in bytes that the address must have; 0 means one element.
    reads_when : str or bool
        For ``inout``, whether what the memory held before is read: always (True), never (False: scratch, whose content
        is unspecified afterwards), or when the integer scalar parameter of this name is not 0. When that is 0, the
        parameter is as good as ``out``: every element of its shape is written, and none is read before.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int | str, ...] = ()
    row_stride: str | None = None
    optional: bool = False
    align: int = 0
    reads_when: str | bool = True

    @property
    def is_pointer(self) -> bool:
        return self.role != "scalar"

    @property
    def is_scratch(self) -> bool:
        """Whether the memory means nothing before and after the launch."""
        return self.role == "inout" and self.reads_when is False

    def reads(self, dims: Dims) -> bool:
        """Return whether the kernel reads what the memory holds when it begins, for the given scalar values."""
        if self.role != "inout":
            return self.role == "in"
        return bool(dims[self.reads_when]) if isinstance(self.reads_when, str) else self.reads_when

    def sizes(self, dims: Dims) -> tuple[int, ...]:
        """Return the extent of each axis for the given scalar values."""
        return tuple(_extent(axis, dims) for axis in self.shape)


def _extent(axis: int | str, dims: Dims) -> int:
    if isinstance(axis, int):
        return axis
    if "*" not in axis:
        return dims[axis]
    product = 1
    for factor in axis.split("*"):
        product *= dims[factor]
    return product


def tensor(
    name: str,
    role: Role,
    dtype: str,
    *shape: int | str,
    row_stride: str | None = None,
    optional: bool = False,
    reads_when: str | bool = True,
) -> Arg:
    """Return the spec of a pointer parameter."""
    return Arg(name, role, dtype, shape, row_stride, optional, reads_when=reads_when)


def scalar(name: str, ctype: str) -> Arg:
    """Return the spec of a scalar parameter."""
    return Arg(name, "scalar", ctype)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from the exact one: ``max|result - exact| <= relative * max|exact|``.

    Relative to the largest element and not to each one: in a sum, cancellation makes single elements arbitrarily
    sensitive. An all-zero result has a relative error of 1, so every value below 1 refuses it.
    """

    f32: float
    f16: float
    bf16: float

    def of(self, dtype: str) -> float:
        return float(getattr(self, dtype))


EXACT: Final = Tolerance(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Geometry of one launch: entry point, grid and block (x, y, z), and dynamic shared memory in bytes.

    With ``programmatic`` the kernel may start before the one ahead of it ends: it waits by ``griddepcontrol``.
    ``cluster`` neighbouring blocks, along x, run together and see each other's shared memory.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    programmatic: bool = False
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The contract of one op.

    Attributes
    ----------
    name : str
        Stem of the kernel source and prefix of its entry points.
    args : tuple of Arg
        The parameters in the kernel's order.
    dtypes : tuple of str
        Element types that entry points exist for.
    accumulate : str
        Type in which sums are formed.
    tolerance : Tolerance
    aliases : tuple of (str, str)
        Pairs of pointer parameters that may name the same memory; every other overlap with an output is an error.
    indirect : bool
        Whether the op follows addresses that it finds in device memory; its reference then takes ``memory``.
    library : bool
        Whether the op is a call of the backend's `gemm`, so that no kernel source belongs to it.
    variants : tuple of str
        Endings of further entry points for each element type, which compute the same in other ways; a plan chooses.
    """

    name: str
    args: tuple[Arg, ...]
    tolerance: Tolerance
    dtypes: tuple[str, ...] = dtypes.FLOAT_TYPES
    accumulate: str = "f32"
    aliases: tuple[tuple[str, str], ...] = ()
    indirect: bool = False
    library: bool = False
    variants: tuple[str, ...] = ()
    _integers: tuple[tuple[int, str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = [(i, arg.name) for i, arg in enumerate(self.args) if arg.role == "scalar" and arg.dtype != "f32"]
        object.__setattr__(self, "_integers", tuple(places))
        names = {name for _, name in places}
        for arg in self.args:
            if isinstance(arg.reads_when, str) and arg.reads_when not in names:
                raise ValueError(
                    f"{self.name}: {arg.name}: reads_when: expected an integer scalar, got {arg.reads_when!r}"
                )

    def entry(self, dtype: str, variant: str = "") -> str:
        """Return the entry point's name for an element type, or that of a variant of it.

        Raises
        ------
        UnknownKernel
            When the op has no entry for it.
        """
        if dtype not in self.dtypes:
            raise UnknownKernel(f"{self.name}: expected a dtype of {', '.join(self.dtypes)}, got {dtype!r}")
        if variant and variant not in self.variants:
            raise UnknownKernel(f"{self.name}: expected a variant of {', '.join(self.variants)}, got {variant!r}")
        return "_".join((self.name, dtype, variant) if variant else (self.name, dtype))

    def entries(self) -> dict[str, str]:
        """Return every entry point's name with its element type."""
        return {self.entry(dtype, variant): dtype for dtype in self.dtypes for variant in ("", *self.variants)}

    def integers(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the integer scalar parameters, as they are. TypeError when the count is wrong."""
        if len(values) != len(self.args):
            names = ", ".join(arg.name for arg in self.args)
            raise TypeError(f"{self.name}: expected {len(self.args)} arguments ({names}), got {len(values)}")
        return [values[place] for place, _ in self._integers]

    def dims_of(self, integers: Sequence[Any]) -> dict[str, int]:
        """Return the integer scalar parameters by name. TypeError when one is not an integer."""
        return {
            name: checks.integer(f"{self.name}: {name}", value)
            for (_, name), value in zip(self._integers, integers, strict=True)
        }

    def dims(self, values: Sequence[Any]) -> dict[str, int]:
        """Return the integer scalar parameters by name, from all values. Raises as `integers` and `dims_of` do."""
        return self.dims_of(self.integers(values))


class DeviceMemory(Protocol):
    """How an indirect op's reference reaches memory through addresses that it read from a table."""

    def gather_rows(
        self,
        addresses: Array,
        lengths: Array,
        *,
        offset: int,
        stride: int,
        width: int,
        dtype: str,
        room: int | None = None,
    ) -> Array:
        """Read ``lengths[r]`` rows from each address.

        Row ``p`` of table entry ``r`` starts at ``addresses[r] + (offset + p * stride) * itemsize``. Returns
        ``[n, room, width]``, where a ``room`` of None is ``max(lengths)``, the least there may be; places past an
        entry's length repeat its last row.
        """

    def scatter_rows(
        self, addresses: Array, positions: Array, values: Array, *, offset: int, stride: int, dtype: str
    ) -> None:
        """Write ``values[r]`` (``[n, width]``) to row ``positions[r]`` of ``addresses[r]``, as `gather_rows` has it."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    """Test input for a table of addresses: entry ``r`` is the device address of element ``starts[r]`` of ``pool``.

    ``role`` is "in" or "inout" as the op reads or writes the pool.
    """

    pool: Array
    starts: Array
    role: Literal["in", "inout"] = "in"


Inputs = Mapping[str, "Array | AddressTable | int | float | None"]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A spec with its way to the device, its NumPy reference and the inputs that exercise it.

    Attributes
    ----------
    spec : OpSpec
    plan : callable or None
        ``plan(dims, dtype, limits) -> LaunchPlan``, a pure function; None for a library op.
    source : Path or None
        The CUDA C++ file with the entry points; None for a library op.
    include : tuple of Path
        Folders where the source's ``#include "..."`` are looked for, after the folder of the including file.
    enqueue : callable or None
        For a library op alone: ``enqueue(gpu, dtype, values, stream)``.
    reference : callable
        Takes every parameter by name (pointers as arrays, NULL as None, scalars as they are; an indirect op also
        ``memory``), and writes its outputs in place: upcast, compute in the accumulation type, round once.
    cases : tuple of mappings
        Edge shapes and options that conformance runs, as keyword arguments of ``make_inputs``.
    make_inputs : callable
        ``make_inputs(rng, dtype, **case) -> Inputs``: a value for every parameter. Outputs are arrays too; an array
        whose parameter has a row stride is ``[rows, stride]``, padding included.
    """

    spec: OpSpec
    reference: Callable[..., None]
    make_inputs: Callable[..., Inputs]
    cases: tuple[Mapping[str, Any], ...]
    plan: Callable[[Dims, str, Limits], LaunchPlan] | None = None
    source: Path | None = None
    include: tuple[Path, ...] = ()
    enqueue: Callable[[GpuBackend, str, Sequence[Any], StreamLike], None] | None = None

    def __post_init__(self) -> None:
        given: object = self.include  # a bare path is the usual mistake, and a str would pass as many folders
        if not isinstance(given, tuple) or not all(isinstance(folder, Path) for folder in given):
            raise TypeError(f"{self.spec.name}: include: expected a tuple of Path, got {given!r}")

    def launch(self, gpu: GpuBackend, dtype: str, values: Sequence[Any], stream: StreamLike = 0) -> None:
        """Plan and enqueue one launch, or enqueue the library call.

        Parameters
        ----------
        gpu : GpuBackend
        dtype : str
            Element type of the entry point.
        values : sequence
            One value per parameter, in the spec's order: addresses for pointers, numbers for scalars.
        stream : StreamLike
            The launch is ordered after the work already on it; the call does not wait.
        """
        if self.enqueue is not None:
            self.enqueue(gpu, dtype, values, stream)
            return
        plan = _planned(self, dtype, gpu.limits(), *self.spec.integers(values))
        handle = gpu.kernel(self.spec.name, plan.entry)
        geometry = (plan.grid, plan.block, plan.shared_bytes)
        if plan.cluster != 1:  # also where it is no cluster at all, which the launch refuses
            gpu.launch(handle, *geometry, stream, values, programmatic=plan.programmatic, cluster=plan.cluster)
        elif plan.programmatic:
            gpu.launch(handle, *geometry, stream, values, programmatic=True)
        else:
            gpu.launch(handle, *geometry, stream, values)


@lru_cache(maxsize=4096, typed=True)
def _planned(op: Op, dtype: str, limits: Limits, *integers: Any) -> LaunchPlan:
    """Return the op's plan for the values of its integer parameters; the same few recur step after step."""
    if op.plan is None:
        raise UnknownKernel(f"{op.spec.name}: the op has neither a launch plan nor a library call")
    return op.plan(op.spec.dims_of(integers), dtype, limits)


class OpRegistry:
    """The ops that a backend can run, by module and entry-point name."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {}
        self._entries: dict[tuple[str, str], tuple[Op, str]] = {}

    def register(self, op: Op) -> Op:
        """Add an op and return it.

        Raises
        ------
        ValueError
            When another op has the same name.
        """
        if op.spec.name in self._ops:
            raise ValueError(f"op: {op.spec.name!r} is registered already")
        self._ops[op.spec.name] = op
        if not op.spec.library:
            for entry, dtype in op.spec.entries().items():
                self._entries[op.spec.name, entry] = op, dtype
        return op

    def unregister(self, name: str) -> None:
        """Remove an op."""
        op = self._ops.pop(name)
        for entry in op.spec.entries():
            self._entries.pop((name, entry), None)

    def __iter__(self) -> Iterator[Op]:
        return iter(tuple(self._ops.values()))

    def __contains__(self, module: str) -> bool:
        return module in self._ops

    def has_kernels(self, module: str) -> bool:
        """Return whether there is an op of this name that has kernels of its own."""
        op = self._ops.get(module)
        return op is not None and not op.spec.library

    def find(self, module: str, entry: str) -> tuple[Op, str]:
        """Return the op of a kernel module and the element type of one of its entry points.

        Raises
        ------
        UnknownKernel
            When there is no such module or entry, or the op is a library call.
        """
        found = self._entries.get((module, entry))
        if found is not None:
            return found
        op = self._ops.get(module)
        if op is None:
            known = ", ".join(sorted(self._ops)) or "none (a kernel library registers its ops when it is imported)"
            raise UnknownKernel(f"kernel: no module {module!r}; registered: {known}")
        if op.spec.library:
            raise UnknownKernel(f"kernel: {module!r} is a call of the backend's gemm, and has no kernels")
        raise UnknownKernel(f"kernel: module {module!r} has no entry {entry!r}; it has {', '.join(op.spec.entries())}")


REGISTRY: Final = OpRegistry()
"""Where kernel libraries put their ops, as codecs are put in one table. A backend may be given another."""
