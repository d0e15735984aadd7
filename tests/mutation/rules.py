# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of one module that the same tests must notice."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def files(*names: str) -> tuple[str, ...]:
    """Return the paths of tests of the model."""
    return tuple(f"tests/nllb/test_model_{name}.py" for name in names)


def rules(group: str, module: str, tests: tuple[str, ...], *changes: tuple[str, str]) -> list[Mutant]:
    """Return a mutant for each change: what stands in the source, and what becomes of it."""
    return [Mutant(group, module, old, new, tests) for old, new in changes]


def op_reference(name: str, *changes: tuple[str, str]) -> list[Mutant]:
    """Return the mutants of an op's module that its conformance must notice."""
    return rules(
        name, f"metrale.ops.{name}", ("tests/ops/test_conformance.py", "-k", f"test_result and {name}-"), *changes
    )
