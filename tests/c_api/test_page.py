# SPDX-License-Identifier: MIT OR Apache-2.0
"""The code in docs/c_api.md compiles and does what the page says; its lists are complete."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.capi import codes
from gpu_runtime.capi.entries import ENTRIES
from gpu_runtime.errors import InvalidPointer
from tests.c_api.examples import ROOT
from tests.c_api.toolchain import LIMITED, Compiler

PAGE = (ROOT / "docs" / "c_api.md").read_text("utf-8")
MODULE, THREAD = re.findall(r"^```c\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

REST = """
static PyMethodDef methods[] = {{"fill", fill, METH_VARARGS, 0}, {0, 0, 0, 0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "page", 0, -1, methods, 0, 0, 0, 0};

void on_a_thread(void);
void on_a_thread(void)
{
%s}

PyMODINIT_FUNC PyInit_page(void)
{
    gpurt_code code = gpurt_import();
    return code == GPURT_OK ? PyModule_Create(&definition) : gpurt_raise(code, NULL);
}
"""


def test_the_module_of_the_page(any_compiler: Compiler, gpu: GpuBackend, tmp_path: Path) -> None:
    source = tmp_path / "page.c"
    source.write_text(MODULE + REST % THREAD)
    path = any_compiler.library(tmp_path / "page.abi3.so", source, flags=(LIMITED,))
    spec = importlib.util.spec_from_file_location("page", path)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    ptr, out = gpu.alloc(64), bytearray(64)
    page.fill(gpu, ptr, 64, 0)
    gpu.copy_d2h(ptr, out)
    assert out == b"\xff" * 64
    with pytest.raises(InvalidPointer):
        page.fill(gpu, ptr, 65, 0)
    with pytest.raises(TypeError, match="stream: expected an int"):
        page.fill(gpu, ptr, 64, "0")


def test_every_function_and_code_is_on_the_page() -> None:
    names = set(re.findall(r"`(?:gpurt_)?(\w+)`", PAGE))
    assert set(ENTRIES) <= names
    shown = set(re.findall(r"`(?:GPURT_ERROR)?_(\w+)`", PAGE))
    assert {*codes.CODES, *codes.ONE_WAY} <= shown
