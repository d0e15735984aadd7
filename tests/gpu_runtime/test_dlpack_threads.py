# SPDX-License-Identifier: MIT OR Apache-2.0
"""Deleters where C code calls them: on threads that Python does not know, and after the interpreter has ended."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, view
from gpu_runtime.interop import dlpack
from tests.backends import host_only
from tests.gpu_runtime.exchanging import lent


def taken(capsule: Any) -> tuple[int, int]:
    """Take the tensor out of a capsule, as a consumer in C does; return its address and its deleter's."""
    names = dlpack.names_of(capsule)
    assert names is not None
    managed = dlpack.managed_of(capsule, names)
    dlpack.mark_used(capsule, names)
    return ctypes.addressof(managed), managed.deleter


def native_threads(calls: list[tuple[int, int]]) -> None:
    """Call ``deleter(tensor)`` on a POSIX thread of its own for each pair, and join them all."""
    create, join = ctypes.CDLL(None).pthread_create, ctypes.CDLL(None).pthread_join
    create.argtypes = (ctypes.c_void_p,) * 4
    join.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    threads = [ctypes.c_void_p() for _ in calls]
    for thread, (tensor, deleter) in zip(threads, calls, strict=True):
        assert create(ctypes.addressof(thread), None, deleter, tensor) == 0
    for thread in threads:
        assert join(thread, None) == 0  # without the GIL, which the deleters take


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_threads_that_python_does_not_know(gpu: GpuBackend, version: Any) -> None:
    buffer = lent(gpu)
    calls = [taken(buffer.__dlpack__(max_version=version)) for _ in range(50)]
    assert gpu.live_exports() == 50
    native_threads(calls)
    assert gpu.live_exports() == 0
    gpu.free(buffer.ptr)


def test_while_another_thread_is_inside_the_backend(gpu: GpuBackend) -> None:
    """A deleter takes no lock: it ends while somebody holds all of the backend's."""
    buffer = lent(gpu)
    calls = [taken(buffer.__dlpack__()) for _ in range(8)]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with gpu._blocks._lock, gpu._lock:  # type: ignore[attr-defined]
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    began = time.monotonic()
    native_threads(calls)
    took = time.monotonic() - began
    done.set()
    thread.join()
    assert took < 20, "they waited for the lock"
    assert gpu.live_exports() == 0


def test_a_python_thread_that_drops_the_last_array(gpu: GpuBackend) -> None:
    memory = gpu.alloc_host_pinned(64)
    arrays = [np.from_dlpack(view(gpu, memory.address, 16, "f32")) for _ in range(8)]
    threads = [threading.Thread(target=arrays.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpu.free_host_pinned(memory)


START = """
import ctypes, sys, threading
import numpy as np
from gpu_runtime import from_dlpack, view
from gpu_runtime.host import HostBackend
from gpu_runtime.interop import dlpack
gpu = HostBackend(check=True)
ptr = gpu.alloc(48)
gpu.copy_h2d(np.arange(12, dtype=np.float32), ptr)
buffer = view(gpu, ptr, 12, "f32")
def taken(version):
    capsule = buffer.__dlpack__(max_version=version)
    names = dlpack.names_of(capsule)
    managed = dlpack.managed_of(capsule, names)
    dlpack.mark_used(capsule, names)
    return ctypes.addressof(managed), managed.deleter
libc = ctypes.CDLL(None)
"""

ENDS: dict[str, str] = {
    "an array, a view, a capsule and an import are left": """
array, memory = np.from_dlpack(buffer), buffer.memoryview()
capsules = [buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 0))]
used = buffer.__dlpack__()
imported = from_dlpack(gpu, used)
foreign = from_dlpack(gpu, np.arange(5))
""",
    "they are left where the end is reached last": """
sys.kept = [np.from_dlpack(buffer), buffer.__dlpack__(), from_dlpack(gpu, np.arange(5)), buffer.memoryview()]
np.kept = sys.kept
cycle = [buffer.__dlpack__()]
cycle.append(cycle)
""",
    "C deletes after Python has ended": """
exit_call = libc.__cxa_atexit
exit_call.argtypes = (ctypes.c_void_p,) * 3
for version in (None, (1, 0)):
    tensor, deleter = taken(version)
    assert exit_call(deleter, tensor, None) == 0
""",
    "C reads the memory after Python has ended": """
tensor, deleter = taken(None)
libc.__cxa_atexit.argtypes = (ctypes.c_void_p,) * 3
libc.__cxa_atexit(ctypes.cast(libc.puts, ctypes.c_void_p), ptr, None)
gpu.copy_h2d(np.frombuffer(b"still here\\0\\0", np.uint8), ptr)
""",
    "C deletes on its own thread as Python ends": """
create = libc.pthread_create
create.argtypes = (ctypes.c_void_p,) * 4
import atexit
@atexit.register
def last():
    for version in (None, (1, 0)):
        tensor, deleter = taken(version)
        thread = ctypes.c_void_p()
        create(ctypes.addressof(thread), None, deleter, tensor)
""",
}


@host_only
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_interpreter(gpu: GpuBackend, end: str) -> None:
    """Nothing crashes and nothing is said, whatever is still exported, and whoever deletes it when."""
    script = START + ENDS[end]
    for _ in range(3 if "own thread" in end else 1):
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-X", "faulthandler", "-W", "error", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("still here\n" if "reads" in end else "")
