# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls while the interpreter ends and after it, forks, and tables of another version."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpu_runtime
from gpu_runtime.capi import codes
from gpu_runtime.capi.table import NAME, Table
from tests.backends import Device
from tests.c_api.library import Failed, Library
from tests.c_api.toolchain import HERE, Compiler

SLOW = """
import time
from gpu_runtime.host import HostBackend
class Slow(HostBackend):
    slow = True
    def synchronize(self, stream=0):
        time.sleep(0.4)
gpu = Slow()
"""


@pytest.fixture(scope="module")
def ending(any_compiler: Compiler, embedding: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return any_compiler.program(tmp_path_factory.mktemp("ending") / "ending", HERE / "ending.c")


def run(program: Path, setup: str) -> subprocess.CompletedProcess[str]:
    """Run a program that embeds Python, which then takes the environment of the first python3 on the path."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return subprocess.run(
        [program, setup], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PATH": path}
    )


def test_the_interpreter_ends_below_native_threads(ending: Path, device: Device) -> None:
    """Eight threads that call without a pause all get GPURT_ERROR_SHUTDOWN, and so does every call after it."""
    done = run(ending, f"import gpu_runtime; gpu = gpu_runtime.open_backend({device.kind!r})")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended well\n", "")


def test_the_end_waits_for_calls_that_are_under_way(ending: Path) -> None:
    began = time.monotonic()
    done = run(ending, SLOW)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended well\n", "")
    assert time.monotonic() - began > 0.4


@pytest.fixture(scope="module")
def dropping(any_compiler: Compiler, embedding: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return any_compiler.program(tmp_path_factory.mktemp("dropping") / "drop_at_end", HERE / "drop_at_end.cpp")


def test_a_native_thread_gives_up_a_reference_while_the_interpreter_ends(dropping: Path) -> None:
    """It is leaked: Python would end the thread inside a destructor, and that the process."""
    done = run(dropping, sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_gpu_runtime_to_import(ending: Path) -> None:
    done = run(ending, "import sys; sys.modules['gpu_runtime'] = None")
    code = codes.CODES["IMPORT"][0]
    assert done.stdout.startswith(f"import: {code} "), done
    assert "gpu_runtime" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


STUCK = """
import ctypes, sys, threading, time
from gpu_runtime.capi import table
address = table._make_table()
view = table.Table.from_address(address)
view.inflight = 2
began = time.monotonic()
table._end(address, patience=0.2)
print(view.alive, view.inflight, round(time.monotonic() - began, 1))
threading.Timer(0.2, lambda: setattr(view, "inflight", 0)).start()
began = time.monotonic()
table._end(address, patience=20)
print(view.inflight, time.monotonic() - began < 10)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_end_does_not_wait_for_ever() -> None:
    done = python(STUCK)
    assert done.stdout == "0 2 0.2\n0 True\n", done.stderr
    assert done.stderr.count("2 calls of C hosts did not end within 0 s") == 1


FORK = """
import ctypes, os, gpu_runtime
from gpu_runtime.capi.table import NAME, Table
get = ctypes.pythonapi.PyCapsule_GetPointer
get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
table = Table.from_address(get(gpu_runtime._C_API, NAME.encode()))
table.inflight = 3
if os.fork() == 0:
    raise SystemExit(table.inflight)
print(os.waitstatus_to_exitcode(os.wait()[1]), table.inflight)
table.inflight = 0
"""


def test_a_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    done = python(FORK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 3\n", "")


# versions


def test_a_table_of_another_version_is_refused(library: Library, tmp_path: Path) -> None:
    copy = tmp_path / "another.so"  # whose own pointer to the table is not set yet
    shutil.copy(library.raw._name, copy)
    fresh = Library(copy)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    table = Table.from_address(get(gpu_runtime._C_API, NAME.encode()))
    table.abi_major += 1
    try:
        with pytest.raises(Failed, match=r"compiled for ABI 1\.0, but the installed one has 2\.0: compile against"):
            fresh.call("import")
        assert not fresh.function("alive")()
        with pytest.raises(Failed) as caught:
            fresh.call("free", 1, 0)
        assert caught.value.code == codes.ONE_WAY["NOT_IMPORTED"][0]
    finally:
        table.abi_major -= 1
    fresh.call("import")
    assert fresh.function("alive")()


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, None),
        ({"abi_minor": 7, "struct_size": 4000}, None),
        ({"abi_major": 0}, "has 0.0: compile against its own header"),
        ({"abi_major": 2, "abi_minor": 3}, "has 2.3: compile against its own header"),
        ({"struct_size": ctypes.sizeof(Table) - 8}, "has 1.0: install a newer one"),
        ({"abi_minor": -1}, "has 1.-1: install a newer one"),
    ],
    ids=str,
)
def test_which_tables_fit(library: Library, changes: dict[str, Any], advice: str | None) -> None:
    table = Table(*gpu_runtime.ABI_VERSION, ctypes.sizeof(Table), 1, 0)
    for name, value in changes.items():
        setattr(table, name, value)
    code = library.function("check_abi")(ctypes.addressof(table))
    assert code == (0 if advice is None else codes.ONE_WAY["ABI"][0])
    assert advice is None or advice in library.last_error()
