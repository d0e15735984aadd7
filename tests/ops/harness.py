# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs one op on a backend: inputs up, one launch, everything down again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_runtime import AddressTable, DevicePtr, GpuBackend, LaunchPlan, Op, dtypes
from gpu_runtime.op import ELEMENT
from tests.backends import damaged

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Any]

HELPERS = frozenset(
    {"adapter_rows", "beam_layout", "chains", "beam_states", "dense", "drawing", "inputs", "processing", "row_parts"}
)
"""Modules of `metrale.ops` that are no op, but parts of some."""


def seed_of(op: Op, dtype: str, case: Mapping[str, Any]) -> int:
    """Return a seed that depends on the test alone."""
    return sum(ord(letter) for letter in f"{op.spec.name}{dtype}{sorted(case.items())}")


def cases_of(ops: list[Op]) -> list[Any]:
    """Return every (op, dtype, case) as a pytest parameter with a readable name."""
    import pytest

    return [
        pytest.param(op, dtype, case, id=f"{op.spec.name}-{dtype}-{index}")
        for op in ops
        for dtype in op.spec.dtypes
        for index, case in enumerate(op.cases)
    ]


def upload(gpu: GpuBackend, array: Array) -> DevicePtr:
    """Return the address of a copy of ``array``."""
    ptr = gpu.alloc(max(array.nbytes, 1))
    gpu.copy_h2d(np.ascontiguousarray(array), ptr)
    return ptr


def download(gpu: GpuBackend, ptr: int, like: Array) -> Array:
    """Return what device memory holds, in the shape and type of ``like``."""
    result = np.empty_like(like)
    gpu.copy_d2h(ptr, result)
    return result


def run(op: Op, gpu: GpuBackend, dtype: str, inputs: Values, alias: tuple[str, str] | None = None) -> dict[str, Array]:
    """Launch the op and return every array it could have touched, a table's pool under the table's name.

    ``alias`` names an input and an output that share the input's memory.
    """
    pointers: dict[str, tuple[int, Array]] = {}
    values: list[Any] = []
    for arg in op.spec.args:
        value = inputs[arg.name]
        if isinstance(value, AddressTable):
            pool = upload(gpu, value.pool)
            pointers[arg.name] = (pool, value.pool)
            addresses = int(pool) + value.starts.astype(np.uint64) * value.pool.itemsize
            values.append(upload(gpu, addresses.astype(np.uint64)))
        elif isinstance(value, np.ndarray):
            assert value.dtype == dtypes.NUMPY[dtype if arg.dtype == ELEMENT else arg.dtype], arg.name
            shared = alias is not None and alias[1] == arg.name
            ptr = pointers[alias[0]][0] if shared and alias is not None else upload(gpu, value)
            pointers[arg.name] = (ptr, value)
            values.append(ptr)
        else:
            values.append(0 if value is None else value)
    op.launch(gpu, dtype, values)
    gpu.synchronize()
    assert not damaged(gpu)
    return {name: download(gpu, ptr, like) for name, (ptr, like) in pointers.items()}


@dataclass(frozen=True)
class Launched:
    """Launches an op by a plan of choice; what it wrote to ``out``."""

    op: Op
    gpu: GpuBackend
    dtype: str
    how: LaunchPlan

    def __call__(self, values: Values) -> Array:
        return self.all(values)["out"]

    def all(self, values: Values) -> dict[str, Array]:
        """Return all that it could have written."""
        op = replace(self.op, plan=lambda dims, dtype, limits: self.how)
        return run(op, self.gpu, self.dtype, values)


def both_ways(op: Op, gpu: GpuBackend, dtype: str, plans: Iterable[LaunchPlan]) -> Iterator[Launched]:
    """Yield each plan, started early and in the usual way."""
    for how in plans:
        yield Launched(op, gpu, dtype, how)
        yield Launched(op, gpu, dtype, replace(how, programmatic=False))
