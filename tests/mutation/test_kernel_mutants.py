# SPDX-License-Identifier: MIT OR Apache-2.0
"""The mutants of the kernels are up to date: each changes a source that is there, and compiles."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from tests.draws import made
from tests.mutation.__main__ import LEAST_PER_GROUP
from tests.mutation.kernel_runner import KernelMutant, kernel_mutants, ops_by_name

MUTANTS = kernel_mutants()


def test_every_kernel_has_mutants() -> None:
    counts = Counter(mutant.op for mutant in MUTANTS)
    assert set(counts) == set(ops_by_name())
    assert min(counts.values()) >= LEAST_PER_GROUP


@pytest.mark.parametrize("name", sorted(ops_by_name()))
def test_no_mutant_stands_twice(name: str) -> None:
    texts = [mutant.text() for mutant in MUTANTS if mutant.op == name]
    assert len(set(texts)) == len(texts)
    assert KernelMutant(name).text() not in texts


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy's binding of NVRTC is not installed")
@pytest.mark.parametrize("name", sorted(ops_by_name()))
def test_mutants_compile(name: str, pytestconfig: pytest.Config) -> None:
    """Up to the end of the front end, which is what a mutant can fail in."""
    from gpu_runtime.cuda import nvrtc

    library = nvrtc._library()
    options = (*nvrtc.OPTIONS, "--gpu-architecture=compute_90", "--fdevice-syntax-only")
    for mutant in made(pytestconfig, [one for one in MUTANTS if one.op == name], 2):
        program = library.createProgram(mutant.text(), f"{name}.cu", (), ())
        try:
            library.compileProgram(program, options)
        except library.NVRTCError:
            pytest.fail(f"{mutant}: {library.getProgramLog(program)}")
        finally:
            library.destroyProgram(program)
