# SPDX-License-Identifier: MIT OR Apache-2.0
"""An op has all its parts, and its launch plan fits the least device that is supported."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import metrale.ops
from gpu_runtime import Op
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from gpu_runtime.op import REGISTRY
from tests.ops.harness import HELPERS, cases_of
from tests.ops.oracles import ORACLES

MODULES = [name for _, name, _ in pkgutil.iter_modules(metrale.ops.__path__) if name not in HELPERS]
OPS = list(REGISTRY)


def test_every_module_registers_the_op_of_its_name() -> None:
    assert {op.spec.name for op in OPS} == set(MODULES) == set(ORACLES)


@pytest.mark.parametrize("name", MODULES)
def test_parts(name: str) -> None:
    module = importlib.import_module(f"metrale.ops.{name}")
    op: Op = module.OP
    assert op.spec is module.SPEC
    assert op.spec.library == (op.enqueue is not None) == (op.plan is None)
    assert getattr(metrale.ops, name) is getattr(module, name), "the launcher bears the op's name"
    assert len(op.cases) >= 3
    pointers = {arg.name for arg in op.spec.args if arg.is_pointer}
    for pair in op.spec.aliases:
        assert set(pair) <= pointers


@pytest.mark.parametrize("name", MODULES)
def test_reference_takes_the_parameters_by_name(name: str) -> None:
    op: Op = importlib.import_module(f"metrale.ops.{name}").OP
    expected = {arg.name for arg in op.spec.args} | ({"memory"} if op.spec.indirect else set())
    parameters = inspect.signature(op.reference).parameters.values()
    named = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    assert named <= expected if open_ended else named == expected


@pytest.mark.parametrize(("op", "dtype", "case"), cases_of(OPS))
def test_inputs_and_plan(op: Op, dtype: str, case: dict[str, Any]) -> None:
    inputs = op.make_inputs(np.random.default_rng(0), dtype, **case)
    assert list(inputs) == [arg.name for arg in op.spec.args], "a value for every parameter, in order"
    if op.plan is None:
        return
    dims = op.spec.dims(list(inputs.values()))
    plan = op.plan(dims, dtype, MINIMUM)
    assert op.spec.entries()[plan.entry] == dtype
    assert check_geometry(plan.grid, plan.block, plan.shared_bytes, MINIMUM) == (plan.grid, plan.block)
    assert plan == op.plan(dims, dtype, MINIMUM)
    for name in dims:  # of a size that is none, the launch says what is wrong with it, if the plan does not
        for size in (0, -1):
            with suppress(ValueError):
                op.plan({**dims, name: size}, dtype, MINIMUM)
