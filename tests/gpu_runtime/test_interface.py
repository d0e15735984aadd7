# SPDX-License-Identifier: MIT OR Apache-2.0
"""One interface, and modules that need no driver."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runtime
from gpu_runtime.backend import GpuBackend
from gpu_runtime.host import HostBackend

BACKENDS: list[type[GpuBackend]] = [HostBackend]
if importlib.util.find_spec("cupy") is not None:  # which imports without a driver
    from gpu_runtime.cuda.backend import CudaBackend

    BACKENDS.append(CudaBackend)
ABSTRACT = sorted(GpuBackend.__abstractmethods__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ABSTRACT)
def test_signatures_are_equal(backend: type[GpuBackend], name: str) -> None:
    declared, implemented = getattr(GpuBackend, name), getattr(backend, name)
    if isinstance(declared, property):
        assert isinstance(implemented, property)
        assert (implemented.fset is None) == (declared.fset is None)
        declared, implemented = declared.fget, implemented.fget
    assert inspect.signature(implemented) == inspect.signature(declared)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_adds_nothing_public(backend: type[GpuBackend]) -> None:
    assert {name for name in dir(backend) if not name.startswith("_")} == {
        name for name in dir(GpuBackend) if not name.startswith("_")
    }


def test_every_abstract_method_is_documented() -> None:
    assert len(ABSTRACT) > 50
    assert [name for name in ABSTRACT if not inspect.getdoc(getattr(GpuBackend, name))] == []


def test_exports() -> None:
    assert gpu_runtime.__all__ == sorted(gpu_runtime.__all__)
    assert all(hasattr(gpu_runtime, name) for name in gpu_runtime.__all__)


IMPORT_ALL = """
import importlib, pkgutil, sys

class NoDevice:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cupy", "cupy_backends", "cuda", "nvmath", "torch", "transformers"}:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NoDevice())
for package in ("gpu_runtime", "metrale"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__") and not module.name.startswith("gpu_runtime.cuda"):
            importlib.import_module(module.name)
            print(module.name)
"""


def test_every_module_imports_without_a_device() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"gpu_runtime.host.backend", "metrale.ops.linear", "metrale.nllb.model"} <= set(done.stdout.split())


def test_every_module_has_a_docstring() -> None:
    root = Path(gpu_runtime.__file__).parent
    files = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    assert {"host/memory.py", "pointer.py"} <= set(files)
    assert [name for name, text in files.items() if not ast.get_docstring(ast.parse(text))] == []
