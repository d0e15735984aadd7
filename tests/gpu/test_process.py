# SPDX-License-Identifier: MIT OR Apache-2.0
"""What needs a process of its own: forks, kernels that fail, leaks, warnings, and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # far more than it takes: only what hangs is stopped by it


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script that begins with the toy's names imported and a backend open; a UserWarning ends it."""
    head = """
import logging, os, sys
import numpy as np
from gpu_runtime.errors import DeviceError
from tests.backends import open_cuda
from tests.gpu_runtime.toy import FAIL, REGISTRY, launch, values
from tests.ops.harness import download, upload
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
X = np.ones(4, dtype=np.float32)
gpu = open_cuda(ops=REGISTRY)
"""
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", "ignore::DeprecationWarning", "-c", head + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_backend_does_not_survive_a_fork() -> None:
    """In the child every call is refused at once and none hangs; the parent works on."""
    done = run("""
ptr = upload(gpu, X)
child = os.fork()
if not child:
    refused = 0
    copy, run = lambda: gpu.copy_h2d(X, ptr), lambda: launch(gpu, values(ptr, ptr))
    for call in (lambda: gpu.alloc(8), gpu.synchronize, copy, run):
        try:
            call()
        except DeviceError as error:
            refused += "fork" in str(error)
    gpu.close()
    os._exit(10 + refused)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
launch(gpu, values(ptr, ptr))
print("child", status, "parent", download(gpu, ptr, X).tolist())
gpu.free(ptr)
gpu.close()
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child 14 parent [2.0, 2.0, 2.0, 2.0]\n"
    assert done.stderr == ""


def test_a_kernel_that_fails_is_named() -> None:
    """With `debug_sync_kernels` by the launch itself; what comes after is refused by the driver, and nothing hangs."""
    done = run("""
ptr = upload(gpu, X)
gpu.debug_sync_kernels = True
launch(gpu, values(ptr, ptr))
for call in (lambda: launch(gpu, values(ptr, ptr, factor=FAIL)), gpu.synchronize, lambda: gpu.copy_h2d(X, ptr)):
    try:
        call()
    except DeviceError as error:
        print("refused:", str(error).splitlines()[0])
sys.stdout.flush()
os._exit(0)
""")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("refused: kernel toy_f32 failed: ")
    assert all(line.startswith("refused: ") for line in lines)


def test_closing_after_a_failure_ends() -> None:
    """With an error or without one, but not never, and not with a crash."""
    done = run("""
ptr = upload(gpu, X)
launch(gpu, values(ptr, ptr, factor=FAIL))
try:
    gpu.close()
except DeviceError:
    pass
gpu.close()
print("closed")
""")
    assert "closed" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_process_that_forgets_everything_ends_quietly() -> None:
    """Open streams, events, graphs, pinned memory and work in flight at the interpreter's end."""
    done = run("""
ptr, stream, event = upload(gpu, X), gpu.create_stream(), gpu.create_event()
memory = gpu.alloc_host_pinned(16)
gpu.begin_capture(stream)
launch(gpu, values(ptr, ptr), stream)
graph = gpu.end_capture(stream)
gpu.launch_graph(graph, stream)
gpu.copy_d2h_async(ptr, memory.array, stream)
gpu.begin_capture()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_leaks_are_logged_when_it_is_closed() -> None:
    done = run("""
gpu.alloc(100, tag="forgotten")
gpu.close()
""")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("WARNING ")
    assert "100 bytes" in line
    assert "for forgotten" in line


def test_the_command_translates_on_a_gpu() -> None:
    words = ("metrale", "translate", "--device", "cuda", "--to", "fra_Latn", "The garage door is open.")
    command = [sys.executable, "-W", "error::UserWarning", "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "La porte du garage est ouverte.\n"


def test_the_doctor_finds_the_gpu_ready() -> None:
    command = [sys.executable, "-m", "metrale", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
    assert b'"cuda": "ready' in done.stdout, done.stdout.decode() + done.stderr.decode()
