# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every kernel source compiles for each generation of GPUs. Needs NVRTC (the extra `test` brings it), no GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import metrale_kernels
import pytest

from gpu_runtime.cuda import nvrtc
from gpu_runtime.cuda.nvrtc import compile_source
from gpu_runtime.kernel_source import entries, inlined
from tests.kernels.sources import ARCHITECTURES, OPS, RUNTIME, asks_for_generation, entries_of_ptx, passed
from tests.kernels.test_entries import DIRECT, SOURCE

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")


def compiled() -> list[Any]:
    """Every source for every generation. In a run that asks for no more, for the first, and for 9.0 where it asks."""
    return [
        pytest.param(source, arch, id=f"{arch}-{source.name}", marks=() if number < always else pytest.mark.more)
        for source in (*OPS, *RUNTIME)
        for always in (2 if asks_for_generation(source) else 1,)  # none asks for more than compute capability 9.0
        for number, arch in enumerate(ARCHITECTURES)
    ]


@pytest.mark.parametrize(("source", "arch"), compiled())
def test_compiles_and_has_the_entry_points_that_are_read_from_it(source: Path, arch: str) -> None:
    """The compiler is the judge of the parser: the same entry points, with parameters of the same sizes."""
    text = inlined(source, (metrale_kernels.ROOT,))
    ptx = compile_source(text, source.name, arch, cache=None)
    found = entries_of_ptx(ptx)
    assert found
    assert found == {name: passed(parameters) for name, parameters in entries(text).items()}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_small_copy_spills_nothing(arch: str) -> None:
    """All that a thread reads is in registers before it writes; and they are few, as a copy runs beside other work."""
    (source,) = (one for one in RUNTIME if one.stem == "small_copy")
    compiler = nvrtc._library()
    program = compiler.createProgram(inlined(source, (metrale_kernels.ROOT,)), source.name, (), ())
    try:
        options = (*nvrtc.OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v")
        compiler.compileProgram(program, options)
        log = compiler.getProgramLog(program)
    finally:
        compiler.destroyProgram(program)
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0", "0", "0"]
    assert [int(count) <= 64 for count in re.findall(r"Used (\d+) registers", log)] == [True]


@pytest.mark.parametrize("text", [SOURCE, DIRECT])
def test_the_compiler_reads_the_parser_s_own_examples_alike(text: str) -> None:
    found = entries_of_ptx(compile_source(text, "k.cu", "compute_80", cache=None))
    assert found == {name: passed(parameters) for name, parameters in entries(text).items()}


def test_an_entry_point_that_is_compiled_out_is_noticed() -> None:
    text = '#if 0\nextern "C" __global__ void a(int n) { }\n#endif\nextern "C" __global__ void b(int n) { }\n'
    assert list(entries(text)) == ["a", "b"]
    assert list(entries_of_ptx(compile_source(text, "k.cu", "compute_80", cache=None))) == ["b"]
